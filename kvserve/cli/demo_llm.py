"""`kvserve demo-llm`."""


def demo_llm() -> None:
    """A real model: process A prefills, process B continues from fetched KV."""
