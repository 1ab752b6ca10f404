"""Stores over nixl, server side: one-sided reads out of the client's memory.

The client says where its region is, as for a fetch, and of each frame that it is there (OFFERED).
The server reads it into a registered slot and then says so (TAKEN): from then on the bytes are the
client's again. The frame is checked in the slot, where the client cannot reach it, and written from
there. The server reads rather than the client writes, so that no client ever gets the key to a
server's memory.

Several reads are in flight, so that reading frame n + 1 overlaps checking and writing frame n.

T6: reads in flight cannot be taken back. See `NixlPort.retire` for how a store ends early.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from kvserve.data_socket import DataSocket
from kvserve.errors import KvserveError, ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.records import HEAD_SIZE_BYTES, RecordHead, RecordKind, encode_taken
from kvserve.model import ChunkStatus, Descriptor
from kvserve.transfer.planes.base import IncomingFrame
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.grpc import Read, Write
from kvserve.transfer.planes.nixl_port import IN_FLIGHT_MAX, InFlight, NixlPort, say_quiet
from kvserve.transfer.planes.nixl_slots import Slot
from kvserve.transfer.planes.nixl_target import Target, receive_target
from kvserve.transfer.planes.shared_memory import PayloadOrder
from kvserve.transfer.planes.tcp import TcpStorePlane

_CONTEXTS_MAX = 16


class Pulled:
    """A frame that is being read into a slot. `is_kept`: the slot is its place to the end; else it
    is for the way only."""

    __slots__ = ("header", "is_kept", "read", "size_bytes", "slot")

    def __init__(
        self, header: FrameHeader, size_bytes: int, slot: Slot, read: InFlight, *, is_kept: bool
    ) -> None:
        self.header = header
        self.size_bytes = size_bytes
        self.slot = slot
        self.read = read
        self.is_kept = is_kept


class NixlStorePlane(TcpStorePlane):
    """Implements `StorePlane`."""

    name = "nixl"
    _frame_kind = RecordKind.OFFERED

    def __init__(
        self,
        read: Read,
        write: Write,
        frame_size_bytes_max: int,
        port: DataPort,
        *,
        nixl: NixlPort,
        descriptor: Descriptor,
    ) -> None:
        super().__init__(read, write, frame_size_bytes_max, port)
        self._nixl = nixl
        self._order = PayloadOrder(descriptor)
        self._target: Target | None = None
        self._used = ExitStack()
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        # At most what `_room` lets in, and the end.
        self._queue: asyncio.Queue[Pulled | BaseException | None] = asyncio.Queue()
        self._pulling: asyncio.Task[None] | None = None
        self._reads: list[InFlight] = []

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pulling, self._pulling = self._pulling, None  # it keeps the traceback of its error
        if pulling is not None:
            pulling.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        _let_go_of_slots(error)
        try:
            if error is not None or not self.is_finished:
                await self._end_early()
        finally:
            self._used.close()
            await super().__aexit__(kind, error, traceback)

    async def _end_early(self) -> None:
        """The client waits for the word that its region is quiet."""
        connection, target = self._connection, self._target
        if connection is None:
            return
        if target is None:  # nothing was ever read
            await say_quiet(connection)
            return
        self._connection = None
        self._nixl.retire(self._port, connection, target.remote, self._reads)

    async def needs(self, statuses: list[ChunkStatus]) -> None:
        await super().needs(statuses)
        if self._connection is not None:
            size_bytes = self._order.size_bytes
            self._target = await receive_target(self._connection, size_bytes, self._nixl)
            self._used.enter_context(self._nixl.using(self._target.remote))

    async def frames(self) -> AsyncIterator[IncomingFrame]:
        connection, target = self._connection, self._target
        if connection is None or target is None:
            async for unexpected in super().frames():
                yield unexpected
            return
        pulling = self._pull(connection, target)
        self._pulling = asyncio.get_running_loop().create_task(pulling)
        self._pulling.add_done_callback(self._pulled_all)
        while (frame := await self._next_frame(connection)) is not None:
            yield frame
            del frame  # or its slot would be held until the next one is there
        self.is_finished = True

    async def _next_frame(self, connection: DataSocket) -> IncomingFrame | None:
        pulled = await self._queue.get()
        if pulled is None:
            return None
        if isinstance(pulled, BaseException):
            raise pulled
        if (error := await asyncio.shield(pulled.read.ended)) is not None:
            raise ServerUnavailable(str(error))  # not itself: other transfers may have the same
        self._room.release()
        await connection.send((encode_taken(),))
        payload = pulled.slot.view[: pulled.size_bytes]
        if pulled.is_kept:
            return pulled.header, payload, _nothing  # the slot goes with the last view of it
        buffers = self._port.buffers
        buffer = buffers.take(pulled.size_bytes)
        buffer[: pulled.size_bytes] = payload
        return pulled.header, buffer[: pulled.size_bytes], partial(buffers.give, buffer)

    async def _pull(self, connection: DataSocket, target: Target) -> None:
        """Starts the read of each frame that is offered."""
        raw_head = memoryview(bytearray(HEAD_SIZE_BYTES))
        while (head := await self._next_head(connection, raw_head)) is not None:
            checksums = bytearray(head.extra_size_bytes)
            await connection.receive([memoryview(checksums)])
            await self._room.acquire()
            self._queue.put_nowait(self._start(target, head, bytes(checksums)))

    def _pulled_all(self, pulling: "asyncio.Task[None]") -> None:
        """None or an error is the end of the queue."""
        if not pulling.cancelled():
            self._queue.put_nowait(pulling.exception())

    def _start(self, target: Target, head: RecordHead, checksums: bytes) -> Pulled:
        header = FrameHeader(head.layer_index, head.first_chunk, head.slice_offset, checksums)
        at = self._order.at(head.layer_index, head.first_chunk, head.slice_offset)
        there = target.pieces(at, head.payload_size_bytes)
        slots = self._nixl.slots
        slot = slots.take_to_keep()
        is_kept = slot is not None
        slot = slot or slots.take()
        read = self._nixl.read(target.remote, slot, there)
        self._reads = [it for it in self._reads if not it.ended.done()]
        self._reads.append(read)
        return Pulled(header, head.payload_size_bytes, slot, read, is_kept=is_kept)


def _let_go_of_slots(error: BaseException | None) -> None:
    """Errors live on for a while, in cycles, and with them would the frames of Python that they
    went through, and the slots in those. Defects, whose stack is logged, keep theirs."""
    for _ in range(_CONTEXTS_MAX):
        if error is None:
            return
        if isinstance(error, KvserveError | asyncio.CancelledError):
            error.__traceback__ = None
        error = error.__context__


def _nothing() -> None:
    """Nobody has to be told."""
