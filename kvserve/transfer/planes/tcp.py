"""The tcp plane, server side: payload frames as records on a data connection of their own.

A fetch's frame is read from disk into a buffer that is used again for the next one, and goes from
there to the kernel in one call with its head; a store's comes from the kernel into such a buffer.
Python copies no payload, and neither does anything between Python and the kernel.

The rpc stays the control path: what a transfer answers besides frames and misses, and how it ends,
is there; but the first reply of a fetch whose request names a connection comes over that. A
transfer that moves no payload (all misses, everything known) has no data connection.
"""

from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import Self

from kvserve.data_socket import DataSocket
from kvserve.errors import InvalidRequest
from kvserve.format.frames import FrameHeader
from kvserve.format.records import (
    EXTRA_SIZE_BYTES_MAX,
    HEAD_SIZE_BYTES,
    RecordHead,
    RecordKind,
    decode_head,
    encode_first_reply,
    encode_frame,
    encode_miss,
)
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.planes.base import IncomingFrame, OutgoingFrame
from kvserve.transfer.planes.data_port import DataPort, Expected
from kvserve.transfer.planes.grpc import GrpcStorePlane, Read, Write, fetch_head
from kvserve.v1 import kvserve_pb2 as pb


class Connected:
    """A plane with a data connection: as a context it gives it back, or closes it on an error."""

    _port: DataPort
    _connection: DataSocket | None = None
    _is_local = False

    def _offer(self, expected: Expected) -> pb.DataOffer:
        return pb.DataOffer(address=self._port.address, secret=expected.secret)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if error is None and self._is_at_a_record_s_end():
                self._port.take_back(connection)
            else:
                self._port.close(connection)

    def _is_at_a_record_s_end(self) -> bool:
        return True


class TcpFrame:
    """A frame in one of the port's buffers."""

    __slots__ = ("buffer", "head", "payload")

    is_in_place = False

    def __init__(self, head: bytes, buffer: memoryview, payload_size_bytes: int) -> None:
        self.head = head
        self.buffer = buffer
        self.payload = buffer[:payload_size_bytes]


class TcpFetchPlane(Connected):
    """Implements `FetchPlane`; the head goes through `write`, as one serialized `FetchReply`, or
    over the connection that the request has named."""

    name = "tcp"

    def __init__(self, write: Write, port: DataPort, kept: pb.KeptConnection | None = None) -> None:
        self._write = write
        self._port = port
        self._kept = kept

    async def head(self, verdicts: list[Verdict]) -> None:
        if all(verdict.status is not ChunkStatus.HIT for verdict in verdicts):
            await self._write(fetch_head(verdicts, self.name, None))
            return
        if self._kept is not None and await self._takes_kept(self._kept):
            assert self._connection is not None, "it was taken"
            # Not by the rpc: grpcio's threads may come to it only after some frames.
            reply = fetch_head(verdicts, self.name, None)
            await self._connection.send((encode_first_reply(reply), reply))
            return
        with self._port.expect() as expected:
            await self._write(fetch_head(verdicts, self.name, self._offer(expected)))
            self._connection = await expected.connection()

    async def _takes_kept(self, kept: pb.KeptConnection) -> bool:
        """Whether the connection that the request named is here."""
        self._connection = await self._port.kept(kept.secret, is_local=self._is_local)
        return self._connection is not None

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> TcpFrame:
        head = encode_frame(header, payload_size_bytes)
        return TcpFrame(head, self._port.buffers.take(payload_size_bytes), payload_size_bytes)

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, TcpFrame)
        assert self._connection is not None, "a frame without a hit"
        await self._connection.send((frame.head, frame.payload))
        self._port.buffers.give(frame.buffer)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        assert self._connection is not None, "a miss without a hit"
        await self._connection.send((encode_miss(chunk_index, verdict),))


class TcpStorePlane(Connected, GrpcStorePlane):
    """Implements `StorePlane`: frames from the data connection, everything else as on grpc."""

    name = "tcp"
    _frame_kind = RecordKind.PAYLOAD

    def __init__(self, read: Read, write: Write, frame_size_bytes_max: int, port: DataPort) -> None:
        super().__init__(read, write, frame_size_bytes_max)
        self._port = port

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        if ChunkStatus.NEEDED not in statuses:
            await self._say_needs(statuses, None)
            return
        with self._port.expect() as expected:
            await self._say_needs(statuses, self._offer(expected))
            self._connection = await expected.connection()

    async def frames(self) -> AsyncIterator[IncomingFrame]:
        connection = self._connection
        if connection is None:
            async for frame in super().frames():
                yield frame
            return
        raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
        extra = memoryview(bytearray(EXTRA_SIZE_BYTES_MAX))
        buffers = self._port.buffers
        while (head := await self._next_head(connection, raw_head)) is not None:
            buffer = buffers.take(head.payload_size_bytes)
            payload = buffer[: head.payload_size_bytes]
            checksums = extra[: head.extra_size_bytes]
            await self._take_frame(connection, head, checksums, payload)
            header = FrameHeader(
                head.layer_index, head.first_chunk, head.slice_offset, bytes(checksums)
            )
            yield header, payload, partial(buffers.give, buffer)
        self.is_finished = True

    async def _next_head(self, connection: DataSocket, raw_head: memoryview) -> RecordHead | None:
        """The head of the next frame; None: the client has sent everything."""
        await connection.receive([raw_head])
        head = decode_head(raw_head)
        if head.kind is RecordKind.FINISH:
            return None
        if head.kind is not self._frame_kind:
            raise InvalidRequest(
                f"a store over {self.name} takes {self._frame_kind.name} records, got "
                f"{head.kind.name}"
            )
        size_max = self._port.buffers.frame_size_bytes
        if not 0 < head.payload_size_bytes <= size_max:
            raise InvalidRequest(
                f"layer {head.layer_index}: a frame with {head.payload_size_bytes} bytes of "
                f"payload; must be 1 to {size_max}"
            )
        return head

    async def _take_frame(
        self,
        connection: DataSocket,
        head: RecordHead,
        checksums: memoryview,
        payload: memoryview,
    ) -> None:
        """Fills `checksums` and `payload`."""
        await connection.receive([checksums, payload])

    def _is_at_a_record_s_end(self) -> bool:
        return self.is_finished
