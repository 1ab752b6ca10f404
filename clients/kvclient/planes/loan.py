"""A kept data connection that a fetch names in its request, to save the offer and the hello.

From the request on the server may use it, also before its first answer has come. So whatever ends
the fetch before that closes the connection; over shm it waits until the server has, since the
server may be writing into the region (T6, as in `shm.py`).
"""

from collections.abc import Sequence
from typing import Final

from kvclient.planes.shm import until_quiet
from kvclient.planes.tcp import DataConnections
from kvclient.region import Region
from kvserve.data_socket import DataSocket
from kvserve.errors import ServerFault
from kvserve.format.records import RegionHead, encode_region
from kvserve.v1 import kvserve_pb2 as pb

_SPANS_MAX: Final = 256
"""Of a payload in more pieces the request would grow too long."""


class Loan:
    """What one request names; always `end` it. `connection`: None if there is none to name."""

    def __init__(
        self,
        connections: DataConnections,
        plane: str,
        region: Region,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._connections = connections
        self._region_head = RegionHead(False, len(spans), region.size_bytes)
        self._spans = spans
        self.connection = connections.lend(plane, region) if len(spans) <= _SPANS_MAX else None

    def named(self) -> pb.KeptConnection:
        """For the request."""
        assert self.connection is not None, "nothing was lent"
        region = encode_region(self._region_head, self._spans) if self._spans else b""
        return pb.KeptConnection(secret=self.connection.secret, region=region)

    def settle(self, head: pb.FetchHead) -> DataSocket | None:
        """The server has answered. What it takes is the caller's from here on. If no payload comes
        it is kept for the next request; if the server makes an offer it does not have it any more.

        Raises:
            ServerFault: the server takes what was not named.
        """
        connection, self.connection = self.connection, None
        if head.data.is_kept:
            if connection is None:
                raise ServerFault("the server uses a connection that the request did not name")
            return connection
        if connection is not None:
            if head.HasField("data"):
                connection.close()
            else:
                self._connections.keep(connection)
        return None

    async def end(self) -> None:
        """Without an answer nobody knows what the server does with it."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if connection.is_local:
            await until_quiet(connection)
        else:
            connection.close()
