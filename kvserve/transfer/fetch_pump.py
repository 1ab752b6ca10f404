"""The server's side of one fetch: read and send, layer by layer.

Theory of operation. Frames are made in plan order. One whose bytes are in page cache is read inline
right before it is sent (the common case: they are then still in the CPU's cache, and a thread hop
would cost a quarter of the throughput), if the plane can, straight into the receiver's memory. When
a read would wait for the disk, the fetch goes on in
steps (`format/read_plan.py`): the rest of the layer, then wider and wider runs of layers, read by
the fs threads (`step_reads.py`), as far ahead as staging memory allows. Once a step would begin
with what is in page cache, its turn comes when those before it are sent, and it is read inline
again.

Who verifies: the receiver, every slice where it has landed; the checksums travel with the frames,
and what does not match is reported back (`Verify`), so that the server looks at the file and sets
it aside. What threads have read, from a disk most likely, is verified here as well, before it is
sent: rot found then costs one chunk its place in the prefix and no second look. To verify what
comes from page cache here, too, would cost a tenth of the throughput and find nothing that the
receiver does not.

Frames are sent strictly in order. A chunk that turns out bad is reported once and left out from
there on; the others go on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Generic

from kvserve.format.chunk_file import pack_checksums
from kvserve.format.frames import FrameHeader
from kvserve.format.plan import FramePlan, leave_out, runs
from kvserve.format.read_plan import NextStep, ReadPlan, growing_widths, staged_size_bytes
from kvserve.format.verify import SliceVerifier, mismatch
from kvserve.model import ChunkStatus, Layout, Verdict
from kvserve.transfer.batches import overdue, quiet
from kvserve.transfer.chunk_job import ChunkJob
from kvserve.transfer.planes.base import FetchPlane
from kvserve.transfer.ports import C, SliceSource
from kvserve.transfer.staging import Share, Staging
from kvserve.transfer.step_reads import ReadPace, StagedFrame, Step, StepReads
from kvserve.transfer.turns import Turns


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
        staging: Staging,
        pace: ReadPace,
        turns: Turns,
        widths: Callable[[Callable[[], int]], Iterator[int]] = growing_widths,
    ) -> None:
        self._turns = turns
        self._source = source
        self._threads = threads
        self._plane = plane
        self._layout = layout
        self._chunks = list(chunks)
        present = [index for index, chunk in enumerate(chunks) if chunk is not None]
        self._runs = list(runs(present))
        self._staging = staging
        self._pace = pace
        self._widths = widths
        self._verifier = SliceVerifier()
        # The slice whose bytes so far were all verified: layer and chunk.
        self._verified: tuple[int, int] | None = None
        self._window: deque[StagedFrame] = deque()
        self._cold_chunk = 0
        self._sent_layers = False
        self._probe = memoryview(bytearray(1))
        self.faults: dict[int, Verdict] = {}
        self.has_read = False
        """A read that was not inline has worked."""

    async def run(self, layers: Sequence[int]) -> None:
        plan = ReadPlan(
            layers,
            self._layout.slice_sizes,
            self._runs,
            frame_size_bytes=self._staging.frame_size_bytes,
            widths=self._widths(self._layers_worth),
        )
        with self._staging.load() as share:
            reads = StepReads(self._source, self._threads, share, self._pace)
            try:
                while True:
                    await self._turns.take()
                    if not self._window:
                        first = plan.next_frame()
                        if first is None:
                            return
                        await share.take_first(staged_size_bytes(first.payload_size_bytes))
                        self._start(first, plan, reads)
                    await self._finish(plan, reads)
            finally:
                # Threads still write into the frames and use the descriptors: wait for them.
                await reads.close()
                self.has_read = reads.has_read

    def _read_ahead(self, plan: ReadPlan, reads: StepReads[C]) -> None:
        """Starts the next steps while those before them wait for a disk."""
        share = reads.share
        while self._may_read_ahead(reads):
            coming = plan.next_step(self._step_budget(share))
            if coming is None or coming.size_bytes > share.room_bytes:
                return
            if not self._sent_layers and coming.first_layer != coming.last_layer:
                return  # a wide read would take the first layer's share of the machine
            if self._is_cached(coming):
                return  # it is read inline when its turn comes
            first = plan.next_frame()
            if first is None:
                return
            share.take(staged_size_bytes(first.payload_size_bytes))
            self._start_step(self._new_frame(first), plan, reads)

    def _may_read_ahead(self, reads: StepReads[C]) -> bool:
        """One step while the one before it is read and sent: more would only take memory."""
        last = self._window[-1].step
        if last is None or reads.gave_up is not None or not reads.wants_more:
            return False
        head = self._window[0].step
        return last is head

    def _is_cached(self, coming: NextStep) -> bool:
        """Whether a step is in page cache: asked of a chunk that was not, before. Its end, since
        the system's own readahead comes there last."""
        index = coming.first_chunk if coming.first_chunk is not None else self._cold_chunk
        if self._chunks[index] is None:
            return False
        end = self._layout.slice_sizes[coming.last_layer] - 1
        chunks = self._chunks[index : index + 1]
        return self._source.read_cached(chunks, coming.last_layer, end, self._probe) == 1

    def _layers_worth(self) -> int:
        """So many that reading a chunk's slices takes as long as waiting for the first byte."""
        sizes = self._layout.slice_sizes
        return self._pace.bytes_worth() * len(sizes) // sum(sizes)

    def _step_budget(self, share: Share) -> int:
        # Half: the next step is read while one is sent.
        return max(share.most_bytes // 2, staged_size_bytes(self._staging.frame_size_bytes))

    def _start(self, first: FramePlan, plan: ReadPlan, reads: StepReads[C]) -> None:
        """Reads a frame inline, or, if it is not in page cache, starts the step that it begins."""
        head = self._read_inline(first)
        if head.start < first.chunk_count and reads.gave_up is None:
            self._cold_chunk = first.first_chunk + head.start
            if head.frame is not None and head.frame.is_in_place:  # no thread may write there
                head = self._new_frame(first)
            self._start_step(head, plan, reads)
            return
        head.faults = {
            position: reads.gave_up
            for position in range(head.start, first.chunk_count)
            if reads.gave_up is not None
        }
        self._window.append(head)

    def _start_step(self, head: StagedFrame, plan: ReadPlan, reads: StepReads[C]) -> None:
        """`head` is counted already."""
        share = reads.share
        budget = min(self._step_budget(share) - head.staged_size_bytes, share.room_bytes)
        step = [head]
        for following in plan.rest_of_step(budget):
            step.append(self._new_frame(following))
            share.take(step[-1].staged_size_bytes)
        self._window.extend(step)
        reads.add(Step(step), self._chunks)

    def _new_frame(self, plan: FramePlan, *, may_be_in_place: bool = False) -> StagedFrame:
        header = self._header(plan, plan.first_chunk, plan.chunk_count)
        frame = self._plane.new_frame(
            header, plan.payload_size_bytes, may_be_in_place=may_be_in_place
        )
        return StagedFrame(plan, frame)

    def _read_inline(self, plan: FramePlan) -> StagedFrame:
        """The frame, filled up to the first slice that is not in page cache."""
        staged = self._new_frame(plan, may_be_in_place=True)
        assert staged.frame is not None
        # One that turned bad since the plan was made is left out by `_finish`.
        chunks = self._chunks[plan.first_chunk : plan.first_chunk + plan.chunk_count]
        staged.start = self._source.read_cached(
            chunks, plan.layer_index, plan.span.start, staged.frame.payload
        )
        return staged

    async def _finish(self, ahead: ReadPlan, reads: StepReads[C]) -> None:
        """Sends the head of the window once it is read."""
        staged = self._window[0]
        plan, share = staged.plan, reads.share
        faults = await reads.until_read(staged, partial(self._read_ahead, ahead, reads))
        self._window.popleft()
        frame, staged.frame = staged.frame, None
        assert frame is not None, "a frame is sent once"
        good: Sequence[int] = range(plan.chunk_count)
        if staged.step is None and not faults and not self.faults:
            self._verified = None
        else:
            good = [
                position
                for position in good
                if await self._is_good(staged, position, frame.payload, faults, reads)
            ]
        if len(good) == plan.chunk_count:
            await self._plane.send(frame)
        else:
            # The rare case of a bad slice inside the frame: the good ones go out one by one.
            size = plan.span.size_bytes
            share.take(staged_size_bytes(size))
            for position in good:
                header = self._header(plan, plan.first_chunk + position, 1)
                single = self._plane.new_frame(header, size, may_be_in_place=False)
                single.payload[:] = frame.payload[position * size : (position + 1) * size]
                await self._plane.send(single)
            share.give(staged_size_bytes(size))
        self._sent_layers |= not self._window or self._window[0].step is not staged.step
        if not staged.is_kept:
            share.give(staged.staged_size_bytes)

    async def _is_good(
        self,
        staged: StagedFrame,
        position: int,
        payload: memoryview,
        faults: dict[int, Verdict],
        reads: StepReads[C],
    ) -> bool:
        plan = staged.plan
        chunk_index = plan.first_chunk + position
        chunk = self._chunks[chunk_index]
        if chunk is None:
            return False
        size = plan.span.size_bytes
        fault = faults.get(position)
        if fault is None and self._may_verify(staged, chunk_index):
            is_right = self._verifier.check(
                payload[position * size : (position + 1) * size],
                slice_offset=plan.span.start,
                ends_slice=plan.ends_slice,
                expected=chunk.checksums[plan.layer_index],
            )
            if not is_right:
                fault = mismatch(plan.layer_index)
        if fault is None:
            return True
        self._chunks[chunk_index] = None
        leave_out(self._runs, chunk_index)
        self.faults[chunk_index] = fault
        if fault.status is ChunkStatus.MISS_CORRUPT:
            await self._reject(chunk, reads)
        await self._plane.miss(chunk_index, fault)
        return False

    def _may_verify(self, staged: StagedFrame, chunk_index: int) -> bool:
        """Threads have read it; of a slice in pieces, also all that came before."""
        plan = staged.plan
        piece = (plan.layer_index, chunk_index) if staged.step is not None else None
        if piece is not None and plan.span.start and piece != self._verified:
            piece = None
        self._verified = piece
        return piece is not None

    async def _reject(self, chunk: C, reads: StepReads[C]) -> None:
        def reject_blocking(chunk: C, about: None) -> None:
            self._source.reject_blocking(chunk)

        loop = asyncio.get_running_loop()
        job = ChunkJob(self._source, deque([(chunk, None)]).popleft, reject_blocking)
        began = loop.time()
        future = loop.run_in_executor(self._threads, job.run_blocking)
        try:
            await quiet([future])
        finally:
            error = overdue(future)
            job.give_up(error)
        if error is None:
            future.result()
        else:
            reads.note_late(error, began)

    def _header(self, plan: FramePlan, first_chunk: int, chunk_count: int) -> FrameHeader:
        checksums = b""
        if plan.ends_slice:
            layer_index = plan.layer_index
            found = [
                chunk.checksums[layer_index]
                for chunk in self._chunks[first_chunk : first_chunk + chunk_count]
                if chunk is not None
            ]
            checksums = pack_checksums(found)
        return FrameHeader(plan.layer_index, first_chunk, plan.span.start, checksums)
