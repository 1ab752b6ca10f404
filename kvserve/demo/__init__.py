"""What the demos run: real server, prefill and decode processes on this machine."""
