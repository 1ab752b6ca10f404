"""Why an address cannot be listened on: gRPC says only that it failed."""

import errno
import socket


def why_not_bound(address: str) -> str:
    """What the system says to a bind of HOST:PORT; empty if it has nothing against it."""
    if address.startswith("unix:"):
        return ""
    host, _, port = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host.strip("[]"), int(port)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "the port is in use, by another server?"
        return error.strerror or str(error)
    return ""
