"""Reads files past the page cache: what is checked is the disk, and what servers keep in memory
stays there.

O_DIRECT wants buffers, offsets and lengths in whole pages, so a reader owns one anonymous mapping
and goes through a file window by window. A file system that does not know O_DIRECT is noticed at
the first file and never asked again; a single file that refuses (EINVAL) is read through the cache.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kvserve.errors import StorageError
from kvserve.fs.base import FileSystem

PAGE_SIZE_BYTES: Final = max(4096, mmap.PAGESIZE)
WINDOW_SIZE_BYTES: Final = 1 << 20


class DirectReader:
    """Reads whole files, one at a time. Not for two threads at once: it has one buffer.

    Attributes:
        is_direct: whether the last file's bytes came past the cache.
    """

    def __init__(self, fs: FileSystem, *, window_size_bytes: int = WINDOW_SIZE_BYTES) -> None:
        assert window_size_bytes % PAGE_SIZE_BYTES == 0, "windows are whole pages"
        self._fs = fs
        self._buffer = memoryview(mmap.mmap(-1, window_size_bytes))
        self._is_known_here = True
        self.is_direct = False

    def windows(self, fd: int) -> Iterator[memoryview]:
        """All bytes of the open file, in order; every view but the last is a whole window.

        Each view is valid until the next is asked for.

        Raises:
            StorageError: the file cannot be read (EIO and the like).
        """
        self.is_direct = self._is_known_here and _set_direct(fd, True)
        self._is_known_here = self.is_direct
        offset, got = 0, len(self._buffer)
        while got == len(self._buffer):
            got = self._read(fd, offset)
            offset += got
            if got:
                yield self._buffer[:got]

    def _read(self, fd: int, offset: int) -> int:
        try:
            return self._fs.read_into(fd, self._buffer, offset)
        except StorageError as error:
            cause = error.__cause__
            refused = isinstance(cause, OSError) and cause.errno == errno.EINVAL
            if not (refused and self.is_direct):
                raise
        self.is_direct = False
        _set_direct(fd, False)
        return self._fs.read_into(fd, self._buffer, offset)


def _set_direct(fd: int, wanted: bool) -> bool:
    """Turns O_DIRECT on or off for an open file; False if the file system does not know it."""
    with suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        return True
    return False
