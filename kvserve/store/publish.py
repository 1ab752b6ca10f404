"""Publish a chunk so that readers see all of it or none of it.

Order is the whole design:

1. create `.NAME.XXXXXX` beside the final name    O_EXCL: no two writers share a file; zeros where
                                                  the header comes: later it finds its space
2. write the slices, in any order                 offsets come from the layout alone
3. write the header                               without it the file is no chunk
4. fsync (durability "power")                     bytes reach the disk before the name does
5. close                                          an error here is a failed put
6. rename to NAME                                 the only step a reader can notice; what had the
                                                  name is looked at before: usage, pins
7. fsync the directory (durability "power")

Losing a race to another writer of the same chunk is success: same name, same bytes, and rename
replaces whole. A writer that fails or is abandoned removes its file; one that is killed leaves a
dot name that no reader looks at. One that was given up because a call hangs does not reach step 6,
unless it is the rename that hangs: the whole chunk may then appear later. What happens where there
is no space left: `temp_file.py`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.format.verify import SliceVerifier
from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames
from kvserve.store.temp_file import OpenFiles, TempFile

_PIECE_SIZE_BYTES = 1 << 20


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
        published_blocking: Callable[[bool], None],
        unpublish_blocking: Callable[[], object],
    ) -> None:
        """`published_blocking(is_new)` is called after the rename; not new: it replaced a file.
        `unpublish_blocking` deletes the chunk, where its name cannot be made to stay."""
        self.path = path
        self._published_blocking = published_blocking
        self._unpublish_blocking = unpublish_blocking
        self._fs = fs
        self._geometry = geometry
        self._chunk_hash = chunk_hash
        self._survives_power_loss = survives_power_loss
        self._file = TempFile(
            fs,
            files,
            names,
            path=path,
            survives_power_loss=survives_power_loss,
            head_size_bytes=geometry.header_size_bytes,
        )
        # Guards the lines below.
        self._lock = threading.Lock()
        self._inside = 0
        self._is_given_up = False

    def write_blocking(self, layer_index: int, slice_offset: int, data: memoryview) -> None:
        """Writes a piece of a slice; `slice_offset` counts from the slice's start.

        The first write creates the file, its directory too if need be.
        """
        offset = self._geometry.slice_offsets[layer_index] + slice_offset
        with self._entered():
            self._file.write_blocking(data, offset)

    def give_up(self) -> None:
        """A call hangs and nobody waits for it any more. Does no I/O.

        Nothing is published; whichever call comes back last removes the temporary file.
        """
        with self._lock:
            self._is_given_up = True

    @property
    def is_open(self) -> bool:
        """There is a temporary file to be committed or abandoned, and no call hangs on it."""
        return self._file.is_open and not (self._is_given_up and self._inside)

    @property
    def holds_descriptor(self) -> bool:
        """Its file is open, and counted as such."""
        return self._file.holds_descriptor

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self._lock:
            self._check()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                is_last = self._is_given_up and not self._inside
            if is_last:
                self.abandon_blocking()

    def _check(self) -> None:
        if self._is_given_up:
            raise StorageUnavailable(f"{self.path}: given up, a file call hangs")

    def commit_blocking(self, slice_checksums: Sequence[int]) -> None:
        """Steps 3 to 7. On an error nothing is visible and the temporary file is gone."""
        with self._entered():
            self._commit_blocking(slice_checksums)

    def _commit_blocking(self, slice_checksums: Sequence[int]) -> None:
        assert self._file.is_open, "commit before the first write"
        try:
            header = self._geometry.encode_header(self._chunk_hash, slice_checksums)
            # The last slice is padded to the alignment: the file ends on a whole block.
            end = self._geometry.slice_offsets[-1] + self._geometry.layout.slice_sizes[-1]
            padding = self._geometry.file_size_bytes - end
            if padding:
                self._file.write_blocking(bytes(padding), end)
            self._file.write_blocking(header, 0)
            if self._file.has_moved:
                self._check_slices(slice_checksums)
            is_new = self._file.publish_blocking(self._check)
            self._published_blocking(is_new)
            if self._survives_power_loss:
                self._sync_name()
        finally:
            self.abandon_blocking()

    def abandon_blocking(self) -> None:
        """Removes what was written; does nothing after a commit. May be called twice."""
        self._file.abandon_blocking()

    def _check_slices(self, slice_checksums: Sequence[int]) -> None:
        """Reads back what was moved from a full part of the file system.

        Raises:
            StorageUnavailable: that part had lost what it had taken.
        """
        piece = memoryview(bytearray(_PIECE_SIZE_BYTES))
        for layer_index, size in enumerate(self._geometry.layout.slice_sizes):
            verifier = SliceVerifier()
            for start in range(0, size, len(piece)):
                part = piece[: size - start]
                got = self._file.read_blocking(
                    part, self._geometry.slice_offsets[layer_index] + start
                )
                if got < len(part) or not verifier.check(
                    part,
                    slice_offset=start,
                    ends_slice=start + len(part) == size,
                    expected=slice_checksums[layer_index],
                ):
                    raise StorageUnavailable(
                        f"{self.path}: layer {layer_index} was lost where there was no space left; "
                        "store it again"
                    )

    def _sync_name(self) -> None:
        try:
            self._fs.sync_dir(self.path.rpartition("/")[0])
        except StorageError:
            # Else a repeated put would find the chunk and acknowledge what may not survive.
            self._unpublish_blocking()
            raise
