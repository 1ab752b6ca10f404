"""The server's side of one fetch: read, verify, send, layer by layer.

Theory of operation. Frames are made in plan order. The head of the window is read inline when its
bytes are in page cache (the common case: they are then still in the CPU's cache when they are sent,
and a thread hop would cost a quarter of the throughput). When a read would wait for the disk, the
frame goes to the fs threads and the window fills up behind it, so that up to `frames_in_flight`
reads run at once. Frames are verified and sent strictly in order.

Memory is bounded by `frames_in_flight` frames. A chunk that turns out bad is reported once and left
out from there on; the others go on.

A read that gives no answer in time takes its chunk out, and for this fetch those behind it in its
frame. After some `_LATE_MAX` timeouts' worth of such waiting only page cache is read any more: a
fetch from a hung mount ends in time, whatever it asks for.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic

from kvserve.format.frames import FrameHeader
from kvserve.format.plan import FramePlan, leave_out, plan_runs, runs
from kvserve.format.verify import SliceVerifier
from kvserve.model import ChunkStatus, Layout, Verdict
from kvserve.transfer.batches import overdue, quiet
from kvserve.transfer.chunk_job import ChunkJob
from kvserve.transfer.planes.base import FetchPlane, OutgoingFrame
from kvserve.transfer.ports import C, SliceSource
from kvserve.transfer.turns import Turns

_LATE_MAX = 1.5


@dataclass(slots=True)
class _Reading(Generic[C]):
    """A frame being filled, from position `start` on by `job`; `faults` by position."""

    plan: FramePlan
    frame: OutgoingFrame
    faults: dict[int, Verdict]
    start: int = 0
    job: ChunkJob[C] | None = None
    future: "asyncio.Future[None] | None" = None


class FetchPump(Generic[C]):
    """Runs one fetch; `chunks[i]` is None where chunk i is a miss already.

    Raises from `run` only what the plane raises: the client went away.
    """

    def __init__(
        self,
        source: SliceSource[C],
        threads: Executor,
        plane: FetchPlane,
        *,
        layout: Layout,
        chunks: Sequence[C | None],
        frame_size_bytes: int,
        frames_in_flight: int,
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._source = source
        self._threads = threads
        self._plane = plane
        self._layout = layout
        self._chunks = list(chunks)
        present = [index for index, chunk in enumerate(chunks) if chunk is not None]
        self._runs = list(runs(present))
        self._frame_size_bytes = frame_size_bytes
        self._frames_in_flight = frames_in_flight
        self._verifier = SliceVerifier()
        self._late_s = 0.0
        self._gave_up: Verdict | None = None
        self.faults: dict[int, Verdict] = {}
        self.has_read = False
        """A read that was not inline has worked."""

    async def run(self, layers: Sequence[int]) -> None:
        plans = self._plans(layers)
        window: deque[_Reading[C]] = deque()
        try:
            while True:
                await self._turns.take()
                # Fill the window only while its head waits for a disk: what is in page cache is
                # read right before it is sent.
                while len(window) < self._frames_in_flight and (
                    not window or window[0].future is not None
                ):
                    plan = next(plans, None)
                    if plan is None:
                        break
                    window.append(self._start(plan))
                if not window:
                    return
                await self._finish(window.popleft())
        finally:
            # Threads still write into the frames and use the descriptors: wait for them.
            try:
                await quiet(it.future for it in window if it.future is not None)
            finally:
                for reading in window:
                    if reading.job is not None and reading.future is not None:
                        reading.job.give_up(overdue(reading.future))

    def _plans(self, layers: Sequence[int]) -> Iterator[FramePlan]:
        for layer_index in layers:
            if not self._runs:
                return
            yield from plan_runs(
                layer_index,
                self._layout.slice_sizes[layer_index],
                tuple(self._runs),  # as of now: a chunk that turns bad splits its run
                frame_size_bytes=self._frame_size_bytes,
            )

    def _start(self, plan: FramePlan) -> _Reading[C]:
        frame = self._plane.new_frame(
            self._header(plan, plan.first_chunk, plan.chunk_count), plan.payload_size_bytes
        )
        size = plan.span.size_bytes
        for position in range(plan.chunk_count):
            chunk = self._chunks[plan.first_chunk + position]
            into = frame.payload[position * size : (position + 1) * size]
            if chunk is None:
                continue  # turned bad since the plan was made; `_finish` leaves it out
            if not self._source.read_cached(chunk, plan.layer_index, plan.span.start, into):
                return self._start_job(plan, frame, position)
        return _Reading(plan, frame, {})

    def _start_job(self, plan: FramePlan, frame: OutgoingFrame, start: int) -> _Reading[C]:
        if self._gave_up is not None:
            late = range(start, plan.chunk_count)
            return _Reading(plan, frame, dict.fromkeys(late, self._gave_up))
        size = plan.span.size_bytes
        payload = frame.payload

        def read_blocking(position: int, chunk: C) -> Verdict | None:
            part = payload[(start + position) * size :][:size]
            return self._source.read_blocking(chunk, plan.layer_index, plan.span.start, part)

        chunks = self._chunks[plan.first_chunk + start : plan.first_chunk + plan.chunk_count]
        # The job keeps the frame: a read that hangs may write into its memory whenever it ends.
        job = ChunkJob(self._source, chunks, read_blocking, memory=frame)
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run_blocking)
        return _Reading(plan, frame, {}, start, job, future)

    async def _ended(self, job: ChunkJob[C], future: "asyncio.Future[None]") -> dict[int, Verdict]:
        """Waits for a job; its faults by position."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await quiet([future])
        finally:
            error = overdue(future)
            faults = job.give_up(error)
        if error is None:
            future.result()
            return faults
        self._late_s += loop.time() - began
        if self._late_s > _LATE_MAX * error.timeout_s:
            self._gave_up = Verdict(ChunkStatus.MISS_TIMEOUT, str(error))
        return faults

    async def _finish(self, reading: _Reading[C]) -> None:
        plan, frame, faults = reading.plan, reading.frame, reading.faults
        if reading.job is not None and reading.future is not None:
            found = await self._ended(reading.job, reading.future)
            faults = {reading.start + position: fault for position, fault in found.items()}
            self.has_read = self.has_read or len(found) < plan.chunk_count - reading.start
        good = [
            position
            for position in range(plan.chunk_count)
            if await self._is_good(plan, position, frame.payload, faults)
        ]
        if len(good) == plan.chunk_count:
            await self._plane.send(frame)
            return
        # The rare case of a bad slice inside the frame: the good ones go out one by one.
        size = plan.span.size_bytes
        for position in good:
            single = self._plane.new_frame(self._header(plan, plan.first_chunk + position, 1), size)
            single.payload[:] = frame.payload[position * size : (position + 1) * size]
            await self._plane.send(single)

    async def _is_good(
        self, plan: FramePlan, position: int, payload: memoryview, faults: dict[int, Verdict]
    ) -> bool:
        chunk_index = plan.first_chunk + position
        chunk = self._chunks[chunk_index]
        if chunk is None:
            return False
        size = plan.span.size_bytes
        fault = faults.get(position)
        if fault is None and not self._verifier.check(
            payload[position * size : (position + 1) * size],
            slice_offset=plan.span.start,
            ends_slice=plan.ends_slice,
            expected=chunk.checksums[plan.layer_index],
        ):
            fault = Verdict(
                ChunkStatus.MISS_CORRUPT, f"checksum of layer {plan.layer_index} does not match"
            )
        if fault is None:
            return True
        self._chunks[chunk_index] = None
        leave_out(self._runs, chunk_index)
        self.faults[chunk_index] = fault
        if fault.status is ChunkStatus.MISS_CORRUPT:
            rejecting = ChunkJob(self._source, [chunk], self._reject_blocking)
            loop = asyncio.get_running_loop()
            await self._ended(
                rejecting, loop.run_in_executor(self._threads, rejecting.run_blocking)
            )
        await self._plane.miss(chunk_index, fault)
        return False

    def _reject_blocking(self, position: int, chunk: C) -> None:
        self._source.reject_blocking(chunk)

    def _header(self, plan: FramePlan, first_chunk: int, chunk_count: int) -> FrameHeader:
        checksums = b""
        if plan.ends_slice:
            checksums = b"".join(
                chunk.checksums[plan.layer_index].to_bytes(8, "little")
                for chunk in self._chunks[first_chunk : first_chunk + chunk_count]
                if chunk is not None
            )
        return FrameHeader(plan.layer_index, first_chunk, plan.span.start, checksums)
