"""What the bare cases have in common whose client talks to its server over one blocking socket."""

import socket
from types import TracebackType
from typing import Self

from kvserve.bench.rounds import Case


class SocketCase(Case):
    """As a context it closes the socket."""

    requests = 1

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
