"""What a server does in the background for the tree: shows that it lives, sweeps after the dead,
closes files that nobody reads any more.

All run on a thread of their own, a step at a time. An error of the file system is logged and tried
again in the next round; it never ends the server, and requests never wait for any of this.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvserve.errors import KvserveError
from kvserve.fs import FileSystem
from kvserve.fs.threads import FsThreads
from kvserve.store.open_chunks import OpenChunks
from kvserve.store.owners import Owner
from kvserve.store.sweep import sweep_blocking

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Between two directories of a sweep: 4,096 take some 20 s, and a metadata server hardly notices.
_SWEEP_PAUSE_S = 0.005
_IDLE_FILES_S = 60.0


class Upkeep:
    """Runs from `start` to `stop`."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        owner: Owner,
        open_chunks: OpenChunks,
        *,
        sweep_interval_s: float,
        timeout_s: float,
    ) -> None:
        self._open_chunks = open_chunks
        self._fs = fs
        self._root = root
        self._owner = owner
        # Its own thread: the claim must be shown in time however busy the others are.
        self._thread = FsThreads(1, timeout_s=timeout_s, name="upkeep")
        self._sweep_interval_s = sweep_interval_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._every(self._owner.lease_s / 3, self._beat, first_after=True)),
            loop.create_task(self._every(self._sweep_interval_s, self._sweep, first_after=False)),
            loop.create_task(self._every(_IDLE_FILES_S / 2, self._close_idle, first_after=True)),
        ]

    async def stop(self) -> None:
        """Ends both and gives the server's claim up."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await asyncio.wait([task])
            if not task.cancelled() and (defect := task.exception()) is not None:
                log.error("upkeep had ended: %r", defect)
        try:
            await self._run(self._owner.release_blocking)
        except KvserveError as error:
            log.warning("the server's claim stays until it expires: %s", error)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _every(
        self, interval_s: float, step: Callable[[], Awaitable[None]], *, first_after: bool
    ) -> None:
        if first_after:
            await asyncio.sleep(interval_s)
        while True:
            try:
                await step()
            except KvserveError as error:
                log.warning("upkeep: %s; next try in %.0f s", error, interval_s)
            await asyncio.sleep(interval_s)

    async def _beat(self) -> None:
        await self._run(self._owner.beat_blocking)

    async def _close_idle(self) -> None:
        await self._run(self._open_chunks.close_idle_blocking, _IDLE_FILES_S)

    async def _sweep(self) -> None:
        steps = sweep_blocking(self._fs, self._root, self._owner)
        result = None
        while (found := await self._run(next, steps, None)) is not None:
            result = found
            await asyncio.sleep(_SWEEP_PAUSE_S)
        if result is not None and (result.removed or result.failed):
            log.info("swept after dead servers: %s", result)

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
