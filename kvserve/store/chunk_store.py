"""The store: chunk keys in, open files, writers and statuses out.

All methods whose name ends in `_blocking` belong on the fs threads. A missing, foreign or damaged
file is a miss with a reason; a damaged one is moved to `.quarantine`, so that the next lookup is a
miss and the next put heals it.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from kvserve.errors import KvserveError, StorageError, StorageUnavailable
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.fs import FileSystem
from kvserve.model import ChunkKey, ChunkStatus, Descriptor, Verdict
from kvserve.store.failing import FailingChunks
from kvserve.store.known import KnownChunks, known_key
from kvserve.store.namespaces import Namespaces
from kvserve.store.open_chunks import OpenChunk, OpenChunks
from kvserve.store.paths import QUARANTINE_DIR, TempNames, chunk_path, shard_dir
from kvserve.store.publish import ChunkWriter
from kvserve.store.temp_file import create_temp_blocking


class ChunkStore:
    """Chunks on the tree under `root`."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        open_files_max: int,
        survives_power_loss: bool,
        names: TempNames,
        known: KnownChunks,
    ) -> None:
        self.fs = fs
        self.root = root
        self._names = names
        self._survives_power_loss = survives_power_loss
        self._namespaces = Namespaces(fs, root, names, survives_power_loss=survives_power_loss)
        self._known = known
        self._failing = FailingChunks(clock=time.monotonic)
        self.open_chunks = OpenChunks(fs, open_files_max)

    def __repr__(self) -> str:
        return f"<ChunkStore {self.root} {self.open_chunks!r}>"

    def locate(self, descriptor: Descriptor) -> "ChunkLocations":
        """The files of a descriptor's chunks. Does no I/O."""
        return ChunkLocations(self.root, descriptor)

    def check_root_blocking(self) -> None:
        """Writes, syncs, renames and removes a small file in the root.

        Raises:
            StorageError: with the step, the path and the errno that refused.
        """
        self.fs.make_dirs(self.root)
        # A name of its own: servers start together, with the same pid in their containers.
        probe, fd = create_temp_blocking(
            self.fs, f"{self.root}/probe", self._names, survives_power_loss=False
        )
        try:
            try:
                self.fs.write_all(fd, b"kvserve", 0)
                self.fs.sync(fd)
            finally:
                self.fs.close(fd)
            self.fs.rename(probe, f"{probe}.renamed")
        except StorageError:
            self.fs.unlink(probe)
            raise
        self.fs.unlink(f"{probe}.renamed")

    def known(self, where: "ChunkLocations") -> list[bool]:
        """By chunk: whether it was seen on the tree lately. Does no I/O; see `KnownChunks`."""
        self._known.refresh()
        has = self._known.has
        return [has(key) for key in where.known_keys]

    def failing(self, where: "ChunkLocations", indexes: Iterable[int]) -> dict[int, Verdict]:
        """Those of the chunks that cannot be read, as a read found lately. Does no I/O."""
        if not self._failing:
            return {}
        found = ((index, self._failing.get(where.path(index))) for index in indexes)
        return {index: verdict for index, verdict in found if verdict is not None}

    def status_blocking(self, where: "ChunkLocations", chunk_index: int) -> Verdict:
        """HIT or a miss, by one system call: a published file of the right size is a chunk."""
        path = where.path(chunk_index)
        epoch = self._known.epoch
        try:
            size = self.fs.size(path)
        except StorageError as error:
            return Verdict(ChunkStatus.MISS_ERROR, str(error))
        if size is None:
            return Verdict(ChunkStatus.MISS_ABSENT)
        if size != where.geometry.file_size_bytes:
            # Left where it is: a put replaces it, a fetch looks closer.
            message = f"{size} bytes long instead of {where.geometry.file_size_bytes}"
            return Verdict(ChunkStatus.MISS_CORRUPT, message)
        self._known.add(where.known_keys[chunk_index], epoch)
        return Verdict(ChunkStatus.HIT)

    def open_blocking(self, where: "ChunkLocations", chunk_index: int) -> OpenChunk | Verdict:
        """The chunk open for reading, header checked, or why that is a miss."""
        path = where.path(chunk_index)
        found: OpenChunk | Verdict
        try:
            found = self.open_chunks.acquire_blocking(
                path,
                where.geometry,
                where.descriptor.chunk_hashes[chunk_index],
                reject_blocking=self._quarantine_blocking,
            )
        except KvserveError as error:
            found = self._unreadable(path, error)
        if isinstance(found, Verdict):
            self._known.discard(where.known_keys[chunk_index])
        return found

    def explain_miss_blocking(self, key: ChunkKey) -> str:
        return self._namespaces.explain_miss_blocking(key)

    def read_blocking(
        self, chunk: OpenChunk, layer_index: int, slice_offset: int, into: memoryview
    ) -> Verdict | None:
        """Fills `into` from one slice; a fault if the file ends early or cannot be read."""
        if self._failing and (failed := self._failing.get(chunk.path)) is not None:
            return failed  # another read of it, a moment ago
        offset = chunk.offsets[layer_index] + slice_offset
        try:
            fd = chunk.fd if chunk.fd is not None else self.fs.open_read(chunk.path)
            if fd is None:
                return Verdict(ChunkStatus.MISS_ABSENT, "deleted while being read")
            try:
                got = self.fs.read_into(fd, into, offset)
            finally:
                if chunk.fd is None:
                    self.fs.close(fd)
        except KvserveError as error:
            self.open_chunks.forget(chunk.path)
            return self._unreadable(chunk.path, error)
        if got < len(into):
            return Verdict(ChunkStatus.MISS_CORRUPT, f"layer {layer_index} is cut short")
        return None

    def read_cached(
        self, chunk: OpenChunk, layer_index: int, slice_offset: int, into: memoryview
    ) -> bool:
        """Fills `into` only if that needs no waiting; True if it did. For the event loop."""
        if chunk.fd is None:
            return False
        offset = chunk.offsets[layer_index] + slice_offset
        return self.fs.read_cached(chunk.fd, into, offset) == len(into)

    def reject_blocking(self, chunk: OpenChunk) -> None:
        """A read found the chunk damaged: nobody finds it again."""
        with contextlib.suppress(KvserveError):
            fd = chunk.fd if chunk.fd is not None else self.fs.open_read(chunk.path)
            if fd is None:
                return
            try:
                self._quarantine_blocking(chunk.path, fd)
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
        where: "ChunkLocations",
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
        verdict = Verdict(ChunkStatus.MISS_ERROR, str(error))
        # Not where the process is short of descriptors: that says nothing about the chunk.
        if isinstance(error, StorageUnavailable):
            self._failing.add(path, verdict)
            self._discard_known(path)
        return verdict

    def writer(self, where: "ChunkLocations", chunk_index: int) -> ChunkWriter:
        return ChunkWriter(
            self.fs,
            self.open_chunks,
            self._names,
            path=where.path(chunk_index),
            geometry=where.geometry,
            chunk_hash=where.descriptor.chunk_hashes[chunk_index],
            survives_power_loss=self._survives_power_loss,
            published=self._failing.clear,
        )

    def ensure_namespace_blocking(self, key: ChunkKey) -> None:
        self._namespaces.ensure_blocking(key)

    def delete_blocking(self, where: "ChunkLocations", chunk_index: int) -> ChunkStatus:
        path = where.path(chunk_index)
        self.open_chunks.forget(path)
        is_gone = self.fs.unlink(path)
        self._failing.clear(path)
        self._known.discard(where.known_keys[chunk_index])
        self.open_chunks.close_released_blocking()
        return ChunkStatus.DELETED if is_gone else ChunkStatus.MISS_ABSENT

    def _quarantine_blocking(self, path: str, fd: int) -> None:
        """Moves the damaged file that is open as `fd` out of every reader's way, as evidence.

        Only that file: a good one that has taken its name meanwhile stays. A file system that
        refuses the move leaves the file where it is; it stays a miss, since every read checks it.
        """
        self.open_chunks.forget(path)
        directory = f"{self.root}/{QUARANTINE_DIR}"
        flat = path[len(self.root) + 1 :].replace("/", "@")
        with contextlib.suppress(StorageError):
            if self.fs.is_same(fd, path):
                self.fs.make_dirs(directory)
                self.fs.rename(path, f"{directory}/{flat}")
                if not self.fs.is_same(fd, f"{directory}/{flat}"):
                    # A good file took the name between the check and the move: put it back.
                    self.fs.rename(f"{directory}/{flat}", path)
        self._discard_known(path)

    def _discard_known(self, path: str) -> None:
        shard_directory, _, name = path.rsplit("/", 2)
        self._known.discard(known_key(shard_directory, bytes.fromhex(name)))


class ChunkLocations:
    """Paths and geometry of one descriptor's chunks."""

    def __init__(self, root: str, descriptor: Descriptor) -> None:
        first = descriptor.key(0)
        self.descriptor = descriptor
        self.geometry = ChunkGeometry(first)
        self._directory = f"{root}/{shard_dir(first)}"

    @cached_property
    def known_keys(self) -> list[int]:
        """By chunk: its key in `KnownChunks`."""
        return [known_key(self._directory, it) for it in self.descriptor.chunk_hashes]

    def path(self, chunk_index: int) -> str:
        return chunk_path(self._directory, self.descriptor.chunk_hashes[chunk_index])

    def paths(self) -> Sequence[str]:
        return [self.path(index) for index in range(self.descriptor.chunk_count)]
