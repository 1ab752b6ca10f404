"""The use cases in the glossary's words: lookup, store, fetch, delete.

Knows nothing of gRPC or protobuf. Blocking work goes to the fs threads in batches, so that a
descriptor costs tasks by the batch, never by the chunk.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

from kvserve.config import LimitsConfig
from kvserve.errors import InvalidRequest, Overloaded, StorageError
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers, check_lease_owner
from kvserve.open_tree import OpenTree
from kvserve.store.chunk_store import HIT, ChunkLocations
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.transfer.batches import in_batches
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.long_steps import CHUNKS_IN_PLACE_MAX, LongSteps
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.store_pump import StorePump
from kvserve.transfer.store_session import StoreSession
from kvserve.transfer.turns import Turns

_T = TypeVar("_T")

_REFUSED = Verdict(
    ChunkStatus.NO_SPACE,
    "the limit of the tree or of the tenant is reached (settings [capacity]); retry when eviction "
    "has made room",
)


class Service:
    """One per server; all methods run on its event loop."""

    def __init__(
        self,
        tree: OpenTree,
        threads: Executor,
        limits: LimitsConfig,
        metrics: Metrics,
        *,
        lease_ttl_s_max: float,
        store_refused: Callable[[], None],
    ) -> None:
        """`store_refused` is called when chunks were not let in for want of room."""
        self._tree = tree
        self._store = tree.store
        self._threads = threads
        self._limits = limits
        self._metrics = metrics
        self._lease_ttl_s_max = lease_ttl_s_max
        self._store_refused = store_refused
        self._transfers = 0
        self._lookups = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = Turns()
        self.long_steps = LongSteps()

    def __repr__(self) -> str:
        return f"<Service {self._transfers} transfers, {self._store!r}>"

    async def ended(self) -> None:
        """Waits until every transfer has cleaned up after itself; the last call."""
        await self._idle.wait()
        self.long_steps.close()

    def locate(self, descriptor: Descriptor) -> ChunkLocations:
        """What the requests take: it may serve several for the same descriptor."""
        return self._store.locate(descriptor)

    async def lookup(self, where: ChunkLocations) -> list[Verdict]:
        """Which chunks are stored: one system call for each not seen lately, in batches."""
        with self._looking_up(where):
            chunk_count = where.descriptor.chunk_count
            unknown = await self.long_steps.run(chunk_count, lambda: self._store.unknown(where))
            verdicts = [HIT] * chunk_count

            def look_blocking(index: int) -> None:
                known = unknown[index]
                verdicts[index] = known or self._store.status_blocking(where, index)

            if unknown:
                await in_batches(self._threads, look_blocking, list(unknown))
            await self._explain(where.descriptor, verdicts)
            self._metrics.answered("lookup", verdicts)
            return verdicts

    async def lease(
        self, where: ChunkLocations, request: str, ttl_s: float
    ) -> tuple[list[Verdict], int]:
        """A lookup whose hits are not evicted until `release` or for `ttl_s`; and their number."""
        self._check_lease(request, ttl_s)
        owner = (where.descriptor.tenant, request)
        chunk_count = where.descriptor.chunk_count
        exchange = self._tree.exchange
        with self._looking_up(where):
            keys = await self.long_steps.run(chunk_count, lambda: where.known_keys)
            await self._run(exchange.grant_blocking, owner, where.shard, keys, ttl_s)
            hits: list[int] = []
            try:
                verdicts = await in_batches(
                    self._threads,
                    lambda index: self._store.leased_status_blocking(where, index),
                    range(chunk_count),
                )
                hits = await self.long_steps.run(
                    chunk_count,
                    lambda: [key for key, it in zip(keys, verdicts, strict=True) if it is HIT],
                )
            finally:
                exchange.keep(owner, where.shard, hits, ttl_s)
            await self._explain(where.descriptor, verdicts)
            self._metrics.answered("lookup", verdicts)
            return verdicts, len(hits)

    def release(self, tenant: str, request: str) -> int:
        """How many leased chunks were given free."""
        return self._tree.exchange.release((tenant, request))

    async def delete(self, where: ChunkLocations) -> list[ChunkStatus]:
        with self._looking_up(where):
            return await in_batches(
                self._threads,
                lambda index: self._store.delete_blocking(where, index),
                range(where.descriptor.chunk_count),
            )

    async def pin(self, where: ChunkLocations, *, is_pinned: bool) -> list[ChunkStatus]:
        """Bars the chunks from eviction and expiry, or no longer."""
        with self._looking_up(where):
            statuses = await in_batches(
                self._threads,
                lambda index: self._store.pin_blocking(where, index, is_pinned=is_pinned),
                range(where.descriptor.chunk_count),
            )
            if is_pinned:  # what an evictor had picked before the mark was made is named by now
                await self._run(self._tree.exchange.read_departures_blocking)
                statuses = self._store.without_leaving(where, statuses)
            return statuses

    async def fetch(self, where: ChunkLocations, layers: Sequence[int], plane: FetchPlane) -> None:
        """Sends `layers` in order over `plane`; empty means all, in the descriptor's order."""
        descriptor = where.descriptor
        check_layers("layers", layers, descriptor.layout)
        opened: list[OpenChunk | Verdict | None] = []
        with self._admitted():
            try:
                await self._open(where, opened)
                pump, verdicts = await self.long_steps.run(
                    descriptor.chunk_count, lambda: self._fetch_pump(descriptor, opened, plane)
                )
                await self._explain(descriptor, verdicts)
                self._metrics.answered("fetch", verdicts)
                await plane.head(verdicts)
                try:
                    await pump.run(layers or descriptor.layer_order)
                finally:
                    # Hits in the head that turned out to be misses.
                    self._metrics.answered("fetch", list(pump.faults.values()))
            finally:
                await self.long_steps.run(len(opened), lambda: self._release(opened))

    def _fetch_pump(
        self,
        descriptor: Descriptor,
        opened: Sequence[OpenChunk | Verdict | None],
        plane: FetchPlane,
    ) -> tuple[FetchPump[OpenChunk], list[Verdict]]:
        chunks = [found if isinstance(found, OpenChunk) else None for found in opened]
        pump = FetchPump(
            self._store,
            self._threads,
            plane,
            layout=descriptor.layout,
            chunks=chunks,
            frame_size_bytes=self._limits.frame_size_bytes,
            frames_in_flight=self._limits.frames_in_flight,
            turns=self._turns,
        )
        self._tree.recency.fetched(chunks, time.time())
        return pump, [found if isinstance(found, Verdict) else HIT for found in opened]

    async def store(self, where: ChunkLocations, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole."""
        descriptor = where.descriptor
        chunk_count = descriptor.chunk_count
        with self._admitted():
            missing = await self._missing(where)
            let_in = self._store.ledger.reserve(
                descriptor.tenant, where.geometry.file_size_bytes, len(missing)
            )
            # The head of the prefix first: the tail is of no use without it.
            needed, refused = missing[:let_in], missing[let_in:]
            if refused:
                self._store_refused()
            writers: dict[int, ChunkWriter] = {}

            def writer(index: int) -> ChunkWriter:
                # Made by a chunk's first write; of two threads that do so at once one wins.
                found = writers.get(index)
                return found or writers.setdefault(index, self._store.writer(where, index))

            try:
                if needed:
                    await self._run(self._store.ensure_namespace_blocking, descriptor.key(0))
                # Their files are made by the first write: the client need not wait for that.
                await plane.needs(
                    await self.long_steps.run(
                        chunk_count, lambda: _store_statuses(chunk_count, needed, refused)
                    )
                )
                session = StoreSession(
                    descriptor.layout, needed, frame_size_bytes_max=self._limits.frame_size_bytes
                )
                pump = StorePump(
                    session,
                    writer,
                    self._threads,
                    layer_stored=plane.layer_stored,
                    frames_in_flight=self._limits.frames_in_flight,
                )
                try:
                    async for header, payload in plane.frames():
                        await pump.feed(header, payload)
                    await pump.finish(may_publish=plane.is_finished)
                finally:
                    await pump.close()
            finally:
                left = [index for index, writer in writers.items() if writer.is_open]
                try:
                    await in_batches(self._threads, lambda index: _abandon(writers[index]), left)
                finally:
                    self._store.ledger.unreserve(
                        descriptor.tenant, where.geometry.file_size_bytes, let_in
                    )
            verdicts = dict.fromkeys(refused, _REFUSED) | pump.verdicts
            self._note_stored(where, verdicts)
            known = Verdict(ChunkStatus.KNOWN)

            def ended() -> list[Verdict]:
                return [verdicts.get(index, known) for index in range(chunk_count)]

            result = await self.long_steps.run(chunk_count, ended)
            self._metrics.answered("store", result)
            await plane.result(result)

    async def _missing(self, where: ChunkLocations) -> list[int]:
        """The chunks that are not stored yet."""
        present = await in_batches(
            self._threads,
            lambda index: self._store.status_blocking(where, index),
            range(where.descriptor.chunk_count),
        )
        return await self.long_steps.run(
            len(present), lambda: [index for index, it in enumerate(present) if it is not HIT]
        )

    def _note_stored(self, where: ChunkLocations, verdicts: Mapping[int, Verdict]) -> None:
        now = time.time()
        for index, verdict in verdicts.items():
            if verdict.status is ChunkStatus.STORED:
                self._tree.recency.stored(where.path(index), index, now)

    async def _open(self, where: ChunkLocations, opened: list[OpenChunk | Verdict | None]) -> None:
        """Fills `opened`; whatever happens, what is in it must be released."""
        cache = self._store.open_chunks

        def acquire() -> list[int]:
            opened.extend(cache.acquire_all(where.paths))
            return [index for index, found in enumerate(opened) if found is None]

        def open_blocking(index: int) -> None:
            opened[index] = self._store.open_blocking(where, index)

        missing = await self.long_steps.run(where.descriptor.chunk_count, acquire)
        await in_batches(self._threads, open_blocking, missing)

    def _release(self, opened: Sequence[OpenChunk | Verdict | None]) -> None:
        self._store.open_chunks.release_all(
            found for found in opened if isinstance(found, OpenChunk)
        )

    async def _explain(self, descriptor: Descriptor, verdicts: list[Verdict]) -> None:
        """If the prefix is absent because only its identity differs, says so for every chunk."""
        if verdicts[0].status is not ChunkStatus.MISS_ABSENT:
            return

        def explain_blocking() -> None:
            reason = self._store.explain_miss_blocking(descriptor.key(0))
            if reason:
                absent, identity = ChunkStatus.MISS_ABSENT, Verdict(ChunkStatus.MISS_IDENTITY)
                verdicts[:] = [identity if it.status is absent else it for it in verdicts]
                verdicts[0] = Verdict(ChunkStatus.MISS_IDENTITY, reason)

        await self._run(explain_blocking)

    def _check_lease(self, request: str, ttl_s: float) -> None:
        check_lease_owner(request)
        if not 0 < ttl_s <= self._lease_ttl_s_max:  # also refuses a NaN
            raise InvalidRequest(
                f"lease_ttl_s must be over 0 and at most {self._lease_ttl_s_max} "
                f"(capacity.lease_ttl_s_max), got {ttl_s}"
            )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a transfer in and out; refuses, retryable, beyond the bound."""
        if self._transfers >= self._limits.transfers_max:
            raise Overloaded(
                f"{self._transfers} transfers are open (limits.transfers_max); retry",
                retry_after_s=0.1,
            )
        self._transfers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._transfers -= 1
            if not self._transfers:
                self._idle.set()

    @contextmanager
    def _looking_up(self, where: ChunkLocations) -> Iterator[None]:
        """The same for lookups and deletes; frames make room for the small ones meanwhile."""
        if self._lookups >= self._limits.lookups_max:
            raise Overloaded(
                f"{self._lookups} lookups are open (limits.lookups_max); retry",
                retry_after_s=0.01,
            )
        self._lookups += 1
        try:
            is_small = where.descriptor.chunk_count <= CHUNKS_IN_PLACE_MAX
            with self._turns.held() if is_small else nullcontext():
                yield
        finally:
            self._lookups -= 1

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _store_statuses(
    chunk_count: int, needed: Sequence[int], refused: Sequence[int]
) -> list[ChunkStatus]:
    statuses = [ChunkStatus.KNOWN] * chunk_count
    for index in needed:
        statuses[index] = ChunkStatus.NEEDED
    for index in refused:
        statuses[index] = ChunkStatus.NO_SPACE
    return statuses


def _abandon(writer: ChunkWriter) -> None:
    # One file that cannot be removed must not keep the others.
    with suppress(StorageError):
        writer.abandon_blocking()
