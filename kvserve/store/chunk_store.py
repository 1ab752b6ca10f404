"""The store: chunk keys in, open files, writers and statuses out.

All methods whose name ends in `_blocking` belong on the fs threads. A missing, foreign or damaged
file is a miss with a reason; a damaged one is moved to `.quarantine`, so that the next lookup is a
miss and the next put heals it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvserve.errors import KvserveError, StorageError, StorageFull, StorageUnavailable
from kvserve.format.read_plan import GAP_SIZE_BYTES_MAX, reads
from kvserve.fs import FileSystem
from kvserve.model import ChunkKey, ChunkStatus, Descriptor, Verdict
from kvserve.store.departures import Departures
from kvserve.store.failing import FailingChunks
from kvserve.store.known import KnownChunks, known_key
from kvserve.store.ledger import Ledger
from kvserve.store.left_writers import LeftWriters
from kvserve.store.locations import ChunkLocations
from kvserve.store.namespaces import Namespaces
from kvserve.store.open_chunks import OpenChunk, OpenChunks
from kvserve.store.paths import TempNames
from kvserve.store.publish import ChunkWriter
from kvserve.store.quarantine import Quarantine
from kvserve.store.root import Root

log = logging.getLogger(__name__)

HIT: Final = Verdict(ChunkStatus.HIT)
"""One for all chunks: a verdict for each of 65,536 would take longer than to look for them."""
_ABSENT: Final = Verdict(ChunkStatus.MISS_ABSENT)
_EVICTED: Final = Verdict(ChunkStatus.MISS_EVICTED)
# Where the padding between slices goes: written by any thread, read by nobody.
_PADDING: Final = memoryview(bytearray(GAP_SIZE_BYTES_MAX))


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """`ttl_s`: a chunk not used for so long is a miss; 0 for none."""

    survives_power_loss: bool = False
    ttl_s: float = 0.0


class ChunkStore:
    """Chunks on the tree under `root`. `clock`: wall time, as files are stamped with."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        policy: StorePolicy,
        open_chunks: OpenChunks,
        names: TempNames,
        known: KnownChunks,
        ledger: Ledger,
        departures: Departures,
        quarantine: Quarantine,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.fs = fs
        self.root = root
        self._names = names
        self._policy = policy
        self._namespaces = Namespaces(
            fs, root, names, survives_power_loss=policy.survives_power_loss
        )
        self._known = known
        self._failing = FailingChunks(clock=time.monotonic)
        self._root = Root(fs, root, names)
        self.ledger = ledger
        self._departures = departures
        self._quarantine = quarantine
        self._clock = clock
        self.open_chunks = open_chunks
        self.left_writers = LeftWriters(fs, names)

    def __repr__(self) -> str:
        return f"<ChunkStore {self.root} {self.open_chunks!r}>"

    @property
    def survives_power_loss(self) -> bool:
        return self._policy.survives_power_loss

    def locate(self, descriptor: Descriptor) -> ChunkLocations:
        """The files of a descriptor's chunks. Does no I/O."""
        return ChunkLocations(self.root, descriptor)

    def check_root_blocking(self) -> None:
        """See `Root`."""
        self._root.check_blocking()

    def unknown(self, where: ChunkLocations) -> dict[int, Verdict | None]:
        """The chunks that were not seen on the tree lately: a miss if they were missed there
        lately, None if the tree must be asked. Does no I/O; see `KnownChunks`."""
        self._known.refresh()
        keys, lacks = where.known_keys, self._known.lacks
        return {
            index: self._absent(keys[index]) if lacks(keys[index]) else None
            for index in self._known.unknown(keys)
        }

    def failing(self, where: ChunkLocations, indexes: Iterable[int]) -> dict[int, Verdict]:
        """Those of the chunks that cannot be read, as a read found lately. Does no I/O."""
        if not self._failing:
            return {}
        found = ((index, self._failing.get(where.path(index))) for index in indexes)
        return {index: verdict for index, verdict in found if verdict is not None}

    def status_blocking(self, where: ChunkLocations, chunk_index: int) -> Verdict:
        """HIT or a miss, by one system call: a published file of the right size is a chunk."""
        path, key = where.path(chunk_index), where.known_key(chunk_index)
        epoch = self._known.epoch
        try:
            found = self.fs.stat(path)
        except StorageError as error:
            return Verdict(ChunkStatus.MISS_ERROR, str(error))
        if found is None:
            self._known.add_absent(key, epoch)
            return self._absent(key)
        if found.size_bytes != where.geometry.file_size_bytes:
            # Left where it is: a put replaces it, a fetch looks closer.
            message = f"{found.size_bytes} bytes long instead of {where.geometry.file_size_bytes}"
            return Verdict(ChunkStatus.MISS_CORRUPT, message)
        expired = None if found.is_marked else self._expired(found.modified_at)
        if expired is not None:
            return expired
        self._known.add(key, epoch)
        return HIT

    def leased_status_blocking(self, where: ChunkLocations, chunk_index: int) -> Verdict:
        """The status of a chunk that was just leased: what is a hit now stays one.

        Asks the tree: another server may have evicted what this one knows.
        """
        if self._departures.is_leaving(where.known_key(chunk_index)):
            return Verdict(ChunkStatus.MISS_EVICTED, "is being evicted at this moment")
        return self.status_blocking(where, chunk_index)

    def open_blocking(self, where: ChunkLocations, chunk_index: int) -> OpenChunk | Verdict:
        """The chunk open for reading, header checked, or why that is a miss."""
        path = where.path(chunk_index)
        found: OpenChunk | Verdict
        try:
            found = self.open_chunks.acquire_blocking(
                path,
                where.geometry,
                where.descriptor.chunk_hashes[chunk_index],
                reject_blocking=partial(self._quarantine_blocking, where.geometry.file_size_bytes),
            )
        except KvserveError as error:
            found = self._unreadable(path, error)
        key = where.known_key(chunk_index)
        if isinstance(found, Verdict):
            self._known.discard(key)
            return self._absent(key) if found.status is ChunkStatus.MISS_ABSENT else found
        if (expired := self._expired(found.used_at)) is not None:
            self.open_chunks.release(found)
            return expired
        return found

    def check_mounted_blocking(self) -> None:
        """See `Root`."""
        self._root.check_mounted_blocking()

    def explain_miss_blocking(self, key: ChunkKey) -> str:
        return self._namespaces.explain_miss_blocking(key)

    def read_blocking(
        self, chunk: OpenChunk, pieces: Sequence[tuple[int, int, memoryview]]
    ) -> Verdict | None:
        """Fills pieces of slices (layer, offset in the slice, memory) in as few reads as there can
        be; a fault if the file ends early or cannot be read."""
        if self._failing and (failed := self._failing.get(chunk.path)) is not None:
            return failed  # another read of it, a moment ago
        places = [(chunk.offsets[layer] + start, len(into)) for layer, start, into in pieces]
        for offset, read in reads(places):
            parts: list[memoryview] = []
            for skipped, number in read:
                if skipped:
                    parts.append(_PADDING[:skipped])
                parts.append(pieces[number][2])
            try:
                got = self._read_blocking(chunk, offset, parts)
            except KvserveError as error:
                self.open_chunks.forget(chunk.path)
                return self._unreadable(chunk.path, error)
            if got is None:
                return Verdict(ChunkStatus.MISS_ABSENT, "deleted while being read")
            if got < sum(map(len, parts)):
                # The first piece, in the file's order, that is not there as a whole.
                cut = next(it for _, it in read if sum(places[it]) > offset + got)
                return Verdict(ChunkStatus.MISS_CORRUPT, f"layer {pieces[cut][0]} is cut short")
        return None

    def _read_blocking(
        self, chunk: OpenChunk, offset: int, parts: Sequence[memoryview]
    ) -> int | None:
        """Bytes read, None if the file is gone; a descriptor that went bad is replaced once."""
        fd = chunk.fd
        if fd is None:
            fd = self.fs.open_read(chunk.path)
            if fd is None:
                return None
            try:
                return self.fs.read_parts(fd, parts, offset)
            finally:
                self.fs.close(fd)
        try:
            return self.fs.read_parts(fd, parts, offset)
        except StorageUnavailable:
            if not self.open_chunks.reopen_blocking(chunk, fd):
                raise
        assert chunk.fd is not None
        return self.fs.read_parts(chunk.fd, parts, offset)

    def read_cached(
        self,
        chunks: Sequence[OpenChunk | None],
        layer_index: int,
        slice_offset: int,
        into: memoryview,
    ) -> int:
        """Fills the chunks' equal parts of `into`, in order, for as long as that needs no waiting;
        how many. The part of None is passed over. For the event loop."""
        read = self.fs.read_cached
        size = len(into) // len(chunks)
        filled = at = 0
        for chunk in chunks:
            if chunk is not None:
                if chunk.fd is None:
                    break
                offset = chunk.offsets[layer_index] + slice_offset
                if read(chunk.fd, into[at : at + size], offset) != size:
                    break
            filled, at = filled + 1, at + size
        return filled

    def reject_blocking(self, chunk: OpenChunk) -> None:
        """A read found the chunk damaged: nobody finds it again."""
        with contextlib.suppress(KvserveError):
            fd = chunk.fd if chunk.fd is not None else self.fs.open_read(chunk.path)
            if fd is None:
                return
            try:
                self._quarantine_blocking(chunk.geometry.file_size_bytes, chunk.path, fd)
            finally:
                if chunk.fd is None:
                    self.fs.close(fd)

    def hold(self, chunk: OpenChunk) -> None:
        self.open_chunks.hold(chunk)

    def release(self, chunk: OpenChunk) -> None:
        self.open_chunks.release(chunk)

    def hangs(self, chunk: OpenChunk, verdict: Verdict, still: Callable[[], bool]) -> None:
        """A call on the chunk gave no answer in time, and `still` says whether it hangs."""
        self._path_hangs(chunk.path, verdict, still)

    def late(
        self,
        where: ChunkLocations,
        chunk_index: int,
        error: StorageUnavailable,
        hangs: Callable[[], bool] | None,
    ) -> Verdict:
        """The miss of a chunk whose call gave no answer in time, or was not begun (None)."""
        verdict = Verdict(ChunkStatus.MISS_TIMEOUT, str(error))
        if hangs is not None:
            self._path_hangs(where.path(chunk_index), verdict, hangs)
        return verdict

    def _path_hangs(self, path: str, verdict: Verdict, still: Callable[[], bool]) -> None:
        self._failing.add(path, verdict, hangs=still)
        self.open_chunks.forget(path)
        self._discard_known(path)

    def _unreadable(self, path: str, error: KvserveError) -> Verdict:
        text = str(error)  # of a read: it has the descriptor's number
        verdict = Verdict(ChunkStatus.MISS_ERROR, text if path in text else f"{path}: {text}")
        # Not where the process is short of descriptors: that says nothing about the chunk.
        if isinstance(error, StorageUnavailable):
            self._failing.add(path, verdict)
            self._discard_known(path)
        return verdict

    def writer(
        self,
        where: ChunkLocations,
        chunk_index: int,
        *,
        stored: Callable[[], None] = lambda: None,
    ) -> ChunkWriter:
        """`stored` is called when the chunk is on the tree and counted there."""
        return ChunkWriter(
            self.fs,
            self.open_chunks,
            self._names,
            path=where.path(chunk_index),
            geometry=where.geometry,
            chunk_hash=where.descriptor.chunk_hashes[chunk_index],
            survives_power_loss=self._policy.survives_power_loss,
            published_blocking=self._published(where, chunk_index, stored),
            unpublish_blocking=partial(self.delete_blocking, where, chunk_index),
        )

    def _published(
        self, where: ChunkLocations, chunk_index: int, stored: Callable[[], None]
    ) -> Callable[[bool], None]:
        def published_blocking(is_new: bool) -> None:
            path = where.path(chunk_index)
            directory = path.rpartition("/")[0]
            self._failing.clear(path)
            if is_new:
                size_bytes = where.geometry.file_size_bytes
                self.ledger.changed(where.descriptor.tenant, directory, size_bytes, 1)
            stored()
            # Not "seen": what another thread deletes at this moment must not stay known.
            self._known.appeared(where.known_key(chunk_index))

        return published_blocking

    def pin_blocking(
        self, where: ChunkLocations, chunk_index: int, *, is_pinned: bool
    ) -> ChunkStatus:
        """Marks the chunk's file as not to be evicted, or as any other again.

        Raises:
            StorageError: the file system refused.
        """
        key = where.known_key(chunk_index)
        if not self.fs.mark(where.path(chunk_index), is_marked=is_pinned):
            return self._absent(key).status
        return ChunkStatus.PINNED if is_pinned else ChunkStatus.UNPINNED

    def without_leaving(
        self, where: ChunkLocations, statuses: Sequence[ChunkStatus]
    ) -> list[ChunkStatus]:
        """The statuses with MISS_EVICTED where an evictor has picked the chunk meanwhile."""
        return [
            ChunkStatus.MISS_EVICTED if self._departures.is_leaving(key) else status
            for key, status in zip(where.known_keys, statuses, strict=True)
        ]

    def _absent(self, key: int) -> Verdict:
        return _EVICTED if self._departures.was_evicted(key) else _ABSENT

    def _expired(self, used_at: float) -> Verdict | None:
        ttl_s = self._policy.ttl_s
        if not ttl_s or self._clock() - used_at <= ttl_s:
            return None
        return Verdict(ChunkStatus.MISS_EXPIRED, f"not used for more than {ttl_s:.0f} s")

    def ensure_namespace_blocking(self, key: ChunkKey) -> None:
        """Before the first write of a store.

        Raises:
            StorageError: the file system refused, or the root's is gone.
        """
        self._root.check_mounted_blocking()
        try:
            self._namespaces.ensure_blocking(key)
        except StorageFull as error:
            # The file is for people; each chunk says for itself whether it fits.
            log.warning("a namespace has no identity file until there is space: %s", error)

    def delete_blocking(self, where: ChunkLocations, chunk_index: int) -> ChunkStatus:
        path = where.path(chunk_index)
        self.open_chunks.forget(path)
        is_gone = self.fs.unlink(path)
        self._failing.clear(path)
        self._known.discard(where.known_key(chunk_index))
        if is_gone:
            size_bytes = where.geometry.file_size_bytes
            self.ledger.changed(where.descriptor.tenant, path.rpartition("/")[0], -size_bytes, -1)
        self.open_chunks.close_released_blocking()
        return ChunkStatus.DELETED if is_gone else ChunkStatus.MISS_ABSENT

    def _quarantine_blocking(self, size_bytes: int, path: str, fd: int) -> None:
        """Moves the damaged file that is open as `fd` out of every reader's way, as evidence.

        `size_bytes`: what it counts for, however long the damage has made it.
        """
        self.open_chunks.forget(path)
        is_taken = self._quarantine.take_blocking(path, fd)
        self._discard_known(path)
        if is_taken:
            self._failing.clear(path)
            tenant = path[len(self.root) + 1 :].split("/", 1)[0]
            self.ledger.changed(tenant, path.rpartition("/")[0], -size_bytes, -1)

    def _discard_known(self, path: str) -> None:
        shard, _, name = path[len(self.root) + 1 :].rsplit("/", 2)
        self._known.discard(known_key(shard, bytes.fromhex(name)))
