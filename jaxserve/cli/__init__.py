"""The `jaxserve` command."""
