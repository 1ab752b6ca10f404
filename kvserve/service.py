"""The use cases in the glossary's words: lookup, store, fetch, delete.

Knows nothing of gRPC or protobuf. Blocking work goes to the fs threads in batches, so that a
descriptor costs tasks by the batch, never by the chunk.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvserve.config import LimitsConfig
from kvserve.errors import InvalidRequest, Overloaded, StorageError
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers, check_lease_owner
from kvserve.store.chunk_store import ChunkLocations
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.transfer.batches import in_batches
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.store_pump import StorePump
from kvserve.transfer.store_session import StoreSession
from kvserve.transfer.turns import Turns
from kvserve.tree import Tree

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
        tree: Tree,
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

    def __repr__(self) -> str:
        return f"<Service {self._transfers} transfers, {self._store!r}>"

    async def ended(self) -> None:
        """Waits until every transfer has cleaned up after itself."""
        await self._idle.wait()

    async def lookup(self, descriptor: Descriptor) -> list[Verdict]:
        """Which chunks are stored: one system call for each not seen lately, in batches."""
        with self._looking_up():
            where = self._store.locate(descriptor)
            known = self._store.known(where)
            unknown = [index for index, verdict in enumerate(known) if verdict is None]
            found = await in_batches(
                self._threads, lambda index: self._store.status_blocking(where, index), unknown
            )
            for index, verdict in zip(unknown, found, strict=True):
                known[index] = verdict
            verdicts = [verdict for verdict in known if verdict is not None]
            await self._explain(descriptor, verdicts)
            self._metrics.answered("lookup", verdicts)
            return verdicts

    async def lease(
        self, descriptor: Descriptor, request: str, ttl_s: float
    ) -> tuple[list[Verdict], int]:
        """A lookup whose hits are not evicted until `release` or for `ttl_s`; and their number."""
        self._check_lease(request, ttl_s)
        owner = (descriptor.tenant, request)
        exchange = self._tree.exchange
        with self._looking_up():
            where = self._store.locate(descriptor)
            await self._run(exchange.grant_blocking, owner, where.shard, where.known_keys, ttl_s)
            hits: list[int] = []
            try:
                verdicts = await in_batches(
                    self._threads,
                    lambda index: self._store.leased_status_blocking(where, index),
                    range(descriptor.chunk_count),
                )
                hits = [
                    key
                    for key, verdict in zip(where.known_keys, verdicts, strict=True)
                    if verdict.status is ChunkStatus.HIT
                ]
            finally:
                exchange.keep(owner, where.shard, hits, ttl_s)
            await self._explain(descriptor, verdicts)
            self._metrics.answered("lookup", verdicts)
            return verdicts, len(hits)

    def release(self, tenant: str, request: str) -> int:
        """How many leased chunks were given free."""
        return self._tree.exchange.release((tenant, request))

    async def delete(self, descriptor: Descriptor) -> list[ChunkStatus]:
        where = self._store.locate(descriptor)
        with self._looking_up():
            return await in_batches(
                self._threads,
                lambda index: self._store.delete_blocking(where, index),
                range(descriptor.chunk_count),
            )

    async def pin(self, descriptor: Descriptor, *, is_pinned: bool) -> list[ChunkStatus]:
        """Bars the chunks from eviction and expiry, or no longer."""
        where = self._store.locate(descriptor)
        with self._looking_up():
            await self._run(self._tree.exchange.read_departures_blocking)
            statuses = await in_batches(
                self._threads,
                lambda index: self._store.pin_blocking(where, index, is_pinned=is_pinned),
                range(descriptor.chunk_count),
            )
            if is_pinned:  # again: what was picked before the mark was made is named by now
                await self._run(self._tree.exchange.read_departures_blocking)
                statuses = self._store.without_leaving(where, statuses)
            return statuses

    async def fetch(self, descriptor: Descriptor, layers: Sequence[int], plane: FetchPlane) -> None:
        """Sends `layers` in order over `plane`; empty means all, in the descriptor's order."""
        check_layers("layers", layers, descriptor.layout)
        with self._admitted():
            where = self._store.locate(descriptor)
            opened = await self._open(where)
            try:
                verdicts = [
                    found if isinstance(found, Verdict) else Verdict(ChunkStatus.HIT)
                    for found in opened
                ]
                await self._explain(descriptor, verdicts)
                self._metrics.answered("fetch", verdicts)
                chunks = [found if isinstance(found, OpenChunk) else None for found in opened]
                self._tree.recency.fetched(chunks, time.time())
                await plane.head(verdicts)
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
                try:
                    await pump.run(layers or descriptor.layer_order)
                finally:
                    # Hits in the head that turned out to be misses.
                    self._metrics.answered("fetch", list(pump.faults.values()))
            finally:
                for found in opened:
                    if isinstance(found, OpenChunk):
                        self._store.open_chunks.release(found)

    async def store(self, descriptor: Descriptor, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole."""
        with self._admitted():
            where = self._store.locate(descriptor)
            present = await in_batches(
                self._threads,
                lambda index: self._store.status_blocking(where, index),
                range(descriptor.chunk_count),
            )
            missing = [index for index, it in enumerate(present) if not it.status.is_stored]
            size_bytes = where.geometry.file_size_bytes
            ledger = self._store.ledger
            # The head of the prefix first: the tail is of no use without it.
            needed = missing[: ledger.reserve(descriptor.tenant, size_bytes, len(missing))]
            refused = missing[len(needed) :]
            if refused:
                self._store_refused()
            writers = {index: self._store.writer(where, index) for index in needed}
            try:
                if needed:
                    await self._run(self._store.ensure_namespace_blocking, descriptor.key(0))
                # Their files are made by the first write: the client need not wait for that.
                statuses = [ChunkStatus.KNOWN] * descriptor.chunk_count
                for status, indexes in (
                    (ChunkStatus.NEEDED, needed),
                    (ChunkStatus.NO_SPACE, refused),
                ):
                    for index in indexes:
                        statuses[index] = status
                await plane.needs(statuses)
                pump = StorePump(
                    StoreSession(
                        descriptor.layout,
                        needed,
                        frame_size_bytes_max=self._limits.frame_size_bytes,
                    ),
                    writers,
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
                left = [index for index in needed if writers[index].is_open]
                await in_batches(self._threads, lambda index: _abandon(writers[index]), left)
                ledger.unreserve(descriptor.tenant, size_bytes, len(needed))
            verdicts = dict.fromkeys(refused, _REFUSED) | pump.verdicts
            self._note_stored(where, verdicts)
            known = Verdict(ChunkStatus.KNOWN)
            ended = [verdicts.get(index, known) for index in range(descriptor.chunk_count)]
            self._metrics.answered("store", ended)
            await plane.result(ended)

    def _note_stored(self, where: ChunkLocations, verdicts: Mapping[int, Verdict]) -> None:
        now = time.time()
        for index, verdict in verdicts.items():
            if verdict.status is ChunkStatus.STORED:
                self._tree.recency.stored(where.path(index), index, now)

    async def _open(self, where: ChunkLocations) -> list[OpenChunk | Verdict]:
        cache = self._store.open_chunks
        opened: list[OpenChunk | Verdict | None] = [cache.acquire(path) for path in where.paths()]
        missing = [index for index, found in enumerate(opened) if found is None]

        def open_blocking(index: int) -> None:
            opened[index] = self._store.open_blocking(where, index)

        try:
            await in_batches(self._threads, open_blocking, missing)
        except BaseException:
            for found in opened:
                if isinstance(found, OpenChunk):
                    cache.release(found)
            raise
        return [found for found in opened if found is not None]

    async def _explain(self, descriptor: Descriptor, verdicts: list[Verdict]) -> None:
        """If the prefix is absent because only its identity differs, says so for every chunk."""
        if verdicts[0].status is not ChunkStatus.MISS_ABSENT:
            return
        reason = await self._run(self._store.explain_miss_blocking, descriptor.key(0))
        if reason:
            absent = ChunkStatus.MISS_ABSENT
            verdicts[:] = [
                Verdict(ChunkStatus.MISS_IDENTITY, "" if index else reason)
                if verdict.status is absent
                else verdict
                for index, verdict in enumerate(verdicts)
            ]

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
    def _looking_up(self) -> Iterator[None]:
        """The same for lookups and deletes; frames make room for them meanwhile."""
        if self._lookups >= self._limits.lookups_max:
            raise Overloaded(
                f"{self._lookups} lookups are open (limits.lookups_max); retry",
                retry_after_s=0.01,
            )
        self._lookups += 1
        try:
            with self._turns.held():
                yield
        finally:
            self._lookups -= 1

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _abandon(writer: ChunkWriter) -> None:
    # One file that cannot be removed must not keep the others.
    with suppress(StorageError):
        writer.abandon_blocking()
