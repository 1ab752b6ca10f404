"""Use cases that move no payload: lookup, lease, verify, delete, pin.

Blocking work goes to the fs threads in batches, so that a descriptor costs tasks by the batch,
never by the chunk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from kvserve.errors import InvalidRequest, KvserveError, StorageUnavailable
from kvserve.model import ChunkStatus, Descriptor, Shard, Verdict
from kvserve.open_tree import OpenTree
from kvserve.storage_health import StorageHealth
from kvserve.store.chunk_store import HIT
from kvserve.store.leases import LeaseOwner
from kvserve.store.locations import ChunkLocations
from kvserve.store.whole_check import check_whole_blocking
from kvserve.transfer.batches import Late, in_batches
from kvserve.transfer.long_steps import LongSteps

log = logging.getLogger(__name__)

RANKS_MAX: Final = 1024
RANKS_CHUNKS_MAX: Final = 1 << 19
"""Chunks times ranks of one lookup."""

_T = TypeVar("_T")


class Lookups:
    """One per server; whom to let in is decided before."""

    def __init__(
        self, tree: OpenTree, threads: Executor, long_steps: LongSteps, health: StorageHealth
    ) -> None:
        self._tree = tree
        self._store = tree.store
        self._threads = threads
        self._long_steps = long_steps
        self._health = health

    async def lookup(self, where: ChunkLocations) -> list[Verdict]:
        """Which chunks are stored: one system call for each not seen lately, in batches."""
        chunk_count = where.descriptor.chunk_count
        verdicts = [HIT] * chunk_count

        def begin() -> list[int]:
            unknown = self._store.unknown(where)
            failing = self._store.failing(where, unknown)
            asked: list[int] = []
            for index, known in unknown.items():
                verdict = failing.get(index) or known
                if verdict is None:
                    asked.append(index)
                else:
                    verdicts[index] = verdict
            return asked

        asked = await self._long_steps.run(chunk_count, begin)
        statuses = await self._ask(where, asked, verdicts, self._store.status_blocking)
        self._health.note_reading(statuses)
        await self.explain(where.descriptor, verdicts)
        return verdicts

    async def missing(self, where: ChunkLocations) -> list[int]:
        """The chunks that a store needs; one whose file cannot be read is stored anew.

        Raises:
            StorageUnavailable: the file system answered for none of them.
        """
        verdicts = [HIT] * where.descriptor.chunk_count
        asked = await self._begin(where, verdicts)
        if await self._ask(where, asked, verdicts, self._store.status_blocking) == {
            ChunkStatus.MISS_TIMEOUT
        }:
            raise StorageUnavailable(verdicts[asked[0]].message)
        return await self._long_steps.run(
            len(verdicts), lambda: [index for index, it in enumerate(verdicts) if it is not HIT]
        )

    async def lease(
        self, where: ChunkLocations, owner: LeaseOwner, ttl_s: float
    ) -> tuple[list[Verdict], int]:
        """A lookup whose hits are not evicted until they are released or for `ttl_s`; and their
        number."""
        chunk_count = where.descriptor.chunk_count
        exchange = self._tree.exchange
        keys = await self._long_steps.run(chunk_count, lambda: where.known_keys)
        try:
            await self.run(exchange.grant_blocking, owner, where.shard, keys, ttl_s)
        except StorageUnavailable as error:
            if error.timeout_s:  # a call that hangs has not put back what was held
                exchange.narrow(owner, where.shard, ())
            raise
        verdicts = [HIT] * chunk_count
        hits: list[int] = []
        try:
            asked = await self._begin(where, verdicts)
            statuses = await self._ask(where, asked, verdicts, self._store.leased_status_blocking)
            hits = await self._long_steps.run(
                chunk_count,
                lambda: [key for key, it in zip(keys, verdicts, strict=True) if it is HIT],
            )
        finally:
            await self._long_steps.run(
                chunk_count, lambda: exchange.narrow(owner, where.shard, hits)
            )
        self._health.note_reading(statuses)
        await self.explain(where.descriptor, verdicts)
        return verdicts, len(hits)

    async def of_all_ranks(
        self,
        where: ChunkLocations,
        one_rank: Callable[[ChunkLocations], Awaitable[list[Verdict]]],
    ) -> list[Verdict]:
        """`one_rank` for each rank of the shard's group; a chunk is a hit if it is one for all.

        Ranks that look by themselves may see different prefixes while chunks come and go, and an
        engine whose ranks disagree deadlocks (LMCache#1467, sglang#30760).

        Raises:
            InvalidRequest: too many chunks times ranks.
        """
        descriptor = where.descriptor
        count = descriptor.shard.count
        if count > RANKS_MAX or descriptor.chunk_count * count > RANKS_CHUNKS_MAX:
            raise InvalidRequest(
                f"all_ranks: {descriptor.chunk_count} chunks of {count} ranks; at most "
                f"{RANKS_MAX} ranks, and chunks times ranks must be at most {RANKS_CHUNKS_MAX}: "
                "ask for a shorter prefix"
            )
        verdicts = [HIT] * descriptor.chunk_count
        for rank in range(count):
            ranks = replace(descriptor, shard=Shard(rank, count))
            found = await one_rank(
                await self._long_steps.run(
                    descriptor.chunk_count, partial(self._store.locate, ranks)
                )
            )
            verdicts = await self._long_steps.run(
                len(found), partial(_worse, verdicts, found, rank)
            )
        return verdicts

    async def verify(self, where: ChunkLocations) -> list[Verdict]:
        """Reads the chunks as a whole, one after another: it keeps one thread from the others."""

        def late(index: int, late: Late) -> Verdict:
            # That says nothing about the chunk: it may be large.
            return Verdict(ChunkStatus.MISS_TIMEOUT, str(late.error))

        verdicts: list[Verdict] = []
        for chunk_index in range(where.descriptor.chunk_count):
            verdicts += await in_batches(
                self._threads,
                lambda index: check_whole_blocking(self._store, where, index),
                (chunk_index,),
                late=late,
            )
        return verdicts

    async def delete(self, where: ChunkLocations) -> list[ChunkStatus]:
        """Raises `StorageError`, also if the file system gives no answer in time."""
        return await in_batches(
            self._threads,
            lambda index: self._store.delete_blocking(where, index),
            range(where.descriptor.chunk_count),
        )

    async def pin(self, where: ChunkLocations, *, is_pinned: bool) -> list[ChunkStatus]:
        """Bars the chunks from eviction and expiry, or no longer. Raises like `delete`."""
        statuses = await in_batches(
            self._threads,
            lambda index: self._store.pin_blocking(where, index, is_pinned=is_pinned),
            range(where.descriptor.chunk_count),
        )
        if is_pinned:  # what an evictor had picked before the mark was made is named by now
            await self.run(self._tree.exchange.read_departures_blocking)
            statuses = await self._long_steps.run(
                len(statuses), partial(self._store.without_leaving, where, statuses)
            )
        return statuses

    async def explain(self, descriptor: Descriptor, verdicts: list[Verdict]) -> None:
        """If the prefix is absent because only its identity differs, says so for every chunk."""
        absent, identity = ChunkStatus.MISS_ABSENT, Verdict(ChunkStatus.MISS_IDENTITY)
        if verdicts[0].status is not absent:
            return
        hangs = await self._long_steps.run(
            len(verdicts), lambda: any(it.status is ChunkStatus.MISS_TIMEOUT for it in verdicts)
        )
        if hangs:
            return  # no time for that

        def explain_blocking() -> list[Verdict]:
            reason = self._store.explain_miss_blocking(descriptor.key(0))
            if not reason:
                return []
            explained = [identity if it.status is absent else it for it in verdicts]
            explained[0] = Verdict(ChunkStatus.MISS_IDENTITY, reason)
            return explained

        try:
            explained = await self.run(explain_blocking)
        except KvserveError as error:
            log.debug("no reason for a miss: %s", error)
        else:
            verdicts[:] = explained or verdicts

    def late(self, where: ChunkLocations, index: int, late: Late) -> Verdict:
        """The miss of a chunk whose call gave no answer in time."""
        return self._store.late(where, index, late.error, late.hangs)

    async def run(self, call: Callable[..., _T], *args: object) -> _T:
        """One call on the fs threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _begin(self, where: ChunkLocations, verdicts: list[Verdict]) -> list[int]:
        """Fills in the chunks that reads failed for lately; the others are to be asked for."""

        def begin() -> list[int]:
            failing = self._store.failing(where, range(len(verdicts)))
            for index, verdict in failing.items():
                verdicts[index] = verdict
            return [index for index in range(len(verdicts)) if index not in failing]

        return await self._long_steps.run(len(verdicts), begin)

    async def _ask(
        self,
        where: ChunkLocations,
        asked: Sequence[int],
        verdicts: list[Verdict],
        status_blocking: Callable[[ChunkLocations, int], Verdict],
    ) -> set[ChunkStatus]:
        """Asks the file system and fills in what it says; which statuses that were."""
        found = await in_batches(
            self._threads, partial(status_blocking, where), asked, late=partial(self.late, where)
        )

        def fill_in() -> set[ChunkStatus]:
            for index, verdict in zip(asked, found, strict=True):
                verdicts[index] = verdict
            return {verdict.status for verdict in found}

        return await self._long_steps.run(len(asked), fill_in)


def _worse(verdicts: list[Verdict], found: list[Verdict], rank: int) -> list[Verdict]:
    """By chunk: what was a miss before, else what this rank has."""
    return [
        earlier
        if earlier is not HIT
        else HIT
        if own is HIT
        else Verdict(own.status, f"of rank {rank}" + (f": {own.message}" if own.message else ""))
        for earlier, own in zip(verdicts, found, strict=True)
    ]
