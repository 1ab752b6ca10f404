"""The use cases in the glossary's words: lookup, store, fetch, delete.

Knows nothing of gRPC or protobuf. Blocking work goes to the fs threads in batches, so that a
descriptor costs tasks by the batch, never by the chunk.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvserve.config import LimitsConfig
from kvserve.errors import Overloaded, StorageError, StorageUnavailable
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers
from kvserve.storage_health import StorageHealth
from kvserve.store.chunk_store import ChunkLocations, ChunkStore
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.transfer.batches import in_batches
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.store_pump import StorePump
from kvserve.transfer.store_session import StoreSession
from kvserve.transfer.turns import Turns

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Service:
    """One per server; all methods run on its event loop."""

    def __init__(
        self,
        store: ChunkStore,
        threads: Executor,
        limits: LimitsConfig,
        health: StorageHealth | None = None,
    ) -> None:
        self._health = health or StorageHealth()
        self._store = store
        self._threads = threads
        self._limits = limits
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
            return await self._lookup(descriptor)

    async def _lookup(self, descriptor: Descriptor) -> list[Verdict]:
        where = self._store.locate(descriptor)
        hit = Verdict(ChunkStatus.HIT)
        known = self._store.known(where)
        verdicts = [hit] * descriptor.chunk_count
        if not all(known):
            unknown = [index for index, is_known in enumerate(known) if not is_known]
            failing, found = await self._statuses(where, unknown)
            self._health.note_reading([verdict.status for verdict in found.values()])
            for index, verdict in (failing | found).items():
                verdicts[index] = verdict
        await self._explain(descriptor, verdicts)
        return verdicts

    async def _statuses(
        self, where: ChunkLocations, indexes: Sequence[int]
    ) -> tuple[dict[int, Verdict], dict[int, Verdict]]:
        """By chunk: those that reads failed for lately, and what the file system says of others."""
        failing = self._store.failing(where, indexes)
        asked = [index for index in indexes if index not in failing] if failing else indexes
        found = await in_batches(
            self._threads,
            lambda index: self._store.status_blocking(where, index),
            asked,
            late=lambda index, late: self._store.late(where, index, late.error, late.hangs),
        )
        return failing, dict(zip(asked, found, strict=True))

    async def delete(self, descriptor: Descriptor) -> list[ChunkStatus]:
        where = self._store.locate(descriptor)
        with self._looking_up():
            return await in_batches(
                self._threads,
                lambda index: self._store.delete_blocking(where, index),
                range(descriptor.chunk_count),
            )

    async def fetch(self, descriptor: Descriptor, layers: Sequence[int], plane: FetchPlane) -> None:
        """Sends `layers` in order over `plane`; empty means all, in the descriptor's order."""
        check_layers("layers", layers, descriptor.layout)
        with self._admitted():
            where = self._store.locate(descriptor)
            opened, answers = await self._open(where)
            try:
                verdicts = [
                    found if isinstance(found, Verdict) else Verdict(ChunkStatus.HIT)
                    for found in opened
                ]
                await self._explain(descriptor, verdicts)
                await plane.head(verdicts)
                pump = FetchPump(
                    self._store,
                    self._threads,
                    plane,
                    layout=descriptor.layout,
                    chunks=[found if isinstance(found, OpenChunk) else None for found in opened],
                    frame_size_bytes=self._limits.frame_size_bytes,
                    frames_in_flight=self._limits.frames_in_flight,
                    turns=self._turns,
                )
                await pump.run(layers or descriptor.layer_order)
                # Reads count for more than opens, which a file system may answer from memory.
                read = [ChunkStatus.HIT] if pump.has_read else []
                read += [fault.status for fault in pump.faults.values()]
                self._health.note_reading(read or answers)
            finally:
                for found in opened:
                    if isinstance(found, OpenChunk):
                        self._store.open_chunks.release(found)

    async def store(self, descriptor: Descriptor, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole."""
        with self._admitted():
            where = self._store.locate(descriptor)
            self._health.check_may_store()
            try:
                verdicts = await self._stored(descriptor, where, plane)
            except StorageUnavailable:
                self._health.note_writing([ChunkStatus.STORE_ERROR])
                raise
            self._health.note_writing([verdict.status for verdict in verdicts.values()])
            known = Verdict(ChunkStatus.KNOWN)
            await plane.result(
                [verdicts.get(index, known) for index in range(descriptor.chunk_count)]
            )

    async def _stored(
        self, descriptor: Descriptor, where: ChunkLocations, plane: StorePlane
    ) -> dict[int, Verdict]:
        """Runs a store; how each chunk ended that was needed."""
        needed = await self._needed(where, range(descriptor.chunk_count))
        if needed:
            await self._run(self._store.ensure_namespace_blocking, descriptor.key(0))
        writers = {index: self._store.writer(where, index) for index in needed}
        try:
            # Their files are made by the first write: the client need not wait for that.
            await plane.needs(
                [
                    ChunkStatus.NEEDED if index in writers else ChunkStatus.KNOWN
                    for index in range(descriptor.chunk_count)
                ]
            )
            pump = StorePump(
                StoreSession(
                    descriptor.layout, needed, frame_size_bytes_max=self._limits.frame_size_bytes
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
            # Not those on which a call hangs: it cleans up when it comes back.
            left = [index for index in needed if writers[index].is_open]
            await in_batches(
                self._threads,
                lambda index: _abandon(writers[index]),
                left,
                late=lambda index, late: log.warning("a file is left: %s", late.error),
            )
        return pump.verdicts

    async def _needed(self, where: ChunkLocations, indexes: Sequence[int]) -> list[int]:
        """The chunks to be sent; one whose file cannot be read is stored anew."""
        _, found = await self._statuses(where, indexes)
        if found and all(it.status is ChunkStatus.MISS_TIMEOUT for it in found.values()):
            raise StorageUnavailable(next(iter(found.values())).message)
        is_known = {index for index, it in found.items() if it.status is ChunkStatus.HIT}
        return [index for index in indexes if index not in is_known]

    async def _open(
        self, where: ChunkLocations
    ) -> tuple[list[OpenChunk | Verdict], list[ChunkStatus]]:
        """By chunk; and how those ended for which the file system was asked."""
        cache = self._store.open_chunks
        opened: list[OpenChunk | Verdict | None] = [cache.acquire(path) for path in where.paths()]
        missing = [index for index, found in enumerate(opened) if found is None]
        failing = self._store.failing(where, missing)
        if failing:
            missing = [index for index in missing if index not in failing]
        for index, verdict in failing.items():
            opened[index] = verdict

        def take_back(found: OpenChunk | Verdict) -> None:
            if isinstance(found, OpenChunk):
                cache.release(found)

        try:
            results = await in_batches(
                self._threads,
                lambda index: self._store.open_blocking(where, index),
                missing,
                late=lambda index, late: self._store.late(where, index, late.error, late.hangs),
                take_back=take_back,
            )
            for index, result in zip(missing, results, strict=True):
                opened[index] = result
        except BaseException:
            for found in opened:
                if isinstance(found, OpenChunk):
                    cache.release(found)
            raise
        answers = [it.status if isinstance(it, Verdict) else ChunkStatus.HIT for it in results]
        return [found for found in opened if found is not None], answers

    async def _explain(self, descriptor: Descriptor, verdicts: list[Verdict]) -> None:
        """If the prefix is absent because only its identity differs, says so for every chunk."""
        if verdicts[0].status is not ChunkStatus.MISS_ABSENT:
            return
        if any(verdict.status is ChunkStatus.MISS_TIMEOUT for verdict in verdicts):
            return  # the storage hangs: no time for that
        try:
            reason = await self._run(self._store.explain_miss_blocking, descriptor.key(0))
        except StorageError as error:
            log.debug("no reason for a miss: %s", error)
            return
        if reason:
            absent = ChunkStatus.MISS_ABSENT
            verdicts[:] = [
                Verdict(ChunkStatus.MISS_IDENTITY, "" if index else reason)
                if verdict.status is absent
                else verdict
                for index, verdict in enumerate(verdicts)
            ]

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
