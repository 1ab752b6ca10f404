"""What a server does in the background for the tree: shows that it lives, tells the others what it
knows, counts and sweeps, evicts, stamps what was used, closes files that nobody reads any more,
removes what it could not remove before.

All run on a thread of their own, a step at a time. An error of the file system is logged and tried
again in the next round; it never ends the server, and requests never wait for any of this. Nor does
a step that hangs hold up the others: it is left behind (`fs/threads.py`), its round has failed, and
until it comes back the rounds that would touch the same things fail.

Of the servers of a tree one is its steward: the living one with the first tag. It alone counts and
evicts, for all; when it dies, the next one takes over once its claim has expired. Should two take
themselves for the steward for a moment, more is evicted than need be, and nothing else happens.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from kvserve.errors import KvserveError, StorageUnavailable
from kvserve.fs.threads import FsThreads
from kvserve.metrics import Metrics
from kvserve.open_tree import OpenTree
from kvserve.policy.quota import Pressure
from kvserve.store.evict import EvictionResult
from kvserve.store.ledger import UsageByTenant
from kvserve.store.sweep import sweep_blocking
from kvserve.store.tree_count import TreeCount

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Between two directories of a sweep: 4,096 take some 20 s, and a metadata server hardly notices.
_SWEEP_PAUSE_S = 0.005
_IDLE_FILES_S = 60.0
_STAMP_INTERVAL_S = 5.0
_IN_VAIN_S = 5.0
_STEP_S = 0.02
"""Eviction looks at directories for so long in one go."""


class _Line:
    """Steps that must not run two at a time, as they do where one was left behind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    def run_blocking(self, wait_s: float, call: Callable[..., _T], *args: object) -> _T:
        if not self._lock.acquire(timeout=wait_s):
            raise StorageUnavailable(f"{self._name}: the last step still hangs")
        try:
            return call(*args)
        finally:
            self._lock.release()


class Upkeep:
    """Runs from `start` to `stop`."""

    def __init__(
        self,
        tree: OpenTree,
        metrics: Metrics,
        *,
        sweep_interval_s: float,
        exchange_interval_s: float,
        ttl_s: float,
        timeout_s: float,
    ) -> None:
        self._tree = tree
        self._metrics = metrics
        # Its own thread: the claim must be shown in time however busy the others are.
        self._thread = FsThreads(1, timeout_s=timeout_s, name="upkeep")
        self._beats = _Line("showing that this server lives")
        self._notes = _Line("telling the other servers")
        self._sweeps = _Line("sweeping")
        self._evictions = _Line("evicting")
        self._stamps = _Line("stamping what was used")
        self._closes = _Line("closing idle files")
        self._sweep_interval_s = sweep_interval(sweep_interval_s, ttl_s)
        self._exchange_interval_s = exchange_interval_s
        self._ttl_s = ttl_s
        self._wanted = asyncio.Event()
        # By tenant (None: the total): when eviction may be tried again that found nothing.
        self._in_vain_until: dict[str | None, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        tree = self._tree
        rounds: list[tuple[float, Callable[[], Awaitable[None]], bool]] = [
            (tree.owner.lease_s / 3, self._beat, True),
            (self._exchange_interval_s, self._exchange, True),
            (self._sweep_interval_s, self._sweep, False),
            (0.0, self._relieve, False),
            (_STAMP_INTERVAL_S, self._stamp, True),
            (_IDLE_FILES_S / 2, self._close_idle, True),
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._every(interval_s, step, first_after=first_after))
            for interval_s, step, first_after in rounds
        ]

    def relieve_soon(self) -> None:
        """A store was refused for want of room: look for pressure now."""
        self._wanted.set()

    async def stop(self) -> None:
        """Ends all, tells the others the last of it and gives the server's claim up."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            await asyncio.wait([task])
            if not task.cancelled() and (defect := task.exception()) is not None:
                log.error("upkeep had ended: %r", defect)
        for last in (self._stamp, self._exchange, self._close_exchange, self._release):
            try:
                await last()
            except KvserveError as error:
                log.warning("at the end: %s", error)
                if isinstance(error, StorageUnavailable) and error.timeout_s:
                    break  # the others would wait as long; the claim expires
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
                log.warning("upkeep: %s; next try in %.0f s", error, max(1.0, interval_s))
                await asyncio.sleep(max(0.0, 1.0 - interval_s))
            except Exception:
                # A defect must not end what keeps the tree in order, nor be silent.
                log.exception("upkeep: a fault in %s", getattr(step, "__name__", step))
                await asyncio.sleep(max(0.0, 1.0 - interval_s))
            await asyncio.sleep(interval_s)

    async def _beat(self) -> None:
        await self._run(self._beats, self._tree.owner.beat_blocking)
        await self._run(self._closes, self._tree.store.left_writers.remove_blocking)

    async def _release(self) -> None:
        try:
            await self._run(self._beats, self._tree.owner.release_blocking)
        except KvserveError as error:
            log.warning("the server's claim stays until it expires: %s", error)

    async def _close_idle(self) -> None:
        close_idle_blocking = self._tree.store.open_chunks.close_idle_blocking
        await self._run(self._closes, close_idle_blocking, _IDLE_FILES_S)

    async def _exchange(self) -> None:
        await self._run(self._notes, self._exchange_blocking)

    async def _close_exchange(self) -> None:
        await self._run(self._notes, self._tree.exchange.close_blocking)

    def _exchange_blocking(self) -> None:
        tree = self._tree
        tree.store.check_mounted_blocking()  # else the files below would go where nobody looks
        tree.ledger.set_base(tree.usage_files.base_for(tree.ledger.own_changes()))
        tree.exchange.tell_blocking()
        tree.exchange.read_departures_blocking()

    async def _stamp(self) -> None:
        while await self._run(self._stamps, self._tree.recency.flush_blocking):
            pass

    async def _sweep(self) -> None:
        tree = self._tree
        is_steward = await self._run(self._sweeps, tree.owner.is_first_blocking)
        fs, root = tree.store.fs, tree.store.root
        others = await self._run(self._notes, tree.usage_files.changes_of_others)
        count = TreeCount(fs, tree.ledger) if is_steward else None
        expired = EvictionResult()
        steps = sweep_blocking(fs, root, tree.owner, count)
        result = None
        is_whole = False
        try:
            # A step that hangs raises here: nobody advances `steps` beside it.
            while (found := await self._run(self._sweeps, next, steps, None)) is not None:
                result = found
                if is_steward and self._ttl_s and found.is_fan:
                    expire_blocking = tree.evictor.expire_blocking
                    await self._run(
                        self._evictions, expire_blocking, found.directory, self._ttl_s, expired
                    )
                await asyncio.sleep(_SWEEP_PAUSE_S)
            # What could not be listed is not gone: the old count is nearer to the truth.
            is_whole = result is not None and not result.unlisted
        finally:
            if count is not None and not is_whole:
                count.give_up()
            self._note(expired, f"not used for {self._ttl_s:.0f} s (capacity.ttl_s)")
        if count is not None and is_whole:
            await self._run(self._notes, self._end_count_blocking, count, others)
        if result is not None and (result.removed or result.failed):
            log.info("swept after dead servers: %s", result)

    def _end_count_blocking(self, count: TreeCount, others: dict[str, UsageByTenant]) -> None:
        tree = self._tree
        counted, own = count.finish()
        tags = tree.usage_files.tags()
        tree.usage_files.write_base(counted, own, others)
        dead = {tag for tag in tags if not tree.owner.lives_blocking(tag)}
        tree.usage_files.forget(dead, others)
        tree.usage_files.forget_unfinished(tree.owner.lives_blocking)
        tree.exchange.forget_dead_blocking(tree.owner.lives_blocking, time.time())

    async def _relieve(self) -> None:
        """Waits for a wish or the next look; evicts while there is pressure."""
        try:
            async with asyncio.timeout(self._exchange_interval_s):
                await self._wanted.wait()
        except TimeoutError:
            pass
        self._wanted.clear()
        pressures = self._tree.ledger.pressures()
        now = time.monotonic()
        self._in_vain_until = {k: at for k, at in self._in_vain_until.items() if at > now}
        wanted = [it.tenant for it in pressures if it.tenant not in self._in_vain_until]
        if not wanted or not await self._run(self._evictions, self._tree.owner.is_first_blocking):
            return
        for tenant in wanted:
            # Asked anew: what went for the one before may have been enough.
            for pressure in self._tree.ledger.pressures():
                if pressure.tenant == tenant:
                    await self._relieve_one(pressure)

    async def _relieve_one(self, pressure: Pressure) -> None:
        result = EvictionResult()
        steps = self._tree.evictor.relieve_blocking(pressure)
        try:
            while (found := await self._run(self._evictions, _advance, steps)) is not None:
                result = found
        finally:
            self._note(result, f"{pressure.tenant or 'the tree'} was above its high watermark")
        if not result.evicted:
            self._in_vain_until[pressure.tenant] = time.monotonic() + _IN_VAIN_S
            log.warning(
                "%s is above its high watermark and nothing can be evicted: its chunks are leased, "
                "pinned, in use or cannot be deleted; next try in %.0f s",
                pressure.tenant or "the tree",
                _IN_VAIN_S,
            )

    def _note(self, result: EvictionResult, why: str) -> None:
        self._metrics.evicted(result.evicted, result.failed)
        if result.evicted or result.failed:
            log.info("%s: %s", why, result)

    async def _run(self, line: _Line, call: Callable[..., _T], *args: object) -> _T:
        # The wait is over before the step is overdue: it does not begin when nobody waits for it.
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, line.run_blocking, self._thread.timeout_s / 2, call, *args
        )


def _advance(steps: Iterator[EvictionResult]) -> EvictionResult | None:
    """As many steps as fit into a moment; None at the end."""
    until = time.monotonic() + _STEP_S
    found = next(steps, None)
    while found is not None and time.monotonic() < until:
        following = next(steps, None)
        if following is None:
            break
        found = following
    return found


def sweep_interval(sweep_interval_s: float, ttl_s: float) -> float:
    """With a ttl the tree is walked more often: a chunk goes at most a quarter of its ttl late."""
    return min(sweep_interval_s, max(1.0, ttl_s / 4)) if ttl_s else sweep_interval_s
