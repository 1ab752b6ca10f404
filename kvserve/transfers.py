"""Use cases that move payload: fetch and store."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial

from kvserve.config import LimitsConfig
from kvserve.errors import StorageError, StorageUnavailable
from kvserve.lookups import Lookups
from kvserve.metrics import Metrics
from kvserve.model import ChunkStatus, Descriptor, Verdict
from kvserve.open_tree import OpenTree
from kvserve.storage_health import StorageHealth
from kvserve.store.chunk_store import HIT
from kvserve.store.locations import ChunkLocations
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.publish import ChunkWriter
from kvserve.transfer.batches import Late, in_batches
from kvserve.transfer.fetch_pump import FetchPump
from kvserve.transfer.long_steps import LongSteps
from kvserve.transfer.planes.base import FetchPlane, StorePlane
from kvserve.transfer.staging import Staging
from kvserve.transfer.step_reads import ReadPace
from kvserve.transfer.store_pump import StorePump
from kvserve.transfer.store_session import StoreSession
from kvserve.transfer.turns import Turns

log = logging.getLogger(__name__)


class Transfers:
    """One per server; whom to let in is decided before."""

    def __init__(
        self,
        tree: OpenTree,
        threads: Executor,
        limits: LimitsConfig,
        metrics: Metrics,
        *,
        lookups: Lookups,
        long_steps: LongSteps,
        health: StorageHealth,
        turns: Turns,
        staging: Staging,
        pace: ReadPace,
        store_refused: Callable[[], None],
    ) -> None:
        self._tree = tree
        self._store = tree.store
        self._threads = threads
        self._limits = limits
        self._metrics = metrics
        self._lookups = lookups
        self._long_steps = long_steps
        self._health = health
        self._turns = turns
        self._staging = staging
        self._pace = pace
        self._store_refused = store_refused

    async def fetch(self, where: ChunkLocations, layers: Sequence[int], plane: FetchPlane) -> None:
        """Sends `layers` in order over `plane`; empty means all, in the descriptor's order."""
        descriptor = where.descriptor
        opened: list[OpenChunk | Verdict | None] = []
        try:
            answers = await self._open(where, opened)
            pump, verdicts = await self._long_steps.run(
                descriptor.chunk_count, lambda: self._fetch_pump(descriptor, opened, plane)
            )
            await self._lookups.explain(descriptor, verdicts)
            self._metrics.answered("fetch", verdicts)
            await plane.head(verdicts)
            try:
                await pump.run(layers or descriptor.layer_order)
            finally:
                # Hits in the head that turned out to be misses.
                self._metrics.answered("fetch", list(pump.faults.values()))
            # Reads count for more than opens, which a file system may answer from memory.
            read = {fault.status for fault in pump.faults.values()}
            if pump.has_read:
                read.add(ChunkStatus.HIT)
            self._health.note_reading(read or answers)
        finally:
            await self._long_steps.run(len(opened), lambda: self._release(opened))

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
            staging=self._staging,
            pace=self._pace,
            turns=self._turns,
        )
        self._tree.recency.fetched(chunks, time.time())
        return pump, [found if isinstance(found, Verdict) else HIT for found in opened]

    async def _open(
        self, where: ChunkLocations, opened: list[OpenChunk | Verdict | None]
    ) -> set[ChunkStatus]:
        """Fills `opened`; whatever happens, what is in it must be released.

        Returns how those chunks ended that the file system was asked for.
        """
        cache = self._store.open_chunks

        def acquire() -> list[int]:
            opened.extend(cache.acquire_all(where.paths))
            missing = [index for index, found in enumerate(opened) if found is None]
            failing = self._store.failing(where, missing)
            for index, verdict in failing.items():
                opened[index] = verdict
            return [index for index in missing if index not in failing] if failing else missing

        def take_back(found: OpenChunk | Verdict) -> None:
            if isinstance(found, OpenChunk):
                cache.release(found)

        missing = await self._long_steps.run(where.descriptor.chunk_count, acquire)
        results = await in_batches(
            self._threads,
            lambda index: self._store.open_blocking(where, index),
            missing,
            late=partial(self._lookups.late, where),
            take_back=take_back,
        )

        def fill_in() -> set[ChunkStatus]:
            for index, result in zip(missing, results, strict=True):
                opened[index] = result
            return {it.status if isinstance(it, Verdict) else ChunkStatus.HIT for it in results}

        return await self._long_steps.run(len(missing), fill_in)

    def _release(self, opened: Sequence[OpenChunk | Verdict | None]) -> None:
        self._store.open_chunks.release_all(
            found for found in opened if isinstance(found, OpenChunk)
        )

    async def store(self, where: ChunkLocations, plane: StorePlane) -> None:
        """Takes the payload of every chunk that is not stored yet and publishes each when whole.

        Raises:
            StorageUnavailable: the file system gives no answer.
        """
        self._health.check_may_store()
        try:
            verdicts = await self._stored(where, plane)
        except StorageUnavailable:
            self._health.note_writing([ChunkStatus.STORE_ERROR])
            raise
        chunk_count = where.descriptor.chunk_count
        known, now = Verdict(ChunkStatus.KNOWN), time.time()

        def ended() -> tuple[list[Verdict], set[ChunkStatus]]:
            stored = [i for i, it in verdicts.items() if it.status is ChunkStatus.STORED]
            self._tree.recency.stored(where.paths, stored, now)
            result = [verdicts.get(index, known) for index in range(chunk_count)]
            return result, {verdict.status for verdict in verdicts.values()}

        result, statuses = await self._long_steps.run(chunk_count, ended)
        self._health.note_writing(statuses)
        self._metrics.answered("store", result)
        await plane.result(result)

    async def _stored(self, where: ChunkLocations, plane: StorePlane) -> dict[int, Verdict]:
        """Runs a store; how each chunk ended that was not stored before."""
        missing = await self._lookups.missing(where)
        room = self._store.ledger.reserve(
            where.descriptor.tenant, where.geometry.file_size_bytes, len(missing)
        )
        # The head of the prefix first: the tail is of no use without it.
        needed, refused = missing[: room.chunks], missing[room.chunks :]
        if refused:
            self._store_refused()
        writers: dict[int, ChunkWriter] = {}

        def writer(index: int) -> ChunkWriter:
            # Made by a chunk's first write; of two threads that do so at once one wins.
            found = writers.get(index)
            return found or writers.setdefault(
                index, self._store.writer(where, index, stored=room.chunk_stored)
            )

        try:
            if needed:
                await self._lookups.run(
                    self._store.ensure_namespace_blocking, where.descriptor.key(0)
                )
            # Their files are made by the first write: the client need not wait for that.
            await plane.needs(
                await self._long_steps.run(
                    where.descriptor.chunk_count,
                    lambda: _store_statuses(where.descriptor.chunk_count, needed, refused),
                )
            )
            verdicts = await self._received(where, needed, plane, writer)
            await self._keep_known(where, missing)
        finally:
            try:
                await self._abandon_left(writers)
            finally:
                room.close()
        text = f"no room: {room.refused_by}; retry when eviction has made some"
        return dict.fromkeys(refused, Verdict(ChunkStatus.NO_SPACE, text)) | verdicts

    async def _keep_known(self, where: ChunkLocations, missing: Sequence[int]) -> None:
        """Before chunks are acknowledged that were there: with "power" their names must stay, too.

        Whoever stored them may not have come that far yet.
        """
        if not self._store.survives_power_loss or len(missing) == where.descriptor.chunk_count:
            return

        def known_directories() -> list[str]:
            absent = set(missing)
            known = (path for i, path in enumerate(where.paths) if i not in absent)
            return sorted({path.rpartition("/")[0] for path in known})

        directories = await self._long_steps.run(where.descriptor.chunk_count, known_directories)
        await in_batches(
            self._threads,
            lambda position: self._store.fs.sync_dir(directories[position]),
            range(len(directories)),
        )

    async def _received(
        self,
        where: ChunkLocations,
        needed: Sequence[int],
        plane: StorePlane,
        writer: Callable[[int], ChunkWriter],
    ) -> dict[int, Verdict]:
        session = StoreSession(
            where.descriptor.layout, needed, frame_size_bytes_max=self._limits.frame_size_bytes
        )
        with self._staging.store() as share:
            pump = StorePump(
                session,
                writer,
                self._threads,
                layer_stored=plane.layer_stored,
                frames_in_flight=self._limits.frames_in_flight,
                share=share,
            )
            try:
                async for frame in plane.frames():
                    await pump.feed(*frame)
                await pump.finish(may_publish=plane.is_finished)
            finally:
                await pump.close()
        return pump.verdicts

    async def _abandon_left(self, writers: dict[int, ChunkWriter]) -> None:
        # Not those on which a call hangs: it cleans up when it comes back. It may add a writer yet.
        left = [writer for writer in list(writers.values()) if writer.is_open]

        def late(position: int, late: Late) -> None:
            log.warning("a file is left for now: %s", late.error)
            if late.hangs is None:
                self._store.left_writers.add(left[position])

        await in_batches(
            self._threads, lambda position: _abandon(left[position]), range(len(left)), late=late
        )


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
