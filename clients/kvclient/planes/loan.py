"""A kept data connection that a fetch names in its request: no offer, no hello.

The server's first answer then comes over it, too. From the request on the server may use it, also
before that answer has come. So whatever ends the fetch before closes the connection; over shm it
waits until the server has, since the server may be writing into the region (T6, as in `shm.py`).
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from kvclient.planes.base import FetchCall
from kvclient.planes.shm import until_quiet
from kvclient.planes.tcp import DataConnections
from kvclient.region import Region
from kvserve.data_socket import DataSocket
from kvserve.errors import ServerFault, ServerUnavailable
from kvserve.format.records import (
    HEAD_SIZE_BYTES,
    RecordKind,
    RegionHead,
    decode_head,
    encode_region,
)
from kvserve.v1 import kvserve_pb2 as pb

_HEAD_SIZE_BYTES_MAX: Final = 64 << 20
_SPANS_MAX: Final = 256
"""Of a payload in more pieces the request would grow too long."""


class Answers:
    """The rpc of a fetch, whose first read may be waited for beside something else."""

    def __init__(self, call: FetchCall) -> None:
        self._call = call
        self._first: asyncio.Task[object] | None = None

    def begin(self) -> "asyncio.Task[object]":
        """The first read, which the next `read` is going to give."""
        self._first = asyncio.create_task(self._call.read())
        return self._first

    async def read(self) -> object:
        """See `FetchCall`."""
        first, self._first = self._first, None
        return await (self._call.read() if first is None else first)

    def cancel(self) -> bool:
        """See `FetchCall`."""
        return self._call.cancel()

    async def end(self) -> None:
        """Ends the rpc, whatever is still asked of it: nothing holds it any more."""
        self._call.cancel()
        first, self._first = self._first, None
        if first is not None:
            first.cancel()
            await asyncio.wait([first])
            if not first.cancelled():
                first.exception()  # nobody asks for it


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
        self._is_taken = False
        self.connection = connections.lend(plane, region) if len(spans) <= _SPANS_MAX else None

    def named(self) -> pb.KeptConnection:
        """For the request."""
        assert self.connection is not None, "nothing was lent"
        region = encode_region(self._region_head, self._spans) if self._spans else b""
        return pb.KeptConnection(secret=self.connection.secret, region=region)

    async def first_answer(self, call: "Answers") -> object:
        """The first reply of the rpc, or what comes in its place over the connection."""
        connection = self.connection
        if connection is None:
            return await call.read()
        by_rpc = call.begin()
        by_connection = asyncio.create_task(_reply_over(connection))
        try:
            await asyncio.wait((by_rpc, by_connection), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not by_connection.done():
                by_connection.cancel()
                await asyncio.wait([by_connection])
        if by_connection.cancelled():
            return await call.read()
        try:
            reply = by_connection.result()
        except ServerUnavailable:  # the server has closed it: it makes an offer, or the rpc ends
            self.connection = None
            connection.close()
            return await call.read()
        self._is_taken = True
        return reply

    def settle(self, head: pb.FetchHead) -> DataSocket | None:
        """The server has answered. What it uses is the caller's from here on. If no payload comes
        it is kept for the next request; if the server makes an offer it does not have it any more.
        """
        connection, self.connection = self.connection, None
        if connection is None or self._is_taken:
            return connection
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


async def _reply_over(connection: DataSocket) -> bytes:
    raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
    await connection.receive([raw_head])
    head = decode_head(raw_head)
    if head.kind is not RecordKind.HEAD or head.payload_size_bytes > _HEAD_SIZE_BYTES_MAX:
        size = head.payload_size_bytes
        raise ServerFault(f"a fetch began with a record of kind {head.kind.name}, {size} bytes")
    reply = bytearray(head.payload_size_bytes)
    await connection.receive([memoryview(reply)])
    return bytes(reply)
