"""Open chunk files, kept for the next reader: opening costs a metadata trip and a header check.

One request per layer would otherwise open layers x chunks files. An entry is acquired by a
transfer and released by it; idle entries stay, least recently used first out, within a bound on
file descriptors shared with the writers. Past that bound a chunk is opened for each read
(`fd is None`): slower, but no descriptor count can fail a transfer.

A file that another server deletes stays readable through its descriptor: the reader gets the
original bytes, which never change.
"""

import math
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvserve.errors import StorageError
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.fs import FileSystem
from kvserve.model import ChunkStatus, Verdict

_ABSENT: Final = Verdict(ChunkStatus.MISS_ABSENT)
# Chunks for which the lock is held without a break: the event loop may wait for it.
_STRETCH = 256


@dataclass(slots=True, eq=False)
class OpenChunk:
    """A chunk file whose header was checked. `checksums` and `offsets` are by layer index.

    `used_at`: the time of last use that the file carries, see `Recency`; infinity if it is pinned.
    """

    path: str
    fd: int | None
    checksums: "array[int]"
    geometry: ChunkGeometry
    chunk_hash: bytes
    used_at: float = 0.0
    broken_fd: int | None = None
    users: int = 1
    is_forgotten: bool = False
    idle_since: float = 0.0

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.geometry.slice_offsets


class OpenChunks:
    """The cache. `acquire*` must be paired with `release`, `take_blocking` with `give`."""

    def __init__(
        self, fs: FileSystem, files_max: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._fs = fs
        self._files_max = files_max
        self._taken = 0
        self._lock = threading.Lock()
        self._by_path: dict[str, OpenChunk] = {}
        self._idle: OrderedDict[str, OpenChunk] = OrderedDict()
        self._to_close: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<OpenChunks {self._taken} files of {self._files_max}, {len(self._by_path)} open, "
            f"{len(self._idle)} idle>"
        )

    @property
    def taken(self) -> int:
        """Descriptors counted in, readers' and writers' together."""
        return self._taken

    def acquire(self, path: str) -> OpenChunk | None:
        """The chunk if its file is open already. Does no I/O."""
        return self.acquire_all((path,))[0]

    def acquire_all(self, paths: Sequence[str]) -> list[OpenChunk | None]:
        """`acquire` for each path; the lock is taken once for many."""
        found: list[OpenChunk | None] = []
        for start in range(0, len(paths), _STRETCH):
            with self._lock:
                for path in paths[start : start + _STRETCH]:
                    chunk = self._by_path.get(path)
                    if chunk is not None:
                        chunk.users += 1
                        self._idle.pop(path, None)
                    found.append(chunk)
        return found

    def acquire_blocking(
        self,
        path: str,
        geometry: ChunkGeometry,
        chunk_hash: bytes,
        *,
        reject_blocking: Callable[[str, int], None],
    ) -> OpenChunk | Verdict:
        """Opens the file and checks its header; a verdict says why that is a miss.

        A file that is there and is not this chunk is given to `reject_blocking`, still open.

        Raises:
            StorageError, Overloaded: the file system refused.
        """
        cached = self.acquire(path)
        if cached is not None:
            return cached
        fd = self._fs.open_read(path)
        if fd is None:
            return _ABSENT
        keeps_fd = False
        try:
            found = self._checksums_blocking(fd, geometry, chunk_hash)
            if isinstance(found, Verdict):
                reject_blocking(path, fd)
                return found
            # After the read: on Lustre the attributes then came with its lock.
            seen = self._fs.stat_open(fd)
            used_at = math.inf if seen.is_marked else seen.modified_at
            keeps_fd = self.take_blocking()
        finally:
            if not keeps_fd:
                self._fs.close(fd)
        chunk = OpenChunk(path, fd if keeps_fd else None, found, geometry, chunk_hash, used_at)
        if keeps_fd:
            with self._lock:
                if path not in self._by_path:
                    self._by_path[path] = chunk
                else:  # another thread was faster; this one serves its transfer and is closed
                    chunk.is_forgotten = True
        return chunk

    def _checksums_blocking(
        self, fd: int, geometry: ChunkGeometry, chunk_hash: bytes
    ) -> "array[int] | Verdict":
        """What the header of an open file says, or what is wrong with it."""
        header = bytearray(geometry.header_size_bytes)
        got = self._fs.read_into(fd, memoryview(header), 0)
        return geometry.decode_header(chunk_hash, bytes(header[:got]))

    def reopen_blocking(self, chunk: OpenChunk, broken_fd: int) -> bool:
        """Gives a chunk in use another descriptor in the place of one that cannot be read any more.

        An evicted Lustre client, a lost mount: what was open before stays broken, a new open may
        work. Once for each chunk, and only if its name still stands for the same bytes. The broken
        one stays open as long as the chunk: other threads may be using its number.

        Raises:
            StorageError, Overloaded: the file system refused.
        """
        if chunk.broken_fd is not None:
            return chunk.fd != broken_fd
        fd = self._fs.open_read(chunk.path)
        if fd is None:
            return False
        is_used = False
        try:
            found = self._checksums_blocking(fd, chunk.geometry, chunk.chunk_hash)
            if found == chunk.checksums and self.take_blocking():
                with self._lock:
                    is_used = chunk.broken_fd is None
                    if is_used:
                        chunk.fd, chunk.broken_fd = fd, chunk.fd
                if not is_used:
                    self.give()
        finally:
            if not is_used:
                self._fs.close(fd)
        return chunk.fd != broken_fd

    def hold(self, chunk: OpenChunk) -> None:
        """One more user of a chunk that is in use: to be paired with `release`."""
        with self._lock:
            chunk.users += 1

    def release(self, chunk: OpenChunk) -> None:
        """The transfer is done with it. Does no I/O: descriptors are closed by a later opener."""
        self.release_all((chunk,))

    def release_all(self, chunks: Iterable[OpenChunk]) -> None:
        """`release` for each; the lock is taken once for many."""
        now, remaining = self._clock(), iter(chunks)
        while stretch := list(islice(remaining, _STRETCH)):
            with self._lock:
                for chunk in stretch:
                    chunk.users -= 1
                    if chunk.users or chunk.fd is None:
                        continue
                    if chunk.is_forgotten:
                        self._close_later(chunk)
                    else:
                        chunk.idle_since = now
                        self._idle[chunk.path] = chunk

    def forget(self, path: str) -> None:
        """No later `acquire` finds it; present users keep reading the original bytes."""
        with self._lock:
            self._forget(path)

    def _forget(self, path: str) -> None:
        chunk = self._by_path.pop(path, None)
        if chunk is None:
            return
        chunk.is_forgotten = True
        if self._idle.pop(path, None) is not None:
            self._close_later(chunk)

    def _close_later(self, chunk: OpenChunk) -> None:
        self._to_close += [fd for fd in (chunk.fd, chunk.broken_fd) if fd is not None]

    def forget_idle(self, path: str) -> bool:
        """The same unless a transfer is using it; says whether nobody was."""
        with self._lock:
            chunk = self._by_path.get(path)
            if chunk is not None and chunk.users:
                return False
            self._forget(path)
            return True

    def close_released_blocking(self) -> None:
        """Closes descriptors that nobody uses and no entry holds."""
        with self._lock:
            fds, self._to_close = self._to_close, []
        for fd in fds:
            self.give()
            # Read only: a failed close loses nothing, and must not keep the others open.
            with suppress(StorageError):
                self._fs.close(fd)

    def close_idle_blocking(self, older_than_s: float = 0.0) -> None:
        """Closes what nobody has used for so long.

        Another server may have deleted the file: until it is closed here its space stays taken.
        """
        before = self._clock() - older_than_s
        with self._lock:
            idle = [path for path, chunk in self._idle.items() if chunk.idle_since <= before]
        for path in idle:
            self.forget(path)
        self.close_released_blocking()

    def take_blocking(self) -> bool:
        """Counts a descriptor in, closing the one idle longest if need be; False if none is."""
        self.close_released_blocking()
        if self._take():
            return True
        with self._lock:
            oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self.forget(oldest)
        self.close_released_blocking()
        return self._take()

    def give(self) -> None:
        """Counts a descriptor out."""
        with self._lock:
            self._taken -= 1

    def _take(self) -> bool:
        with self._lock:
            if self._taken >= self._files_max:
                return False
            self._taken += 1
            return True
