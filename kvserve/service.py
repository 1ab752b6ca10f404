"""The use cases in the glossary's words, and who is let in.

Lookup, lease, store, fetch, verify, delete, pin; `lookups.py` and `transfers.py` do the work. Knows
nothing of gRPC or protobuf.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from typing import Final

from kvserve.config import LimitsConfig
from kvserve.errors import InvalidRequest, Overloaded
from kvserve.lookups import Lookups
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers
from kvserve.names import check_lease_owner
from kvserve.open_tree import OpenTree
from kvserve.storage_health import StorageHealth
from kvserve.store.locations import ChunkLocations
from kvserve.transfer.long_steps import CHUNKS_IN_PLACE_MAX, LongSteps
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.transfer.turns import Turns
from kvserve.transfers import Transfers

_VERIFIES_MAX: Final = 4


class Service:
    """One per server; all methods run on its event loop."""

    def __init__(
        self,
        tree: OpenTree,
        threads: Executor,
        limits: LimitsConfig,
        metrics: Metrics,
        *,
        staging: Staging,
        pace: ReadPace,
        health: StorageHealth,
        lease_ttl_s_max: float,
        store_refused: Callable[[], None],
    ) -> None:
        """`store_refused` is called when chunks were not let in for want of room."""
        self._tree = tree
        self._limits = limits
        self._metrics = metrics
        self._lease_ttl_s_max = lease_ttl_s_max
        self._open_transfers = 0
        self._open_lookups = 0
        self._open_verifies = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = Turns()
        self.long_steps = LongSteps()
        self._lookups = Lookups(tree, threads, self.long_steps, health)
        self._transfers = Transfers(
            tree,
            threads,
            limits,
            metrics,
            lookups=self._lookups,
            long_steps=self.long_steps,
            health=health,
            turns=self._turns,
            staging=staging,
            pace=pace,
            store_refused=store_refused,
        )

    def __repr__(self) -> str:
        return f"<Service {self._open_transfers} transfers, {self._tree.store!r}>"

    async def ended(self) -> None:
        """Waits until every transfer has cleaned up after itself; the last call."""
        await self._idle.wait()
        self.long_steps.close()

    def locate(self, descriptor: Descriptor) -> ChunkLocations:
        """What the requests take: it may serve several for the same descriptor."""
        return self._tree.store.locate(descriptor)

    async def lookup(self, where: ChunkLocations, *, all_ranks: bool = False) -> list[Verdict]:
        """Which chunks are stored, for this rank or for all ranks of its group."""
        with self._looking_up(where):
            if all_ranks:
                verdicts = await self._lookups.of_all_ranks(where, self._lookups.lookup)
            else:
                verdicts = await self._lookups.lookup(where)
            self._metrics.answered("lookup", verdicts)
            return verdicts

    async def lease(
        self, where: ChunkLocations, request: str, ttl_s: float, *, all_ranks: bool = False
    ) -> tuple[list[Verdict], int]:
        """A lookup whose hits are not evicted until `release` or for `ttl_s`; and their number."""
        check_lease_owner(request)
        if not 0 < ttl_s <= self._lease_ttl_s_max:  # also refuses a NaN
            raise InvalidRequest(
                f"lease_ttl_s must be over 0 and at most {self._lease_ttl_s_max} "
                f"(capacity.lease_ttl_s_max), got {ttl_s}"
            )
        with self._looking_up(where):
            owner = (where.descriptor.tenant, request)
            leased = 0

            async def lease_one(of_rank: ChunkLocations) -> list[Verdict]:
                nonlocal leased
                verdicts, count = await self._lookups.lease(of_rank, owner, ttl_s)
                leased += count
                return verdicts

            if all_ranks:
                verdicts = await self._lookups.of_all_ranks(where, lease_one)
            else:
                verdicts = await lease_one(where)
            self._metrics.answered("lookup", verdicts)
            return verdicts, leased

    async def release(self, tenant: str, request: str) -> int:
        """How many leased chunks were given free."""
        owner, exchange = (tenant, request), self._tree.exchange
        return await self.long_steps.run(
            exchange.leases.chunks_of(owner), lambda: exchange.release(owner)
        )

    async def verify(self, where: ChunkLocations) -> list[Verdict]:
        """Whether the chunks are stored and right; it costs as much as a transfer.

        Raises:
            Overloaded: some are under way; they must not take the threads from transfers.
        """
        if self._open_verifies >= _VERIFIES_MAX:
            raise Overloaded(f"{self._open_verifies} Verify are under way; retry", retry_after_s=1)
        self._open_verifies += 1
        try:
            return await self._verify(where)
        finally:
            self._open_verifies -= 1

    async def _verify(self, where: ChunkLocations) -> list[Verdict]:
        with self._admitted():
            verdicts = await self._lookups.verify(where)
            self._metrics.answered("verify", verdicts)
            return verdicts

    async def delete(self, where: ChunkLocations) -> list[ChunkStatus]:
        with self._looking_up(where):
            return await self._lookups.delete(where)

    async def pin(self, where: ChunkLocations, *, is_pinned: bool) -> list[ChunkStatus]:
        """Bars the chunks from eviction and expiry, or no longer."""
        with self._looking_up(where):
            return await self._lookups.pin(where, is_pinned=is_pinned)

    async def fetch(self, where: ChunkLocations, layers: Sequence[int], plane: FetchPlane) -> None:
        """Sends `layers` in order over `plane`; empty means all, in the descriptor's order."""
        check_layers("layers", layers, where.descriptor.layout)
        with self._admitted():
            await self._transfers.fetch(where, layers, plane)

    async def store(self, where: ChunkLocations, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole."""
        with self._admitted():
            await self._transfers.store(where, plane)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a transfer in and out; refuses, retryable, beyond the bound."""
        if self._open_transfers >= self._limits.transfers_max:
            raise Overloaded(
                f"{self._open_transfers} transfers are open (limits.transfers_max); retry",
                retry_after_s=0.1,
            )
        self._open_transfers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_transfers -= 1
            if not self._open_transfers:
                self._idle.set()

    @contextmanager
    def _looking_up(self, where: ChunkLocations) -> Iterator[None]:
        """The same for lookups and deletes; frames make room for the small ones meanwhile."""
        if self._open_lookups >= self._limits.lookups_max:
            raise Overloaded(
                f"{self._open_lookups} lookups are open (limits.lookups_max); retry",
                retry_after_s=0.01,
            )
        self._open_lookups += 1
        try:
            is_small = where.descriptor.chunk_count <= CHUNKS_IN_PLACE_MAX
            with self._turns.held() if is_small else nullcontext():
                yield
        finally:
            self._open_lookups -= 1
