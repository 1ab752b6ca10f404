"""`kvserve demo`."""


def demo() -> None:
    """Prefill and decode processes over a real server, Llama-3.1-8B geometry."""
