"""The OpenAI-compatible HTTP server; it builds on jaxserve's host side and never imports jax."""
