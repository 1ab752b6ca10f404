"""Publish a chunk so that readers see all of it or none of it.

Order is the whole design:

1. create `.NAME.XXXXXX` beside the final name    O_EXCL: no two writers share a file
2. write the slices, in any order                 offsets come from the layout alone
3. write the header                               without it the file is no chunk
4. fsync (durability "power")                     bytes reach the disk before the name does
5. close                                          an error here is a failed put
6. rename to NAME                                 the only step a reader can notice
7. fsync the directory (durability "power")

Losing a race to another writer of the same chunk is success: same name, same bytes, and rename
replaces whole. A writer that fails or is abandoned removes its file; one that is killed leaves a
dot name that no reader looks at. One that was given up because a call hangs does not reach step 6,
unless it is the rename that hangs: the whole chunk may then appear later.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames
from kvserve.store.temp_file import create_temp_blocking


class OpenFiles(Protocol):
    """The bound on open descriptors; see `OpenChunks`."""

    def take_blocking(self) -> bool:
        """Counts a descriptor in; False if there is no room for one."""

    def give(self) -> None:
        """Counts a descriptor out."""


class ChunkWriter:
    """One chunk on its way into the tree. Ends with `commit_blocking` or `abandon_blocking`.

    Slices may be written from several threads at once; commit and abandon only when no write runs.
    If a call hangs: `give_up`, then neither.
    """

    def __init__(
        self,
        fs: FileSystem,
        files: OpenFiles,
        names: TempNames,
        *,
        path: str,
        geometry: ChunkGeometry,
        chunk_hash: bytes,
        survives_power_loss: bool,
        published: Callable[[str], None],
    ) -> None:
        self.path = path
        self._published = published
        self._fs = fs
        self._files = files
        self._names = names
        self._geometry = geometry
        self._chunk_hash = chunk_hash
        self._survives_power_loss = survives_power_loss
        self._temp: str | None = None
        self._opening = threading.Lock()
        self._fd: int | None = None
        # Guards the lines below, and who takes `_fd` and `_temp` to end them.
        self._lock = threading.Lock()
        self._inside = 0
        self._is_given_up = False

    def write_blocking(self, layer_index: int, slice_offset: int, data: memoryview) -> None:
        """Writes a piece of a slice; `slice_offset` counts from the slice's start.

        The first write creates the file, its directory too if need be.
        """
        self._enter()
        try:
            with self._opening:
                if self._temp is None:
                    self._open_blocking()
            self._write(data, self._geometry.slice_offsets[layer_index] + slice_offset)
        finally:
            self._leave_blocking()

    def give_up(self) -> None:
        """A call hangs and nobody waits for it any more. Does no I/O.

        Nothing is published; whichever call comes back last removes the temporary file.
        """
        with self._lock:
            self._is_given_up = True

    def _enter(self) -> None:
        with self._lock:
            self._check()
            self._inside += 1

    def _leave_blocking(self) -> None:
        with self._lock:
            self._inside -= 1
            is_last = self._is_given_up and not self._inside
        if is_last:
            self.abandon_blocking()

    def _check(self) -> None:
        if self._is_given_up:
            raise StorageUnavailable(f"{self.path}: given up, a file call hangs")

    def _open_blocking(self) -> None:
        self._temp, fd = create_temp_blocking(
            self._fs, self.path, self._names, survives_power_loss=self._survives_power_loss
        )
        if self._files.take_blocking():
            self._fd = fd
        else:
            self._fs.close(fd)

    @property
    def is_open(self) -> bool:
        """There is a temporary file to be committed or abandoned, and no call hangs on it."""
        return self._temp is not None and not (self._is_given_up and self._inside)

    def commit_blocking(self, slice_checksums: list[int]) -> None:
        """Steps 3 to 7. On an error nothing is visible and the temporary file is gone."""
        self._enter()
        try:
            self._commit_blocking(slice_checksums)
        finally:
            self._leave_blocking()

    def _commit_blocking(self, slice_checksums: list[int]) -> None:
        assert self._temp is not None, "commit before the first write"
        try:
            header = self._geometry.encode_header(self._chunk_hash, slice_checksums)
            # The last slice is padded to the alignment: the file ends on a whole block.
            end = self._geometry.slice_offsets[-1] + self._geometry.layout.slice_sizes[-1]
            padding = self._geometry.file_size_bytes - end
            if padding:
                self._write(bytes(padding), end)
            self._write(header, 0)
            self._finish_file()
            self._check()
            self._fs.rename(self._temp, self.path)
            self._temp = None
            self._published(self.path)
            if self._survives_power_loss:
                self._sync_name()
        finally:
            self.abandon_blocking()

    def abandon_blocking(self) -> None:
        """Removes what was written; does nothing after a commit. May be called twice."""
        with self._lock:
            fd, self._fd = self._fd, None
            temp, self._temp = self._temp, None
        try:
            if fd is not None:
                self._files.give()
                self._fs.close(fd)
        finally:
            if temp is not None:
                self._fs.unlink(temp)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        if self._fd is not None:
            self._fs.write_all(self._fd, data, offset)
            return
        with_fd = self._reopen()
        try:
            self._fs.write_all(with_fd, data, offset)
        finally:
            self._fs.close(with_fd)

    def _finish_file(self) -> None:
        fd = self._fd if self._fd is not None else self._reopen()
        if self._fd is not None:
            self._fd = None
            self._files.give()
        try:
            if self._survives_power_loss:
                self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def _sync_name(self) -> None:
        try:
            self._fs.sync_dir(self.path.rpartition("/")[0])
        except StorageError:
            # Else a repeated put would find the chunk and acknowledge what may not survive.
            self._fs.unlink(self.path)
            raise

    def _reopen(self) -> int:
        assert self._temp is not None
        return self._fs.open_write(self._temp)
