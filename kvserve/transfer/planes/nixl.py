"""Fetches over nixl, server side: one-sided writes into the client's memory.

The client says where its region is and in which spans the payload goes. A frame is read into a
registered slot and written from there; no thread or copy of the client's is
involved. Its head (LANDED) goes out on the data connection once the write has ended, so heads,
misses and the end keep one order, and the client sleeps until a head is there.

Several writes are in flight, so that reading frame n + 1 overlaps writing frame n.

T6: writes in flight cannot be taken back. See `NixlPort.retire` for how a fetch ends early.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from kvserve.data_socket import DataSocket
from kvserve.errors import ServerUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.records import RecordKind, encode_frame, encode_miss
from kvserve.model import Descriptor, Verdict
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.planes.grpc import Write
from kvserve.transfer.planes.nixl_port import (
    IN_FLIGHT_MAX,
    InFlight,
    NixlPort,
    say_quiet,
)
from kvserve.transfer.planes.nixl_slots import Slot
from kvserve.transfer.planes.nixl_target import Target, receive_target
from kvserve.transfer.planes.shared_memory import PayloadOrder
from kvserve.transfer.planes.tcp import TcpFetchPlane, TcpFrame


class NixlFrame(TcpFrame):
    """A frame in a slot, or, where no slot was left to read into, in one of the port's buffers.
    `at`: where in the payload of all layers it belongs."""

    __slots__ = ("at", "slot")

    at: int
    slot: Slot | None


class Landing:
    """What one fetch has in flight, oldest first; a record goes out when its write has ended."""

    def __init__(self, connection: DataSocket) -> None:
        self._connection = connection
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._queue: asyncio.Queue[tuple[bytes, InFlight | None] | None] = asyncio.Queue()
        self._error: ServerUnavailable | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.writes: list[InFlight] = []

    async def room(self) -> None:
        """Before each `add`: waits while too much is in flight; raises what has failed."""
        await self._room.acquire()
        if self._error is not None:
            raise self._error

    def add(self, record: bytes, write: InFlight | None = None) -> None:
        if write is not None:
            self.writes = [it for it in self.writes if not it.ended.done()]
            self.writes.append(write)
        self._queue.put_nowait((record, write))

    async def finish(self) -> None:
        """Waits until all have gone out; raises what has failed."""
        self._queue.put_nowait(None)
        await self._task
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """No more records; the writes go on."""
        self._task.cancel()

    async def _run(self) -> None:
        while (item := await self._queue.get()) is not None:
            record, write = item
            try:
                if self._error is None:
                    if write is not None and (error := await asyncio.shield(write.ended)):
                        raise error
                    await self._connection.send((record,))
            except ServerUnavailable as error:
                self._error = error
            self._room.release()


class NixlFetchPlane(TcpFetchPlane):
    """Implements `FetchPlane`."""

    name = "nixl"

    def __init__(
        self,
        write: Write,
        port: DataPort,
        nixl: NixlPort,
        descriptor: Descriptor,
        layers: Sequence[int],
    ) -> None:
        super().__init__(write, port)
        self._nixl = nixl
        self._order = PayloadOrder(descriptor, layers)
        self._target: Target | None = None
        self._landing: Landing | None = None
        self._used = ExitStack()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ended_by = error
        try:
            if error is None and self._landing is not None:
                await self._landing.finish()
        except BaseException as found:
            ended_by = found
            raise
        finally:
            try:
                if ended_by is not None:
                    await self._end_early()
            finally:
                self._used.close()
                await super().__aexit__(kind, ended_by, traceback)

    async def _end_early(self) -> None:
        """The client waits for the word that its region is quiet."""
        connection, target, landing = self._connection, self._target, self._landing
        if connection is None:
            return
        if target is None or landing is None:  # nothing was ever written
            await say_quiet(connection)
            return
        landing.abandon()
        self._connection = None
        self._nixl.retire(self._port, connection, target.remote, landing.writes)

    async def head(self, verdicts: list[Verdict]) -> None:
        await super().head(verdicts)
        connection = self._connection
        if connection is None:
            return
        self._target = await receive_target(connection, self._order.size_bytes, self._nixl)
        self._used.enter_context(self._nixl.using(self._target.remote))
        self._landing = Landing(connection)

    def new_frame(
        self, header: FrameHeader, payload_size_bytes: int, *, may_be_in_place: bool
    ) -> NixlFrame:
        head = encode_frame(header, payload_size_bytes, RecordKind.LANDED)
        slot = self._nixl.slots.take_to_keep()
        buffer = self._port.buffers.take(payload_size_bytes) if slot is None else slot.view
        frame = NixlFrame(head, buffer, payload_size_bytes)
        frame.at = self._order.at(header.layer_index, header.first_chunk, header.slice_offset)
        frame.slot = slot
        return frame

    async def send(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, NixlFrame)
        assert self._landing is not None, "a frame without a hit"
        assert self._target is not None, "a frame without a target"
        await self._landing.room()
        there = self._target.pieces(frame.at, len(frame.payload))
        slot = frame.slot
        if slot is None:
            slot = self._nixl.slots.take()
            slot.view[: len(frame.payload)] = frame.payload
            self._port.buffers.give(frame.buffer)
        write = self._nixl.write(self._target.remote, slot, there)
        self._landing.add(frame.head, write)

    async def miss(self, chunk_index: int, verdict: Verdict) -> None:
        assert self._landing is not None, "a miss without a hit"
        await self._landing.room()
        self._landing.add(encode_miss(chunk_index, verdict))
