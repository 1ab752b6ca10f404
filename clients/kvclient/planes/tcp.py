"""The tcp plane, client side: frames are records on a data connection of their own.

Payload goes between the kernel and the region without any copy in between: the head of a record
says where the bytes belong, then the kernel puts them there. They are checked in the region.

A connection whose transfer ended well is kept for the next one, since a fetch by layers would else
connect for each layer. After any other end it is closed first of all: that is what makes the region
quiet.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from kvclient.fetch_session import FetchSession
from kvclient.planes.base import FetchCall, StoreCall, Took, Unreachable
from kvclient.region import Region
from kvclient.tls import Security
from kvserve.data_socket import Buffer, DataSocket
from kvserve.errors import InvalidRequest, MalformedMessage, ServerFault, ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.messages import chunk_status
from kvserve.format.records import (
    EXTRA_SIZE_BYTES_MAX,
    HEAD_SIZE_BYTES,
    HELLO_MAGIC,
    RecordKind,
    decode_head,
    decode_text,
    encode_finish,
    encode_frame,
)
from kvserve.model import Verdict
from kvserve.v1 import kvserve_pb2 as pb

_KEPT_MAX = 4
# Well below the time after which the server closes it (`transfer/planes/data_port.py`).
_KEPT_S = 30.0
_CONNECT_S = 1.0
# The server ends call and connection together; the call's status says why.
_STATUS_S = 1.0


class DataConnections:
    """The data connections of one client to one server: kept ones, and new ones.

    They belong to the loop that made them. `server_host` stands in where the server names none.
    """

    def __init__(self, server_host: str, security: Security | None = None) -> None:
        """`server_host`: as in an address, so in brackets if it is IPv6. `security`: of those that
        leave the host; loaded before the first is opened."""
        self._server_host = server_host
        self._security = security
        self._kept: list[tuple[float, DataSocket]] = []

    async def open(self, offer: pb.DataOffer, plane: str = "") -> DataSocket:
        """A connection that has shown the offer's secret. `plane`: where the address does not tell.

        Raises:
            Unreachable: the address does not answer at once.
        """
        where = self._resolved(offer.address)
        connection = self._take(lambda it: it.peer == where) or await self._connect(
            where, plane or _plane_of(where)
        )
        connection.secret = offer.secret
        try:
            await connection.send((HELLO_MAGIC, offer.secret))
        except ServerUnavailable as error:
            connection.close()
            raise Unreachable(plane or _plane_of(offer.address), str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def take_kept(self, plane: str, region: Region) -> DataSocket | None:
        """A kept connection that a fetch over `plane` into `region` may name in its request. It is
        the caller's until `keep`."""
        if plane not in ("shm", "tcp"):
            return None
        is_shared = plane == "shm"
        return self._take(
            lambda it: it.is_local == is_shared and (not is_shared or shares(it, region))
        )

    def keep(self, connection: DataSocket) -> None:
        """Its transfer has ended well."""
        connection.unwatch()
        now = time.monotonic()
        while self._kept and (len(self._kept) >= _KEPT_MAX or now - self._kept[0][0] > _KEPT_S):
            self._kept.pop(0)[1].close()
        self._kept.append((now, connection))

    def close(self) -> None:
        """Closes those that are kept."""
        kept, self._kept = self._kept, []
        for _, connection in kept:
            connection.close()

    def _take(self, fits: Callable[[DataSocket], bool]) -> DataSocket | None:
        """The one of those that was used last, if it is still good."""
        now = time.monotonic()
        for entry in reversed(self._kept):
            kept_at, connection = entry
            if not fits(connection):
                continue
            self._kept.remove(entry)
            if now - kept_at < _KEPT_S and connection.is_idle():
                return connection
            connection.close()
        return None

    def _resolved(self, address: str) -> str:
        return f"{self._server_host}{address}" if address.startswith(":") else address

    async def _connect(self, where: str, plane: str) -> DataSocket:
        refused = "no address"
        try:
            async with asyncio.timeout(_CONNECT_S):
                for family, target in await _targets(where):
                    sock = socket.socket(family, socket.SOCK_STREAM)
                    try:
                        sock.setblocking(False)
                        await asyncio.get_running_loop().sock_connect(sock, target)
                    except OSError as error:
                        refused = str(error)
                        sock.close()
                    except BaseException:
                        sock.close()
                        raise
                    else:
                        return await self._secured(sock, where)
        except TimeoutError:
            refused = f"no answer in {_CONNECT_S:g} s"
        except (OSError, InvalidRequest, ServerUnavailable) as error:
            refused = str(error)
        what = f"the data address {where} cannot be reached: {refused}"
        raise Unreachable(plane, what)

    async def _secured(self, sock: socket.socket, where: str) -> DataSocket:
        """Raises `InvalidRequest` or `ServerUnavailable` if the handshake fails."""
        if self._security is None or sock.family == socket.AF_UNIX:
            return DataSocket(sock, where)
        connection = self._security.data_socket(sock, where)
        try:
            await connection.handshake()
        except BaseException:
            connection.close()
            raise
        return connection


def shares(connection: DataSocket, region: Region) -> bool:
    """shm: whether the server has the region's memory from this connection."""
    return isinstance(connection.memory, ref) and connection.memory() is region


def is_local_address(address: str) -> bool:
    """Whether an offer's address is of this host only."""
    return address.startswith("unix:")


def _plane_of(address: str) -> str:
    return "shm" if is_local_address(address) else "tcp"


async def _targets(address: str) -> list[tuple[socket.AddressFamily, Any]]:
    """What `sock_connect` takes: of an abstract Unix socket, or every address of a host."""
    if address.startswith("unix:@"):
        return [(socket.AF_UNIX, "\0" + address.removeprefix("unix:@"))]
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM
    )
    return [(family, target) for family, _, _, _, target in found]


class TcpFetchPlane:
    """Implements `FetchPlane`."""

    def __init__(
        self, connections: DataConnections, offer: pb.DataOffer, kept: DataSocket | None
    ) -> None:
        """`kept`: what the server uses in place of its offer."""
        self._connections = connections
        self._offer = offer
        self._kept = kept

    async def receive(self, call: FetchCall, session: FetchSession, took: Took) -> None:
        connection = self._kept or await self._connections.open(self._offer)
        is_clean = False
        try:
            if self._kept is None:
                await self._begin(connection)
            await finish_fetch(connection, call, session, took)
            is_clean = True
        finally:
            if is_clean:
                self._connections.keep(connection)
            else:
                await self._end_early(connection, call)

    async def _begin(self, connection: DataSocket) -> None:
        """What comes right after a hello."""

    async def _end_early(self, connection: DataSocket, call: FetchCall) -> None:
        """Makes the region quiet."""
        connection.close()


async def finish_fetch(
    connection: DataSocket, call: FetchCall, session: FetchSession, took: Took
) -> None:
    """Takes all records and the end of the call."""
    try:
        await _take_records(connection, session, took)
    except ServerUnavailable:
        await raise_status(call)
        raise
    if isinstance(await call.read(), bytes):
        raise ServerFault("a reply came after the last layer")


async def _take_records(connection: DataSocket, session: FetchSession, took: Took) -> None:
    raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
    all_extra = memoryview(bytearray(EXTRA_SIZE_BYTES_MAX))
    while not session.is_finished:
        await connection.receive([raw_head])
        head = decode_head(raw_head)
        extra = all_extra[: head.extra_size_bytes]
        if head.kind in (RecordKind.PAYLOAD, RecordKind.LANDED):
            views = session.place(
                head.layer_index, head.first_chunk, head.slice_offset, head.payload_size_bytes
            )
            is_there = head.kind is RecordKind.LANDED
            await connection.receive([extra] if is_there else [extra, *views])
            events = session.landed(bytes(extra))
        elif head.kind is RecordKind.MISS:
            await connection.receive([extra])
            verdict = Verdict(chunk_status(head.slice_offset), decode_text(extra))
            events = session.miss(head.first_chunk, verdict)
        else:
            raise ServerFault(f"a record of kind {head.kind.name} in a fetch")
        if events:
            took(events)


async def receive_kind(connection: DataSocket, raw_head: memoryview) -> RecordKind:
    """The kind of the server's next record in a store, which is a head and no more.

    Raises:
        ServerFault: it is of no known kind.
        ServerUnavailable: the connection has ended.
    """
    await connection.receive([raw_head])
    try:
        return decode_head(raw_head).kind
    except MalformedMessage as error:
        raise ServerFault(str(error)) from error


async def raise_status(call: FetchCall | StoreCall) -> None:
    """Raises the status that the server has ended the call with, if it has."""
    try:
        async with asyncio.timeout(_STATUS_S):
            while isinstance(await call.read(), bytes):  # else EOF: it ended without an error
                pass
    except TimeoutError:
        return
    raise ServerFault("the server ended the stream before the last layer")


class TcpStorePlane:
    """Implements `StorePlane`."""

    def __init__(self, call: StoreCall, connections: DataConnections, offer: pb.DataOffer) -> None:
        self._call = call
        self._connections = connections
        self._offer = offer
        self._connection: DataSocket | None = None

    async def open(self) -> None:
        self._connection = await self._connections.open(self._offer)

    async def send(self, header: FrameHeader, views: Sequence[memoryview]) -> None:
        await self._send((encode_frame(header, sum(map(len, views))), *views))

    async def settle(self) -> None:
        """The kernel has its copies."""

    async def finish(self) -> None:
        await self._send((encode_finish(),))
        await self._call.done_writing()

    async def close(self, *, is_clean: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if is_clean:
                self._connections.keep(connection)
            else:
                connection.close()

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        with self._open_connection() as connection:
            await connection.send(buffers)

    @contextmanager
    def _open_connection(self) -> Iterator[DataSocket]:
        """Closes it if the block ends in the middle: nothing that follows could be read."""
        connection = self._connection  # `close` drops it, also while the block waits
        assert connection is not None, "not open"
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
