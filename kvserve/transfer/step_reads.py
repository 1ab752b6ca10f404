"""The reads of one fetch that wait for a disk: step after step, several chunks at once.

Theory of operation. The steps' chunks are one queue, in order, and up to `ReadPace.jobs_max` jobs
on the fs threads take from it: no chunk of a step is begun before all those of the step before it
are, and no thread idles between two steps. A chunk's slices land where they are sent from, in all
frames of its step, by as few reads as their places in the file allow. The loop is woken when the
frame it waits for is whole, not for each chunk.

A call that gives no answer in time takes its chunk out, with all that it has in the queue. If calls
that began after that are late as well nothing waits for a disk any more in this fetch (`gave_up`):
a fetch from a hung mount ends after two timeouts, whatever it asks for.
"""

import asyncio
import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain
from operator import attrgetter
from typing import Final, Generic

from kvserve.errors import StorageUnavailable
from kvserve.format.plan import FramePlan
from kvserve.format.read_plan import staged_size_bytes
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.batches import overdue, quiet
from kvserve.transfer.chunk_job import ChunkJob
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.ports import C, Piece, SliceSource
from kvserve.transfer.staging import Share

_LATE_ROUNDS_MAX: Final = 2
_QUEUE_S: Final = 0.001
_JOBS_MIN: Final = 2
# Of a fetch, as long as no read has ended lately: if the mount hangs, no more threads than these.
_JOBS_MAX_CAREFUL: Final = 8
_ALIVE_S: Final = 2.0
_CALL_S_AT_FIRST: Final = 0.0005
_NEWEST_WEIGHT: Final = 0.1
# Of one thread, from a parallel file system or page cache; only its order of magnitude matters.
_BYTES_A_SECOND: Final = 1e9


class ReadPace:
    """How long reads take on this server, and what follows from it; for all its fetches.

    `jobs_max`: jobs of one fetch on the threads at once.
    """

    def __init__(self, jobs_max: int) -> None:
        self.jobs_max = jobs_max
        self._call_s = _CALL_S_AT_FIRST
        self._latency_s = 0.0
        self._ended_at = -math.inf

    def __repr__(self) -> str:
        return (
            f"<ReadPace {self._call_s * 1000:.2f} ms a read, latency {self._latency_s * 1000:.2f}>"
        )

    def note(self, call_s: float, size_bytes: int) -> None:
        """On any thread: an update that is lost to another thread does no harm."""
        self._ended_at = time.monotonic()
        self._call_s += (call_s - self._call_s) * _NEWEST_WEIGHT
        latency_s = max(0.0, call_s - size_bytes / _BYTES_A_SECOND)
        self._latency_s += (latency_s - self._latency_s) * _NEWEST_WEIGHT

    @property
    def is_alive(self) -> bool:
        """A read has ended lately."""
        return time.monotonic() - self._ended_at < _ALIVE_S

    def jobs_for(self, reads: int) -> int:
        """So many that each is busy for about `_QUEUE_S`: for quick reads few threads, which would
        only wait for each other and for Python's lock; for slow ones as many as there may be."""
        wanted = max(_JOBS_MIN, round(reads * self._call_s / _QUEUE_S))
        return min(wanted, self.jobs_max, reads)

    def bytes_worth(self) -> int:
        """What could be read in the time that a read waits for its first byte."""
        return int(self._latency_s * _BYTES_A_SECOND)


class StagedFrame:
    """A frame and its memory; slices from position `start` on are read by `step`.

    Attributes:
        faults: by position, of slices that nobody reads.
    """

    __slots__ = ("faults", "frame", "is_kept", "plan", "staged_size_bytes", "start", "step")

    def __init__(self, plan: FramePlan, frame: OutgoingFrame) -> None:
        self.plan = plan
        self.staged_size_bytes = staged_size_bytes(plan.payload_size_bytes)
        self.frame: OutgoingFrame | None = frame
        self.start = 0
        self.step: Step | None = None
        self.faults: dict[int, Verdict] = {}
        self.is_kept = False
        """A call that hangs has its memory; it is not counted with the share any more."""

    @property
    def first_chunk(self) -> int:
        return self.plan.first_chunk

    @property
    def chunk_indexes(self) -> range:
        """The chunks whose slices `step` reads."""
        plan = self.plan
        return range(plan.first_chunk + self.start, plan.first_chunk + plan.chunk_count)


class Step:
    """Frames that are read together: of one layer, or of several layers all of them.

    `ended`, by chunk index, says how its read ended, for every piece in the step.
    """

    def __init__(self, frames: Sequence[StagedFrame]) -> None:
        self._layers: list[list[StagedFrame]] = []
        for staged in frames:
            staged.step = self
            if not self._layers or self._layers[-1][0].plan.layer_index != staged.plan.layer_index:
                self._layers.append([])
            self._layers[-1].append(staged)
        self.ended: dict[int, Verdict | None] = {}

    def chunk_indexes(self) -> Iterator[int]:
        """Every chunk that has something to read, once, ascending."""
        last = -1
        # The first frame of all may be read in part already; the same chunks are in every layer.
        for staged in self._layers[-1]:
            for index in staged.chunk_indexes:
                if index > last:
                    yield index
                    last = index

    def frames_of(self, chunk_index: int) -> Iterator[StagedFrame]:
        """Those that wait for the chunk's read."""
        for layer in self._layers:
            at = bisect_right(layer, chunk_index, key=attrgetter("first_chunk"))
            # A slice larger than a frame: all its pieces start with the same chunk.
            first = layer[at - 1].plan.first_chunk if at else 0
            while at and layer[at - 1].plan.first_chunk == first:
                at -= 1
                if chunk_index in layer[at].chunk_indexes:
                    yield layer[at]


class StepReads(Generic[C]):
    """Add steps in order, wait with `until_read`; always `close`.

    Attributes:
        gave_up: why nothing is read any more, if so.
        has_read: a read has worked.
    """

    def __init__(
        self, source: SliceSource[C], threads: Executor, share: Share, pace: ReadPace
    ) -> None:
        self._source = source
        self._threads = threads
        self.share = share
        self._pace = pace
        self._queue: deque[tuple[C, tuple[Step, int]]] = deque()
        self._jobs: dict[asyncio.Future[None], tuple[ChunkJob[C, tuple[Step, int]], float]] = {}
        # By chunk: being read, and with what is to be read after that. A chunk that hangs holds one
        # thread, not one for each step.
        self._busy: dict[int, deque[tuple[C, tuple[Step, int]]]] = {}
        self._queue_lock = threading.Lock()
        self._bad: dict[int, Verdict] = {}
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._is_told = False
        self._is_careful = False
        self._awaited: tuple[Step, set[int]] | None = None
        self._late_rounds = 0
        self._late_at = 0.0
        self._defect: BaseException | None = None
        self.gave_up: Verdict | None = None
        self.has_read = False

    def add(self, step: Step, chunks: Sequence[C | None]) -> None:
        """Queues the step's reads; `chunks` by index, None for those not wanted any more."""
        for index in step.chunk_indexes():
            chunk = chunks[index]
            if chunk is None:
                step.ended[index] = None
            else:
                self._queue.append((chunk, (step, index)))
        self._start_jobs()

    @property
    def wants_more(self) -> bool:
        """Threads will be idle soon: what is queued does not keep them busy."""
        return len(self._queue) <= len(self._jobs)

    async def until_read(
        self, staged: StagedFrame, read_ahead: Callable[[], None]
    ) -> dict[int, Verdict]:
        """Waits for the frame's reads; their faults by position in the frame.

        Calls `read_ahead` at once, and again when it may add a step.
        """
        read_ahead()
        step = staged.step
        if step is None:
            return staged.faults
        while True:
            # First say what is waited for, then look: a thread does it the other way round.
            missing = {index for index in staged.chunk_indexes if index not in step.ended}
            self._awaited = (step, missing)
            self._news.clear()
            self._is_told = False
            # Not over `missing`: the threads take from it.
            missing.difference_update([it for it in staged.chunk_indexes if it in step.ended])
            if not missing:
                break
            if self._defect is not None:
                raise self._defect
            await self._news.wait()
            read_ahead()
        self._awaited = None
        first = staged.plan.first_chunk
        ended = ((index, step.ended[index]) for index in staged.chunk_indexes)
        return {index - first: fault for index, fault in ended if fault is not None}

    async def close(self) -> None:
        """Nothing is read any more: waits until no thread writes to a frame, but for calls that
        hang."""
        with self._queue_lock:
            self._queue.clear()
            self._busy.clear()
        jobs = list(self._jobs)
        try:
            await quiet(jobs)
        finally:
            for future in jobs:
                self._job_ended(future)

    def note_late(self, error: StorageUnavailable, began: float) -> None:
        """A call on the threads that was asked for at `began` gave no answer in time."""
        if began >= self._late_at:
            self._late_rounds += 1
            self._late_at = self._loop.time()
        if self._late_rounds < _LATE_ROUNDS_MAX:
            return
        self.gave_up = self.gave_up or Verdict(ChunkStatus.MISS_TIMEOUT, str(error))
        with self._queue_lock:
            left = [*self._queue, *chain.from_iterable(self._busy.values())]
            self._queue.clear()
            for later in self._busy.values():
                later.clear()
        for _, (step, index) in left:
            step.ended[index] = self._bad.get(index, self.gave_up)

    def _start_jobs(self) -> None:
        wanted = self._pace.jobs_for(len(self._queue))
        self._is_careful = wanted > _JOBS_MAX_CAREFUL and not self._pace.is_alive
        if self._is_careful or self._late_rounds:
            wanted = min(wanted, _JOBS_MAX_CAREFUL)
        for _ in range(wanted - len(self._jobs)):
            job = ChunkJob(
                self._source,
                self._take,
                self._read_blocking,
                ended=self._ended,
                hangs=self._hangs,
                came_back=self.share.came_back,
            )
            future = self._loop.run_in_executor(self._threads, job.run_blocking)
            self._jobs[future] = job, self._loop.time()
            future.add_done_callback(self._job_ended)

    def _take(self) -> tuple[C, tuple[Step, int]]:
        with self._queue_lock:
            while True:
                item = self._queue.popleft()
                index = item[1][1]
                if index in self._bad:
                    return item  # ends at once
                if index not in self._busy:
                    self._busy[index] = deque()
                    return item
                self._busy[index].append(item)

    def _read_blocking(self, chunk: C, about: tuple[Step, int]) -> Verdict | None:
        step, index = about
        if (fault := self._bad.get(index)) is not None:
            return fault
        if self.wants_more and not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._news.set)
        began = time.monotonic()
        # The frames, not only their memory: a view of a gRPC message does not keep it alive.
        into: list[OutgoingFrame] = []
        pieces: list[Piece] = []
        for staged in step.frames_of(index):
            plan, frame = staged.plan, staged.frame
            if frame is None:
                continue
            into.append(frame)
            size = plan.span.size_bytes
            part = frame.payload[(index - plan.first_chunk) * size :][:size]
            pieces.append((plan.layer_index, plan.span.start, part))
        fault = self._source.read_blocking(chunk, pieces)
        self._pace.note(time.monotonic() - began, sum(len(part) for _, _, part in pieces))
        return fault

    def _ended(self, about: tuple[Step, int], fault: Verdict | None) -> None:
        """On the thread."""
        step, index = about
        if fault is None:
            self.has_read = True
        else:
            self._bad[index] = fault
        with self._queue_lock:
            later = self._busy.pop(index, None)
            self._queue.extendleft(reversed(later or ()))
        step.ended[index] = fault
        if self._is_careful:
            self._is_careful = False
            self._loop.call_soon_threadsafe(self._start_jobs)
        awaited = self._awaited
        if awaited is not None and awaited[0] is step:
            awaited[1].discard(index)
            if not awaited[1]:
                self._loop.call_soon_threadsafe(self._news.set)

    def _job_ended(self, future: "asyncio.Future[None]") -> None:
        found = self._jobs.pop(future, None)
        if found is None:
            return  # `close` was faster
        job, began = found
        error = overdue(future)
        if (late := job.give_up(error)) is not None:
            (step, index), fault = late
            self._bad[index] = step.ended[index] = fault
            with self._queue_lock:
                later = self._busy.get(index, deque())
                left = list(later)
                later.clear()
            for _, (step, index) in left:
                step.ended[index] = fault
        if error is not None:
            self.note_late(error, began)
        else:
            self._defect = self._defect or future.exception()
        if self._defect is None:
            self._start_jobs()
        self._news.set()

    def _hangs(self, about: tuple[Step, int]) -> int:
        """Counts the frames that a call may write to whenever it comes back; their bytes."""
        step, index = about
        size = 0
        for staged in step.frames_of(index):
            if not staged.is_kept and staged.frame is not None:
                staged.is_kept = True
                size += staged.staged_size_bytes
        self.share.hangs(size)
        return size
