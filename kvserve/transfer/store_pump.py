"""The server's side of one store: frames in, slices to their files, chunks published at the end.

Theory of operation. The rpc feeds frames as they come. Each is checked by the session at once and
queued; at most `frames_in_flight` are unwritten, then `feed` waits and gRPC's flow control holds
the client back. Up to two jobs on the fs threads write what is queued until nothing is, so a busy
store costs no thread hop per frame (two, since each waits for Python's lock after every write);
when frames come again there is a new job. Layers are reported by a task of their own, so that a
prefill that waits for the report of a layer is never stuck behind its own next layer. A chunk whose
write fails is dropped and reported; the others go on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from kvserve.errors import KvserveError, StorageFull
from kvserve.format.frames import FrameHeader
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.batches import in_batches, quiet
from kvserve.transfer.ports import SliceSink
from kvserve.transfer.store_session import SliceWrite, StoreSession

log = logging.getLogger(__name__)

_Frame = tuple[list[SliceWrite], int, Callable[[], None]]
"""The writes of a frame, its layer, and whom to tell when they are done."""

_JOBS_MAX = 2
_FRAMES_A_JOB = 8


def failure_verdict(error: KvserveError) -> Verdict:
    """How a chunk ended whose file could not be written."""
    is_full = isinstance(error, StorageFull)
    return Verdict(ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORE_ERROR, str(error))


class StorePump:
    """Runs one store. `writers` by chunk index; `verdicts` say how each ended.

    Call `feed` for each frame, then `finish`; always `close`.
    """

    def __init__(
        self,
        session: StoreSession,
        writers: Mapping[int, SliceSink],
        threads: Executor,
        *,
        layer_stored: Callable[[int], Awaitable[None]],
        frames_in_flight: int,
    ) -> None:
        self._session = session
        self._writers = writers
        self._threads = threads
        self._layer_stored = layer_stored
        self._frames_in_flight = frames_in_flight
        # Filled by the loop, emptied by the job: a deque's ends are safe for that.
        self._queue: deque[_Frame] = deque()
        self._unwritten = 0
        self._room = asyncio.Event()
        self._jobs = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # By layer: frames that are not written yet; the layer's last one has come.
        self._unwritten_of: dict[int, int] = {}
        self._whole_layers: set[int] = set()
        self._defect: BaseException | None = None
        self._to_report: deque[int] = deque()
        self._reporter: asyncio.Task[None] | None = None
        self.verdicts: dict[int, Verdict] = {}

    async def feed(
        self,
        header: FrameHeader,
        payload: memoryview,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes one frame; waits while too many are not written yet.

        `written` is called on the loop once nobody reads `payload` any more.

        Raises:
            InvalidRequest: the frame breaks a rule of the session.
        """
        writes, completes = self._session.feed(header, payload)
        self._check()
        layer_index = header.layer_index
        self._unwritten += 1
        self._unwritten_of[layer_index] = self._unwritten_of.get(layer_index, 0) + 1
        if completes:
            self._whole_layers.add(layer_index)
        self._queue.append((writes, layer_index, written))
        if self._jobs < _JOBS_MAX:
            self._start_job()
        while self._unwritten >= self._frames_in_flight:
            self._room.clear()
            await self._room.wait()
            self._check()

    async def finish(self, *, may_publish: bool) -> None:
        """No frame comes any more: publishes if everything came and may, fills in `verdicts`."""
        await self._idle.wait()
        self._check()
        if may_publish and self._session.is_complete:
            await in_batches(self._threads, self._commit_blocking, list(self._writers))
        else:
            text = f"the store ended early: {self._session.progress}"
            for chunk_index in self._writers:
                self.verdicts.setdefault(chunk_index, Verdict(ChunkStatus.INCOMPLETE, text))
        if self._reporter is not None:
            await self._reporter

    async def close(self) -> None:
        """Waits until no thread writes any more; the writers are the caller's again."""
        self._queue.clear()
        self._whole_layers.clear()  # nobody is told any more
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._idle.wait())]
        self._to_report.clear()
        reporter = self._reporter
        if reporter is not None:
            # Not cancelled: its write would go on inside gRPC, and a status sent beside it is lost.
            waits.append(reporter)
        await quiet(waits)
        if reporter is not None and not reporter.cancelled() and reporter.exception() is not None:
            log.debug("nobody was told of the last layers: %r", reporter.exception())

    def _check(self) -> None:
        """Raises what makes it pointless to go on."""
        if self._defect is not None:
            raise self._defect
        if self._reporter is not None and self._reporter.done():
            self._reporter.result()  # the client is gone

    def _start_job(self) -> None:
        self._jobs += 1
        self._idle.clear()
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._threads, self._drain_blocking, loop)
        job.add_done_callback(self._job_done)

    def _job_done(self, job: "asyncio.Future[None]") -> None:
        self._jobs -= 1
        self._defect = self._defect or job.exception()
        if self._queue and self._defect is None:
            self._start_job()  # a frame came while the job was ending
        elif not self._jobs:
            self._idle.set()
            self._room.set()

    def _frame_written(self, layer_index: int, written: Callable[[], None]) -> None:
        written()
        self._unwritten -= 1
        self._room.set()
        self._unwritten_of[layer_index] -= 1
        if layer_index in self._whole_layers and not self._unwritten_of[layer_index]:
            self._to_report.append(layer_index)
            if self._reporter is None:
                self._reporter = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        while self._to_report:
            await self._layer_stored(self._to_report.popleft())
        self._reporter = None

    def _drain_blocking(self, loop: asyncio.AbstractEventLoop) -> None:
        # A few frames only: with many busy stores the threads must stay free for reads and lookups.
        for _ in range(_FRAMES_A_JOB):
            try:
                writes, layer_index, written = self._queue.popleft()
            except IndexError:
                return
            self._write_blocking(writes)
            loop.call_soon_threadsafe(self._frame_written, layer_index, written)

    def _write_blocking(self, writes: list[SliceWrite]) -> None:
        for write in writes:
            if write.chunk_index in self.verdicts:
                continue  # failed before
            try:
                writer = self._writers[write.chunk_index]
                writer.write_blocking(write.layer_index, write.slice_offset, write.data)
            except KvserveError as error:
                self.verdicts.setdefault(write.chunk_index, failure_verdict(error))

    def _commit_blocking(self, chunk_index: int) -> None:
        if chunk_index in self.verdicts:
            return  # a write failed
        try:
            self._writers[chunk_index].commit_blocking(self._session.checksums[chunk_index])
            self.verdicts[chunk_index] = Verdict(ChunkStatus.STORED)
        except KvserveError as error:
            self.verdicts[chunk_index] = failure_verdict(error)
