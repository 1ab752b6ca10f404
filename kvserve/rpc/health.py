"""The standard health service: NOT_SERVING while the server drains or the storage fails.

While it fails a probe of the root runs every few seconds, one at a time: one that hangs is not
followed by another. The first success, of a probe or of a request of the kind
that had failed, turns health back.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as aio_health

from kvserve.errors import KvserveError, StorageUnavailable
from kvserve.format.messages import SERVICE
from kvserve.storage_health import StorageHealth

log = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 2.0


class Health:
    """Runs from `start` to `drain`; `servicer` is what the gRPC server registers."""

    def __init__(
        self,
        storage: StorageHealth,
        threads: Executor,
        check_root_blocking: Callable[[], None],
        *,
        probe_interval_s: float = _PROBE_INTERVAL_S,
    ) -> None:
        self.servicer = aio_health.HealthServicer()
        self._storage = storage
        self._threads = threads
        self._check_root_blocking = check_root_blocking
        self._probe_interval_s = probe_interval_s
        self._probing = threading.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._set(is_serving=True)
        self._storage.changed = self._changed.set
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def drain(self) -> None:
        """NOT_SERVING from now on."""
        await self.servicer.enter_graceful_shutdown()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._storage.is_good:
                log.warning("the storage answers again: health is SERVING")
                await self._set(is_serving=True)
                continue
            log.error("the storage failed in several requests in a row: health is NOT_SERVING")
            await self._set(is_serving=False)
            probing = asyncio.get_running_loop().create_task(self._probe_until_good())
            try:
                await self._changed.wait()
            finally:
                probing.cancel()

    async def _probe_until_good(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._probe_interval_s)
            try:
                await loop.run_in_executor(self._threads, self._probe_blocking)
            except KvserveError as error:
                log.debug("probe: %s", error)
            else:
                self._storage.works()
                return

    def _probe_blocking(self) -> None:
        if not self._probing.acquire(blocking=False):
            raise StorageUnavailable("the last probe still hangs")
        try:
            self._check_root_blocking()
        finally:
            self._probing.release()

    async def _set(self, *, is_serving: bool) -> None:
        reply = health_pb2.HealthCheckResponse
        status = reply.SERVING if is_serving else reply.NOT_SERVING
        for name in ("", SERVICE):
            await self.servicer.set(name, status)
