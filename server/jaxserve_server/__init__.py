"""The OpenAI-compatible HTTP server of jaxserve."""
