"""`FileSystem`: the verbs through which the store touches files.

Contract for every implementation (and for every test double):

* All verbs block and may be called from any thread; one file descriptor is used by several threads
  at once only through the positional verbs.
* A missing file is a value where a caller expects it (`open_read`, `unlink`, `stat`), never an
  exception.
* Everything else that the system refuses is `StorageFull`, its `QuotaExceeded`,
  `StorageUnavailable` or `Overloaded` (out of file descriptors), whose message has the verb, the
  path and the errno's name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from kvserve.errors import Overloaded, StorageError

REFUSED: Final = (StorageError, Overloaded)
"""What the verbs raise; for who goes on with the next directory. `StorageError` alone is not all:
to list a directory takes a descriptor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory and what it names; "other" is no file one may read (a device, a FIFO,
    a link to nothing)."""

    name: str
    kind: Literal["file", "directory", "other"]


@dataclass(frozen=True, slots=True)
class FileStat:
    """What one `stat` tells. `modified_at`: seconds, by the file system's clock or as `touch` set
    it; `is_marked`: see `mark`; `disk_bytes`: what the file takes on the disk, holes left out."""

    size_bytes: int
    disk_bytes: int
    modified_at: float
    is_marked: bool


class FileSystem(Protocol):
    """See the module's text for what all verbs share."""

    @property
    def full_retries(self) -> int:
        """How often a new file may have the room that another was refused with `StorageFull`.

        0 where space is one pool; more where each file has its own part of it.
        """

    def open_read(self, path: str) -> int | None:
        """A descriptor for reading, or None if there is no such file."""

    def create(self, path: str) -> int | None:
        """A new empty file, open for writing (O_EXCL); None if the directory is missing.

        Raises:
            FileExistsError: the name is taken; try another.
        """

    def open_write(self, path: str) -> int:
        """An existing file, open for writing; a missing one is `StorageUnavailable`."""

    def close(self, fd: int) -> None:
        """Closes. An error here is a failed write."""

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        """Fills `into` from `offset` on; returns the bytes read, fewer only at end of file."""

    def read_parts(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """The same for several buffers, one after another, any number of them: on a parallel file
        system one RPC where they are read apart."""

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        """The same without waiting for a disk: None if that cannot be promised.

        May return fewer bytes than asked for where only a part is in memory. The only verb that
        the event loop may call.
        """

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`; a short write is continued, never counted as done."""

    def sync(self, fd: int) -> None:
        """The file's bytes and size survive power loss once this returns."""

    def sync_dir(self, path: str) -> None:
        """The names in a directory survive power loss once this returns."""

    def stat(self, path: str) -> FileStat | None:
        """None if there is no such file. One system call."""

    def stat_open(self, fd: int) -> FileStat:
        """The same of an open file."""

    def touch(self, path: str, at: float) -> bool:
        """Sets when the file was last modified; False if there is no such file."""

    def mark(self, path: str, *, is_marked: bool) -> bool:
        """Sets or clears a mark that is kept with the file (the owner's x bit of its mode); False
        if there is no such file."""

    def is_same(self, fd: int, path: str) -> bool:
        """Whether `path` names the file that is open as `fd`."""

    def rename(self, source: str, target: str) -> None:
        """Atomically gives `source` the name `target`, replacing what had it."""

    def unlink(self, path: str) -> bool:
        """Removes a name; False if it was not there."""

    def make_dirs(self, path: str) -> list[str]:
        """Makes a directory and its parents; existing ones are fine. Returns the new ones."""

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, in no order; empty if there is no such directory."""

    def scan(self, path: str) -> Iterator[Entry]:
        """The entries of a directory, in no order, read while they are asked for; none if there is
        no such directory. The kinds cost no system call each. Links are followed."""

    def kind(self, path: str) -> str:
        """Kind of the file system under `path`, such as "ext4", "lustre" or "0x1234abcd"."""
