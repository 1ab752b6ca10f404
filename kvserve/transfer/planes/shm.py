"""The shm plane, server side: payload in memory that a client on the same host shares.

The client passes its memory as a file descriptor and says where in it the payload is. Only the
heads of records travel.

What a fetch reads from page cache goes straight to its place: the event loop does that, so nothing
writes there once the fetch has ended, and the client checks it there. What threads read goes
through a buffer of the server's own, and so does what a store brings: a thread that hangs in a file
call would hold the client's memory, and the client can write into that at any time. A server that
verified there would set good chunks aside because of somebody's wild pointer, and one that stored
from there could publish bytes that never matched their checksum.

A store tells its client of each frame that it has copied (TAKEN): from then on the bytes are the
client's again.
"""

from collections.abc import Sequence
from types import TracebackType

from kvserve.data_socket import DataSocket
from kvserve.format.frames import FrameHeader
from kvserve.format.records import RecordHead, RecordKind, encode_frame, encode_taken
from kvserve.model import ChunkStatus, Descriptor, Verdict
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.planes.data_port import DataPort, Expected
from kvserve.transfer.planes.grpc import Read, Write
from kvserve.transfer.planes.shared_memory import (
    PayloadOrder,
    SharedPayload,
    receive_shared,
    shared_again,
)
from kvserve.transfer.planes.tcp import Connected, TcpFetchPlane, TcpFrame, TcpStorePlane
from kvserve.v1 import kvserve_pb2 as pb


class _Shared(Connected):
    """A plane whose payload is in shared memory, which it lets go of at its end."""

    _order: PayloadOrder
    _payload: SharedPayload | None = None
    _is_local = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._payload is not None:
            self._payload.close()
        await super().__aexit__(kind, error, traceback)

    def _offer(self, expected: Expected) -> pb.DataOffer:
        return pb.DataOffer(address=self._port.unix_address, secret=expected.secret)

    async def _receive_memory(self) -> None:
        """Call it once the connection is there, if there is to be one."""
        if self._connection is not None:
            self._payload = await receive_shared(self._connection, self._order.size_bytes)


class ShmFrame(TcpFrame):
    """A frame that knows where in the payload it belongs, or is there already."""

    __slots__ = ("at", "is_in_place")

    at: int


class ShmFetchPlane(_Shared, TcpFetchPlane):
    """Implements `FetchPlane`."""

    name = "shm"

    def __init__(
        self,
        write: Write,
        port: DataPort,
        descriptor: Descriptor,
        layers: Sequence[int],
        *,
        kept: pb.KeptConnection | None = None,
    ) -> None:
        super().__init__(write, port, kept)
        self._order = PayloadOrder(descriptor, layers)

    async def head(self, verdicts: list[Verdict]) -> None:
        await super().head(verdicts)
        if self._payload is None:
            await self._receive_memory()

    async def _takes_kept(self, kept: pb.KeptConnection) -> bool:
        if not await super()._takes_kept(kept):
            return False
        assert self._connection is not None, "it was taken"
        self._payload = shared_again(self._connection, kept.region, self._order.size_bytes)
        return True

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> ShmFrame:
        assert self._payload is not None, "a frame without memory"
        head = encode_frame(header, payload_size_bytes, RecordKind.LANDED)
        at = self._order.at(header.layer_index, header.first_chunk, header.slice_offset)
        place = self._payload.place(at, payload_size_bytes) if may_be_in_place else None
        buffer = self._port.buffers.take(payload_size_bytes) if place is None else place
        frame = ShmFrame(head, buffer, payload_size_bytes)
        frame.at = at
        frame.is_in_place = place is not None
        return frame

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, ShmFrame)
        assert self._connection is not None, "a frame without a hit"
        assert self._payload is not None, "a frame without memory"
        if not frame.is_in_place:
            self._payload.write(frame.at, frame.payload)
            self._port.buffers.give(frame.buffer)
        await self._connection.send((frame.head,))


class ShmStorePlane(_Shared, TcpStorePlane):
    """Implements `StorePlane`."""

    name = "shm"
    _frame_kind = RecordKind.OFFERED

    def __init__(
        self,
        read: Read,
        write: Write,
        frame_size_bytes_max: int,
        port: DataPort,
        descriptor: Descriptor,
    ) -> None:
        super().__init__(read, write, frame_size_bytes_max, port)
        self._order = PayloadOrder(descriptor)

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        await super().needs(statuses)
        await self._receive_memory()

    async def _take_frame(
        self,
        connection: DataSocket,
        head: RecordHead,
        checksums: memoryview,
        payload: memoryview,
    ) -> None:
        assert self._payload is not None, "a frame without memory"
        await connection.receive([checksums])
        at = self._order.at(head.layer_index, head.first_chunk, head.slice_offset)
        self._payload.read(at, payload)
        await connection.send((encode_taken(),))
