"""What a transfer needs of a way to move bytes; one file per plane implements it.

The rpc is the control path of every plane: the handle opens it, reads the server's first reply,
which names the plane (and comes over the data connection if the request has named one), and gives
both to the plane. Whatever ends a plane early (an error, a cancel,
the deadline), nothing touches the region once its method has ended.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import grpc

from kvclient.fetch_session import FetchSession, LayerEvent
from kvserve.format.frames import FrameHeader

PLANES: Final = ("shm", "nixl", "tcp", "grpc")
"""Best first."""

StoreCall = grpc.aio.StreamStreamCall[bytes, bytes]
Took = Callable[[list[LayerEvent]], None]


class FetchCall(Protocol):
    """The rpc of an open fetch."""

    async def read(self) -> object:
        """The next reply as bytes; anything else is the end. Raises what the rpc ends with."""

    def cancel(self) -> bool:
        """Ends the rpc."""


class Unreachable(Exception):
    """The plane's own connection cannot be made; no payload has moved. Another plane may do.

    `plane`: which one, filled in by who made the connection.
    """

    def __init__(self, plane: str, why: str) -> None:
        super().__init__(why)
        self.plane = plane


class FetchPlane(Protocol):
    """One open fetch on the client's side of a plane."""

    async def receive(self, call: FetchCall, session: FetchSession, took: Took) -> None:
        """Lands everything that comes; `took` gets the layers that it completes.

        Returns when the server has ended the call in order, whatever the session lacks then.

        Raises:
            Unreachable: see there.
        """


class StorePlane(Protocol):
    """One open store on the client's side of a plane; `open` first, `close` after it, always.

    What its methods raise when the server has ended the store is up to the plane; the call's status
    says why.
    """

    async def open(self) -> None:
        """Raises `Unreachable`."""

    async def send(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        """Sends one frame; its bytes are the plane's until `settle` has returned."""

    async def settle(self) -> None:
        """On return the bytes of all frames that were sent are the caller's again."""

    async def finish(self) -> None:
        """Says that everything has been sent."""

    async def close(self, *, is_clean: bool) -> None:
        """The store has ended; `is_clean`: with a result. Wakes who waits in the others, at once;
        returns once nothing that could do harm reads the region."""
