"""Unfinished files whose store is over and that could not be removed then: the mount was hung, or
the threads were busy for too long. Another try removes them."""

import logging
from collections import deque
from contextlib import suppress
from typing import Final

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.store.paths import TempNames
from kvserve.store.publish import ChunkWriter
from kvserve.store.temp_file import remove_left_blocking

log = logging.getLogger(__name__)

_WITHOUT_FILE_MAX: Final = 1 << 16


class LeftWriters:
    """Bounded: those that have their file open by the budget of open files, the others by a number
    beyond which a file is left to the sweep that comes after this server. Safe from any thread."""

    def __init__(self, fs: FileSystem, names: TempNames) -> None:
        self._fs = fs
        self._names = names
        self._writers: deque[ChunkWriter] = deque()

    def __repr__(self) -> str:
        return f"<LeftWriters {len(self._writers)}>"

    def __len__(self) -> int:
        return len(self._writers)

    def add(self, writer: ChunkWriter) -> None:
        """Does no I/O."""
        if len(self._writers) >= _WITHOUT_FILE_MAX and not writer.holds_descriptor:
            log.warning("too many unfinished files to remove: one of %s is left", writer.path)
            return
        self._writers.append(writer)

    def remove_blocking(self) -> None:
        """Another try for each; what cannot be removed is remembered by its name (`temp_file`)."""
        for _ in range(len(self._writers)):
            with suppress(StorageError, IndexError):  # another thread was faster
                self._writers.popleft().abandon_blocking()
        remove_left_blocking(self._fs, self._names)
