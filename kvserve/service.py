"""The use cases in the glossary's words: lookup, store, fetch, delete.

Knows nothing of gRPC or protobuf. Blocking work goes to the fs threads in batches, so that a
descriptor costs tasks by the batch, never by the chunk.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvserve.config import LimitsConfig
from kvserve.errors import Overloaded, StorageError
from kvserve.model import ChunkStatus, Descriptor, Verdict, check_layers
from kvserve.store.chunk_store import ChunkLocations, ChunkStore
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.transfer.batches import in_batches
from kvserve.transfer.fetch_pump import FetchPump
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
            found = await in_batches(
                self._threads, lambda index: self._store.status_blocking(where, index), unknown
            )
            for index, verdict in zip(unknown, found, strict=True):
                verdicts[index] = verdict
        await self._explain(descriptor, verdicts)
        return verdicts

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
            opened = await self._open(where)
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
            is_known = [verdict.status is ChunkStatus.HIT for verdict in present]
            needed = [index for index, known in enumerate(is_known) if not known]
            if needed:
                await self._run(self._store.ensure_namespace_blocking, descriptor.key(0))
            writers = {index: self._store.writer(where, index) for index in needed}
            try:
                # Their files are made by the first write: the client need not wait for that.
                await plane.needs(
                    [ChunkStatus.KNOWN if known else ChunkStatus.NEEDED for known in is_known]
                )
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
                    async for frame in plane.frames():
                        await pump.feed(*frame)
                    await pump.finish(may_publish=plane.is_finished)
                finally:
                    await pump.close()
            finally:
                left = [index for index in needed if writers[index].is_open]
                await in_batches(self._threads, lambda index: _abandon(writers[index]), left)
            known = Verdict(ChunkStatus.KNOWN)
            await plane.result(
                [pump.verdicts.get(index, known) for index in range(descriptor.chunk_count)]
            )

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
