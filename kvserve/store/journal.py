"""Small files of fixed records on the tree, one writer each, through which servers tell one another
what is leased, what was released and what is being evicted.

A record is a chunk's 64-bit key, a kind and a time. A reader remembers how far it has read; a
writer that starts a file anew replaces it whole, which readers notice. A record that is half
written when it is read is read the next time.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.fs import FileSystem

_RECORD = struct.Struct("<QdB7x")
_READ_SIZE_BYTES = _RECORD.size << 14
_SIZE_BYTES_MAX = _RECORD.size << 18
_READS_MAX = 1 << 12
"""Far more records than `capacity.leased_chunks_max` allows: one lease unread is one broken."""


class RecordKind(IntEnum):
    """What is said of a chunk. Values are in files that servers of other versions read."""

    LEASED = 1
    """Until `at`."""
    LEAVING = 2
    """Picked at `at`: whoever grants a lease from now on must not grant this."""
    GONE = 3
    STAYED = 4
    """Picked, but leased or not deletable."""
    RELEASED = 5
    """Not of a chunk but of a lease's owner (`releases.py`): what it was granted before `at`."""


@dataclass(frozen=True, slots=True)
class Record:
    key: int
    kind: RecordKind
    at: float


class JournalWriter:
    """The one writer of a file, at `path`. All methods block; one thread at a time.

    After an error the next record starts the file anew: readers may have seen part of what failed,
    and would miss what is written over it.
    """

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._temp = f"{path}.new"
        self._fd: int | None = None
        self._size = 0

    @property
    def is_due(self) -> bool:
        """Time to `replace`: the file is long, or there is none that could be written on."""
        return self._fd is None or self._size >= _SIZE_BYTES_MAX

    def append(
        self, records: Sequence[Record], all_records: Callable[[], Iterable[Record]]
    ) -> None:
        """Every reader finds the records once this returns.

        Without a file, or after a long one, it is started anew with `all_records`. So it is if what
        was written on is no longer the file at the path: others remove it once they take this
        server for dead, as after a pause that was longer than its claim.

        Raises:
            StorageError: the tree refused.
        """
        if self._fd is not None and not self.is_due:
            data = _packed(records)
            try:
                self._fs.write_all(self._fd, data, self._size)
                # After the write: what is removed from here on was seen to have the records.
                is_there = self._fs.is_same(self._fd, self._path)
            except BaseException:
                self._close_quietly()
                raise
            self._size += len(data)
            if is_there:
                return
        self.replace(all_records())

    def is_lost_blocking(self) -> bool:
        """Whether the file that was written on is no longer the one at the path."""
        return self._fd is not None and not self._fs.is_same(self._fd, self._path)

    def replace(self, records: Iterable[Record]) -> None:
        """Starts the file anew with these records; on an error readers find the old one."""
        self._close_quietly()
        self._fs.make_dirs(self._path.rpartition("/")[0])
        self._fs.unlink(self._temp)
        fd = self._fs.create(self._temp)
        if fd is None:
            raise StorageUnavailable(f"{self._path}: its directory vanished")
        self._fd = fd
        data = _packed(records)
        try:
            self._fs.write_all(fd, data, 0)
            self._fs.rename(self._temp, self._path)
        except BaseException:
            self._close_quietly()
            raise
        self._size = len(data)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._fs.close(fd)

    def _close_quietly(self) -> None:
        with suppress(StorageError):  # what was in it has been read, or is written anew
            self.close()


class JournalReader:
    """Reads one file on, from where it ended the last time."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fd: int | None = None
        self._position = 0
        self._has_failed = False

    def read_blocking(self) -> tuple[list[Record], bool]:
        """New records, and whether some may have been missed (the file was replaced).

        Raises:
            StorageError: the tree refused. The next read begins at the start: what this one had
                got counts as not read.
        """
        try:
            found, is_replaced = self._read()
        except BaseException:
            self.close()
            self._has_failed = True
            raise
        is_replaced, self._has_failed = is_replaced or self._has_failed, False
        return found, is_replaced

    def _read(self) -> tuple[list[Record], bool]:
        is_replaced = False
        found: list[Record] = []
        if self._fd is not None:
            # What came before a replacement is still in the file that is open.
            found += self._read_on()
            if self._fs.is_same(self._fd, self._path):
                return found, False
            self.close()
            is_replaced = True
        self._fd = self._fs.open_read(self._path)
        if self._fd is not None:
            found += self._read_on()
        return found, is_replaced

    def close(self) -> None:
        fd, self._fd = self._fd, None
        self._position = 0
        if fd is not None:
            with suppress(StorageError):  # read only: nothing is lost
                self._fs.close(fd)

    def _read_on(self) -> list[Record]:
        assert self._fd is not None
        found: list[Record] = []
        buffer = memoryview(bytearray(_READ_SIZE_BYTES))
        for _ in range(_READS_MAX):
            got = self._fs.read_into(self._fd, buffer, self._position)
            whole = got - got % _RECORD.size
            found += unpacked(buffer[:whole])
            self._position += whole
            if whole < _READ_SIZE_BYTES:
                break
        return found


def read_all_blocking(fs: FileSystem, path: str) -> list[Record]:
    """Every record of a file; none if it is missing."""
    reader = JournalReader(fs, path)
    try:
        return reader.read_blocking()[0]
    finally:
        reader.close()


def unpacked(data: memoryview) -> list[Record]:
    """Records of kinds that this version does not know are left out."""
    kinds = set(RecordKind)
    return [
        Record(key, RecordKind(kind), at)
        for key, at, kind in _RECORD.iter_unpack(data)
        if kind in kinds
    ]


def _packed(records: Iterable[Record]) -> bytes:
    return b"".join(_RECORD.pack(record.key, record.at, record.kind) for record in records)
