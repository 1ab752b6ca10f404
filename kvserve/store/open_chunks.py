"""Open chunk files, kept for the next reader: opening costs a metadata trip and a header check.

One request per layer would otherwise open layers x chunks files. An entry is acquired by a
transfer and released by it; idle entries stay, least recently used first out, within a bound on
file descriptors shared with the writers. Past that bound a chunk is opened for each read
(`fd is None`): slower, but no descriptor count can fail a transfer.

A file that another server deletes stays readable through its descriptor: the reader gets the
original bytes, which never change.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvserve.errors import StorageError
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.fs import FileSystem
from kvserve.model import ChunkStatus, Verdict


@dataclass(slots=True, eq=False)
class OpenChunk:
    """A chunk file whose header was checked. `checksums` and `offsets` are by layer index."""

    path: str
    fd: int | None
    checksums: tuple[int, ...]
    offsets: tuple[int, ...]
    users: int = 1
    is_forgotten: bool = False
    idle_since: float = 0.0


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
        with self._lock:
            chunk = self._by_path.get(path)
            if chunk is not None:
                chunk.users += 1
                self._idle.pop(path, None)
            return chunk

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
            return Verdict(ChunkStatus.MISS_ABSENT)
        keeps_fd = False
        try:
            header = bytearray(geometry.header_size_bytes)
            got = self._fs.read_into(fd, memoryview(header), 0)
            found = geometry.decode_header(chunk_hash, bytes(header[:got]))
            if isinstance(found, Verdict):
                reject_blocking(path, fd)
                return found
            keeps_fd = self.take_blocking()
        finally:
            if not keeps_fd:
                self._fs.close(fd)
        chunk = OpenChunk(path, fd if keeps_fd else None, found, geometry.slice_offsets)
        if keeps_fd:
            with self._lock:
                if path not in self._by_path:
                    self._by_path[path] = chunk
                else:  # another thread was faster; this one serves its transfer and is closed
                    chunk.is_forgotten = True
        return chunk

    def hold(self, chunk: OpenChunk) -> None:
        """One more user of a chunk that is in use: to be paired with `release`."""
        with self._lock:
            chunk.users += 1

    def release(self, chunk: OpenChunk) -> None:
        """The transfer is done with it. Does no I/O: descriptors are closed by a later opener."""
        with self._lock:
            chunk.users -= 1
            if chunk.users or chunk.fd is None:
                return
            if chunk.is_forgotten:
                self._to_close.append(chunk.fd)
            else:
                chunk.idle_since = self._clock()
                self._idle[chunk.path] = chunk

    def forget(self, path: str) -> None:
        """No later `acquire` finds it; present users keep reading the original bytes."""
        with self._lock:
            chunk = self._by_path.pop(path, None)
            if chunk is None:
                return
            chunk.is_forgotten = True
            if self._idle.pop(path, None) is not None and chunk.fd is not None:
                self._to_close.append(chunk.fd)

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
