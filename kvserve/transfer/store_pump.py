"""The server's side of one store: frames in, slices to their files, chunks published at the end.

Theory of operation. The rpc feeds frames as they come. Each is checked by the session at once and
written by one job on the fs threads; at most `frames_in_flight` jobs are open, then `feed` waits
and gRPC's flow control holds the client back. A second task follows the jobs in order and reports
each layer when its last job is done, so that a prefill that waits for that report is never stuck
behind its own next layer. A chunk whose write fails is dropped and reported; the others go on.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor

from kvserve.errors import KvserveError, StorageFull
from kvserve.format.frames import FrameHeader
from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.batches import in_batches
from kvserve.transfer.ports import SliceSink
from kvserve.transfer.store_session import SliceWrite, StoreSession

_Job = tuple["asyncio.Future[None]", int, bool]


def failure_verdict(error: KvserveError) -> Verdict:
    """How a chunk ended whose file could not be written."""
    is_full = isinstance(error, StorageFull)
    return Verdict(ChunkStatus.NO_SPACE if is_full else ChunkStatus.STORE_ERROR, str(error))


class StorePump:
    """Runs one store. `writers` are open, by chunk index.

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
        self._room = asyncio.Semaphore(frames_in_flight)
        self._jobs: deque[_Job] = deque()
        self._reporter: asyncio.Task[None] | None = None
        self.verdicts: dict[int, Verdict] = {}

    async def feed(self, header: FrameHeader, payload: memoryview) -> None:
        """Takes one frame; waits while too many writes are open.

        Raises:
            InvalidRequest: the frame breaks a rule of the session.
        """
        writes, completes = self._session.feed(header, payload)
        await self._room.acquire()
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._threads, self._write_blocking, writes)
        job.add_done_callback(lambda _: self._room.release())
        self._jobs.append((job, header.layer_index, completes))
        if self._reporter is None or self._reporter.done():
            await self._settle_reporter()
            self._reporter = loop.create_task(self._report_layers())

    async def finish(self) -> None:
        """The client has sent everything: publishes what is complete, fills in `verdicts`."""
        await self._settle_reporter()
        if self._session.is_complete:
            await in_batches(self._threads, self._commit_blocking, list(self._writers))
            return
        text = f"the client ended early: {self._session!r}"
        for chunk_index in self._writers:
            self.verdicts.setdefault(chunk_index, Verdict(ChunkStatus.INCOMPLETE, text))

    async def close(self) -> None:
        """Waits until no thread writes any more; the writers are the caller's again."""
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.wait([self._reporter])
        if self._jobs:
            await asyncio.wait([job for job, _, _ in self._jobs])

    async def _settle_reporter(self) -> None:
        if self._reporter is not None:
            await self._reporter

    async def _report_layers(self) -> None:
        """Follows the jobs in order; ends when there is none, `feed` starts it again."""
        while self._jobs:
            job, layer_index, completes = self._jobs[0]
            await asyncio.wait([job])
            job.result()
            self._jobs.popleft()
            if completes:
                await self._layer_stored(layer_index)

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
