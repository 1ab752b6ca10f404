"""A kept data connection that a fetch names in its request: no offer, no hello.

The server's first reply then comes over it, too. From the request on the server may use it, also
before that reply has come. So whatever ends the fetch before closes the connection; over shm it
waits until the server has, since the server may be writing into the region (T6, as in `shm.py`).
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from kvclient.planes.base import FetchCall
from kvclient.planes.shm import until_quiet
from kvclient.planes.tcp import DataConnections, is_local_address
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

_REPLY_SIZE_BYTES_MAX: Final = 64 << 20
_NAMED_SPANS_MAX: Final = 256
"""shm: of a payload in more pieces the request would grow too long."""


class FirstRead:
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
            await _ended(first)


class NamedConnection:
    """What one request names; always `end` it. `plane`: the one that the server is expected to
    take."""

    def __init__(
        self,
        connections: DataConnections,
        plane: str,
        region: Region,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._connections = connections
        self._plane = plane
        self._region = region
        self._spans = spans if plane == "shm" else ()
        self._is_taken = False
        self._connection: DataSocket | None = None
        if len(self._spans) <= _NAMED_SPANS_MAX:
            self._connection = connections.take_kept(plane, region)

    def name(self) -> pb.KeptConnection | None:
        """For the request."""
        if self._connection is None:
            return None
        where = b""
        if self._spans:
            head = RegionHead(False, len(self._spans), self._region.size_bytes)
            where = encode_region(head, self._spans)
        return pb.KeptConnection(secret=self._connection.secret, region=where)

    async def first_reply(self, call: FirstRead) -> object:
        """The first reply of the rpc, or the one that comes in its place over the connection."""
        connection = self._connection
        if connection is None:
            return await call.read()
        by_rpc = call.begin()
        by_connection = asyncio.create_task(_reply_over(connection))
        try:
            await asyncio.wait((by_rpc, by_connection), return_when=asyncio.FIRST_COMPLETED)
            if _is_mere_end(by_rpc):
                # It has overtaken what is on its way here: that is another stream.
                await asyncio.wait((by_connection,))
        except BaseException:
            await _ended(by_connection)
            raise
        if not by_connection.done():
            await _ended(by_connection)
            return await call.read()
        try:
            reply = by_connection.result()
        except ServerUnavailable:  # the server has closed it: it makes an offer, or the rpc ends
            self._connection = None
            connection.close()
            return await call.read()
        self._is_taken = True
        return reply

    def taken_by(self, head: pb.FetchHead) -> DataSocket | None:
        """What the server uses, the caller's from here on; None if it makes an offer or moves no
        payload.

        Raises:
            ServerFault: it uses the connection for another plane.
        """
        if self._is_taken and (head.plane or "grpc") != self._plane:
            raise ServerFault(f"a {self._plane} connection was taken for plane {head.plane}")
        connection, self._connection = self._connection, None
        if connection is None or self._is_taken:
            return connection
        is_offer = head.HasField("data")
        if is_offer and is_local_address(head.data.address) == connection.is_local:
            connection.close()  # the server has it no more
        else:
            self._connections.keep(connection)
        return None

    async def end(self) -> None:
        """Without a reply nobody knows what the server does with it."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if connection.is_local:
            await until_quiet(connection)
        else:
            connection.close()


def _is_mere_end(task: "asyncio.Task[object]") -> bool:
    """The rpc has ended well, without a reply."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return False
    return not isinstance(task.result(), bytes)


async def _ended(task: "asyncio.Task[object]") -> None:
    """Ends a task that nobody asks for its result any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def _reply_over(connection: DataSocket) -> object:
    raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
    await connection.receive([raw_head])
    head = decode_head(raw_head)
    size = head.payload_size_bytes
    if head.kind is not RecordKind.FIRST_REPLY or size > _REPLY_SIZE_BYTES_MAX:
        raise ServerFault(f"a fetch began with a record of kind {head.kind.name}, {size} bytes")
    reply = bytearray(size)
    await connection.receive([memoryview(reply)])
    return bytes(reply)
