"""The use cases in the glossary's words: lookup, store, fetch, delete.

Knows nothing of gRPC or protobuf. Blocking work goes to the fs threads in batches, so that a
descriptor costs tasks by the batch, never by the chunk.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

from kvserve.config import LimitsConfig
from kvserve.errors import Overloaded, StorageError
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers
from kvserve.store.chunk_store import HIT, ChunkLocations, ChunkStore
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


class Service:
    """One per server; all methods run on its event loop."""

    def __init__(self, store: ChunkStore, threads: Executor, limits: LimitsConfig) -> None:
        self._store = store
        self._threads = threads
        self._limits = limits
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
            return await self._lookup(where)

    async def _lookup(self, where: ChunkLocations) -> list[Verdict]:
        chunk_count = where.descriptor.chunk_count
        unknown = await self.long_steps.run(chunk_count, lambda: self._store.unknown(where))
        verdicts = [HIT] * chunk_count

        def look_blocking(index: int) -> None:
            verdicts[index] = self._store.status_blocking(where, index)

        if unknown:
            await in_batches(self._threads, look_blocking, unknown)
        await self._explain(where.descriptor, verdicts)
        return verdicts

    async def delete(self, where: ChunkLocations) -> list[ChunkStatus]:
        with self._looking_up(where):
            return await in_batches(
                self._threads,
                lambda index: self._store.delete_blocking(where, index),
                range(where.descriptor.chunk_count),
            )

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
                await plane.head(verdicts)
                await pump.run(layers or descriptor.layer_order)
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
        return pump, [found if isinstance(found, Verdict) else HIT for found in opened]

    async def store(self, where: ChunkLocations, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole."""
        descriptor = where.descriptor
        chunk_count = descriptor.chunk_count
        with self._admitted():
            needed, statuses = await self._needed(where)
            if needed:
                await self._run(self._store.ensure_namespace_blocking, descriptor.key(0))
            writers: dict[int, ChunkWriter] = {}

            def writer(index: int) -> ChunkWriter:
                # Made by a chunk's first write; of two threads that do so at once one wins.
                found = writers.get(index)
                return found or writers.setdefault(index, self._store.writer(where, index))

            try:
                # Their files are made by the first write: the client need not wait for that.
                await plane.needs(statuses)
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
                await in_batches(self._threads, lambda index: _abandon(writers[index]), left)
            known = Verdict(ChunkStatus.KNOWN)
            ended = pump.verdicts
            await plane.result(
                await self.long_steps.run(
                    chunk_count, lambda: [ended.get(index, known) for index in range(chunk_count)]
                )
            )

    async def _needed(self, where: ChunkLocations) -> tuple[list[int], list[ChunkStatus]]:
        """The chunks that are not stored yet, and what the client is told of every chunk."""
        chunk_count = where.descriptor.chunk_count
        present = await in_batches(
            self._threads,
            lambda index: self._store.status_blocking(where, index),
            range(chunk_count),
        )

        def sort_out() -> tuple[list[int], list[ChunkStatus]]:
            hit = ChunkStatus.HIT
            needed = [index for index, found in enumerate(present) if found.status is not hit]
            statuses = [ChunkStatus.KNOWN] * chunk_count
            for index in needed:
                statuses[index] = ChunkStatus.NEEDED
            return needed, statuses

        return await self.long_steps.run(chunk_count, sort_out)

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


def _abandon(writer: ChunkWriter) -> None:
    # One file that cannot be removed must not keep the others.
    with suppress(StorageError):
        writer.abandon_blocking()
