"""kvserve: a KV-cache transfer service for LLM inference. See docs/architecture.md."""

__version__ = "0.1.0"
