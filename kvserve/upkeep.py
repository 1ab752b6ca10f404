"""What a server does in the background for the tree: shows that it lives, sweeps after the dead.

Both run on the fs threads, a step at a time. An error of the file system is logged and tried again
in the next round; it never ends the server, and requests never wait for any of this.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TypeVar

from kvserve.errors import KvserveError
from kvserve.fs import FileSystem
from kvserve.store.owners import Owner
from kvserve.store.sweep import sweep_blocking

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Upkeep:
    """Runs from `start` to `stop`."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        owner: Owner,
        threads: Executor,
        *,
        sweep_interval_s: float,
        pause_s: float,
    ) -> None:
        self._fs = fs
        self._root = root
        self._owner = owner
        self._threads = threads
        self._sweep_interval_s = sweep_interval_s
        self._pause_s = pause_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._every(self._owner.lease_s / 3, self._beat, first_after=True)),
            loop.create_task(self._every(self._sweep_interval_s, self._sweep, first_after=False)),
        ]

    async def stop(self) -> None:
        """Ends both and gives the server's claim up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._run(self._owner.release_blocking)
        except KvserveError as error:
            log.warning("the server's claim stays until it expires: %s", error)

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

    async def _sweep(self) -> None:
        steps = sweep_blocking(self._fs, self._root, self._owner)
        result = None
        while (found := await self._run(next, steps, None)) is not None:
            result = found
            await asyncio.sleep(self._pause_s)
        if result is not None and (result.removed or result.failed):
            log.info("swept after dead servers: %s", result)

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
