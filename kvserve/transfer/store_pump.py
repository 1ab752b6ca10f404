"""The server's side of one store: frames in, slices to their files, chunks published at the end.

Theory of operation. The rpc feeds frames as they come. Each is checked by the session at once and
queued; at most `frames_in_flight` are unwritten, or fewer where staging memory is short, then
`feed` waits and gRPC's flow control holds the client back. Up to two jobs on the fs threads write
what is queued until nothing is, so a busy store costs no thread hop per frame (two, since each
waits for Python's lock after every write); when frames come again there is a new job. Layers are
reported by a task of their own, so that a prefill that waits for the report of a layer is never
stuck behind its own next layer. A chunk whose write fails is dropped and reported; the others go
on. So is one whose write gives no answer in time: the writes behind it go to a new job. A second
such chunk ends the store: the mount hangs. Without space the last chunks make room for the first
(`room.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from kvserve.errors import KvserveError, StorageFull, StorageUnavailable
from kvserve.format.frames import FrameHeader
from kvserve.format.read_plan import staged_size_bytes
from kvserve.fs.custody import Custody
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.batches import Late, in_batches, overdue, quiet
from kvserve.transfer.ports import SliceSink
from kvserve.transfer.room import Room
from kvserve.transfer.staging import Share
from kvserve.transfer.store_session import SliceWrite, StoreSession

log = logging.getLogger(__name__)

_Frame = tuple[list[SliceWrite], int, int, Callable[[], None]]
"""The writes of a frame, its layer, the staging memory that it counts for (0: it is counted as that
of a call that hangs), and whom to tell when they are done."""

_JOBS_MAX = 2
_FRAMES_A_JOB = 8
# Later chunks given up for one write. Few: it may be this file alone that has no room, as on a full
# storage target of a parallel file system.
_ROOM_MADE_MAX = 16


def failure_verdict(error: KvserveError) -> Verdict:
    """How a chunk ended whose file could not be written."""
    is_full = isinstance(error, StorageFull)
    return Verdict(ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORE_ERROR, str(error))


def _keep() -> None:
    """The frame's memory is not used again."""


class _WriteJob:
    """Writes what is queued, a few frames, on an fs thread."""

    def __init__(
        self,
        queue: "deque[_Frame]",
        write_blocking: Callable[[SliceWrite], None],
        share: Share,
    ) -> None:
        self._queue = queue
        self._write_blocking = write_blocking
        self._share = share
        self._custody = Custody()
        self._frame: _Frame | None = None
        self._at = 0

    def run_blocking(self, ended: Callable[[int, Callable[[], None]], object]) -> None:
        """Calls `ended` with the layer of each frame and whom to tell."""
        # A few frames only: with many busy stores the threads must stay free for reads and lookups.
        for _ in range(_FRAMES_A_JOB):
            try:
                if not self._custody.begin(self._take):
                    return
            except IndexError:
                return
            assert self._frame is not None
            writes, layer_index, staged_bytes, written = self._frame
            while True:
                try:
                    self._write_blocking(writes[self._at])
                finally:
                    is_wanted = self._custody.end()
                    if not is_wanted:
                        self._share.came_back(staged_bytes)
                if not is_wanted:
                    return
                if self._at == len(writes) - 1:
                    break
                if not self._custody.begin(self._step):
                    return
            ended(layer_index, written)

    def give_up(self) -> tuple[SliceWrite | None, _Frame | None]:
        """Call it once the job is overdue: the write that hangs, and the frame without it and what
        came before it; None where there is none.

        The thread that hangs reads the frame's memory whenever it comes back: nobody is told that
        it may be used again, and until then it counts as that of a call that hangs.
        """
        hangs = self._custody.give_up(self._hold)
        if self._frame is None:
            return None, None
        writes, layer_index, staged_bytes, written = self._frame
        rest = writes[self._at + 1 :]
        if hangs:
            return writes[self._at], (rest, layer_index, 0, _keep)
        return None, (rest, layer_index, staged_bytes, written) if rest else None

    @property
    def has_begun(self) -> bool:
        return self._frame is not None

    def _hold(self) -> None:
        assert self._frame is not None
        self._share.hangs(self._frame[2])

    def _take(self) -> None:
        self._frame = self._queue.popleft()
        self._at = 0

    def _step(self) -> None:
        self._at += 1


class StorePump:
    """Runs one store. `writer` gives the sink of a needed chunk, the same each time, and is called
    by any thread; `verdicts`, by chunk index, say how each needed chunk ended.

    Call `feed` for each frame, then `finish`; always `close`.
    """

    def __init__(
        self,
        session: StoreSession,
        writer: Callable[[int], SliceSink],
        threads: Executor,
        *,
        layer_stored: Callable[[int], Awaitable[None]],
        frames_in_flight: int,
        share: Share,
    ) -> None:
        self._session = session
        self._writer = writer
        self._threads = threads
        self._layer_stored = layer_stored
        self._frames_in_flight = frames_in_flight
        self._share = share
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
        self._is_closed = False
        self._hung: set[int] = set()
        self._to_report: deque[int] = deque()
        self._reporter: asyncio.Task[None] | None = None
        self.verdicts: dict[int, Verdict] = {}
        self._space = Room(writer, self.verdicts)

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
        size = staged_size_bytes(len(payload))
        self._share.take(size)
        self._queue.append((writes, layer_index, size, partial(self._written, size, written)))
        if self._jobs < _JOBS_MAX:
            self._start_job()
        # With nothing unwritten a store may always take a frame; fetches wait for it then.
        while self._unwritten >= self._frames_in_flight or (
            self._unwritten and self._share.room_bytes < size
        ):
            self._room.clear()
            await self._room.wait()
            self._check()

    async def finish(self, *, may_publish: bool) -> None:
        """No frame comes any more: publishes if everything came and may, fills in `verdicts`."""
        await self._idle.wait()
        self._check()
        if may_publish and self._session.is_complete:
            # The last first: what does not fit after all is not the head of the prefix.
            positions = range(len(self._session.needed) - 1, -1, -1)
            await in_batches(
                self._threads, self._commit_blocking, positions, late=self._commit_is_late
            )
        else:
            text = f"the store ended early: {self._session.progress}"
            incomplete = Verdict(ChunkStatus.INCOMPLETE, text)
            for chunk_index in self._session.needed:
                self.verdicts.setdefault(chunk_index, incomplete)
        if self._reporter is not None:
            await self._reporter

    async def close(self) -> None:
        """Waits until no thread writes any more; the writers are the caller's again.

        Writes that hang are left behind: their writers were told.
        """
        self._is_closed = True
        self._queue.clear()
        self._whole_layers.clear()  # nobody is told any more
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._idle.wait())]
        self._to_report.clear()
        reporter = self._reporter
        if reporter is not None:
            # Not cancelled: its write would go on inside gRPC, and a status sent beside it is lost.
            waits.append(reporter)
        try:
            await quiet(waits)
        finally:
            # Also if this is cancelled meanwhile: asyncio complains of errors nobody looks at.
            if reporter is not None and not reporter.cancelled() and reporter.exception():
                log.debug("nobody was told of the last layers: %r", reporter.exception())

    def _written(self, size_bytes: int, written: Callable[[], None]) -> None:
        written()
        self._share.give(size_bytes)

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
        job = _WriteJob(self._queue, self._write_blocking, self._share)

        def ended(layer_index: int, written: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(self._frame_written, layer_index, written)

        future = loop.run_in_executor(self._threads, job.run_blocking, ended)
        future.add_done_callback(partial(self._job_done, job))

    def _job_done(self, job: _WriteJob, future: "asyncio.Future[None]") -> None:
        self._jobs -= 1
        error = overdue(future)
        if error is not None:
            self._give_up(job, error)
        else:
            self._defect = self._defect or future.exception()
        if self._defect is not None:
            self._room.set()
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

    def _give_up(self, job: _WriteJob, error: StorageUnavailable) -> None:
        write, rest = job.give_up()
        if write is not None:
            self._hung.add(write.chunk_index)
            self._writer(write.chunk_index).give_up()
            verdict = Verdict(ChunkStatus.STORE_ERROR, str(error))
            self.verdicts.setdefault(write.chunk_index, verdict)
        if len(self._hung) > 1 or not job.has_begun:
            self._defect = self._defect or error
        elif rest is not None and not self._is_closed:
            if rest[0]:
                self._queue.appendleft(rest)
            else:
                _, layer_index, _, written = rest
                self._frame_written(layer_index, written)

    def _write_blocking(self, write: SliceWrite) -> None:
        chances = _ROOM_MADE_MAX
        while self._space.begins(write.chunk_index):
            try:
                writer = self._writer(write.chunk_index)
                writer.write_blocking(write.layer_index, write.slice_offset, write.data)
                break
            except KvserveError as error:
                verdict = failure_verdict(error)
                is_full = isinstance(error, StorageFull) and chances > 0
                if not (is_full and self._space.make_blocking(write.chunk_index, verdict)):
                    self.verdicts.setdefault(write.chunk_index, verdict)
                chances -= 1
            finally:
                self._space.ended_blocking(write.chunk_index)

    def _commit_is_late(self, position: int, late: Late) -> None:
        chunk_index = self._session.needed[position]
        if late.hangs is not None:
            self._writer(chunk_index).give_up()
        verdict = Verdict(ChunkStatus.STORE_ERROR, str(late.error))
        self.verdicts.setdefault(chunk_index, verdict)

    def _commit_blocking(self, position: int) -> None:
        chunk_index = self._session.needed[position]
        if chunk_index in self.verdicts:
            return  # a write failed
        try:
            checksums = self._session.checksums_of(position)
            self._writer(chunk_index).commit_blocking(checksums)
            self.verdicts[chunk_index] = Verdict(ChunkStatus.STORED)
        except KvserveError as error:
            self.verdicts[chunk_index] = failure_verdict(error)
