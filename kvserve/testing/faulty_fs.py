"""A file system that fails, tears and forgets on purpose, over the real one.

Fail the n-th call for n = 1, 2, ... until nothing fails any more, and every step of an operation
has been the one that went wrong (the idea of LevelDB's fault injection tests). `lose_unsynced`
does to the tree what power loss may do: bytes that were not synced are cut off, names that were
not synced are gone.
"""

import os
import shutil
from collections.abc import Iterator

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.fs import Entry, FileStat, PosixFileSystem

CHANGING = frozenset(
    (
        "create",
        "open_write",
        "write_all",
        "sync",
        "sync_dir",
        "close",
        "rename",
        "unlink",
        "make_dirs",
        "touch",
        "mark",
    )
)
READING = frozenset(("open_read", "read_into", "stat", "stat_open", "list_dir", "scan", "is_same"))


class FaultyFileSystem(PosixFileSystem):
    """Counts calls of `verbs`; the one with number `fails_at` (from 1) raises `error`.

    With `tears`, a failing write puts half of its bytes first, and a failing close still closes:
    that is what Linux does. `calls` lists the verbs in order.
    """

    def __init__(
        self,
        fails_at: int = 0,
        error: StorageError | None = None,
        *,
        verbs: frozenset[str] = CHANGING,
        tears: bool = True,
    ) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.error = error or StorageUnavailable("EIO")
        self.verbs = verbs
        self.tears = tears
        self.calls: list[str] = []
        self._paths: dict[int, str] = {}
        self._synced_sizes: dict[str, int] = {}
        self._unsynced_names: set[str] = set()

    @property
    def has_failed(self) -> bool:
        return 0 < self.fails_at <= len(self.calls)

    def lose_unsynced(self) -> None:
        """Power loss, with the machine on again. Open descriptors are the caller's to forget."""
        for path, size in self._synced_sizes.items():
            if os.path.exists(path):
                os.truncate(path, size)
        for path in sorted(self._unsynced_names):
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.exists(path):
                os.unlink(path)
        self._synced_sizes.clear()
        self._unsynced_names.clear()

    def open_read(self, path: str) -> int | None:
        self._count("open_read")
        return super().open_read(path)

    def create(self, path: str) -> int | None:
        self._count("create")
        fd = super().create(path)
        if fd is not None:
            self._paths[fd] = path
            self._synced_sizes[path] = 0
            self._unsynced_names.add(path)
        return fd

    def open_write(self, path: str) -> int:
        self._count("open_write")
        fd = super().open_write(path)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self._paths.pop(fd, None)
        self._count("close")

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        self._count("read_into")
        return super().read_into(fd, into, offset)

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        try:
            self._count("write_all")
        except StorageError:
            if self.tears:
                super().write_all(fd, memoryview(data)[: len(data) // 2], offset)
            raise
        super().write_all(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)
        self._synced_sizes[self._paths[fd]] = os.fstat(fd).st_size

    def sync_dir(self, path: str) -> None:
        self._count("sync_dir")
        super().sync_dir(path)
        self._unsynced_names = {
            name for name in self._unsynced_names if os.path.dirname(name) != path
        }

    def stat(self, path: str) -> FileStat | None:
        self._count("stat")
        return super().stat(path)

    def stat_open(self, fd: int) -> FileStat:
        self._count("stat_open")
        return super().stat_open(fd)

    def touch(self, path: str, at: float) -> bool:
        self._count("touch")
        return super().touch(path, at)

    def mark(self, path: str, *, is_marked: bool) -> bool:
        self._count("mark")
        return super().mark(path, is_marked=is_marked)

    def is_same(self, fd: int, path: str) -> bool:
        self._count("is_same")
        return super().is_same(fd, path)

    def rename(self, source: str, target: str) -> None:
        self._count("rename")
        super().rename(source, target)
        if source in self._synced_sizes:
            self._synced_sizes[target] = self._synced_sizes.pop(source)
        self._unsynced_names.discard(source)
        self._unsynced_names.add(target)

    def unlink(self, path: str) -> bool:
        self._count("unlink")
        self._synced_sizes.pop(path, None)
        self._unsynced_names.discard(path)
        return super().unlink(path)

    def make_dirs(self, path: str) -> list[str]:
        self._count("make_dirs")
        made = super().make_dirs(path)
        self._unsynced_names.update(made)
        return made

    def list_dir(self, path: str) -> list[str]:
        self._count("list_dir")
        return super().list_dir(path)

    def scan(self, path: str) -> Iterator[Entry]:
        self._count("scan")
        return super().scan(path)

    def _count(self, verb: str) -> None:
        if verb not in self.verbs:
            return
        self.calls.append(verb)
        if len(self.calls) == self.fails_at:
            raise self.error
