"""A file system that fails, hangs, tears and forgets on purpose, over the real one.

Fail the n-th call for n = 1, 2, ... until nothing fails any more, and every step of an operation
has been the one that went wrong (the idea of LevelDB's fault injection tests). `lose_unsynced`
does to the tree what power loss may do: bytes that were not synced are cut off, names that were
not synced are gone. `hang` and `fail` choose the calls by verb and path instead: a hung mount, a
broken target.
"""

import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


_HANG_S_MAX = 60.0


@dataclass(frozen=True, eq=False)
class _PathFault:
    part: str
    verbs: frozenset[str]
    error: StorageError | None
    released: threading.Event
    for_s: float

    def meet(self) -> None:
        """Waits, or raises."""
        if self.error is not None:
            raise self.error
        self.released.wait(self.for_s)


class FaultyFileSystem(PosixFileSystem):
    """Counts calls of `verbs`; the one with number `fails_at` (from 1) raises `error`.

    With `tears`, a failing write puts half of its bytes first, and a failing close still closes:
    that is what Linux does. `calls` lists the verbs in order, `touched` every verb with its path.
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
        self.touched: list[tuple[str, str]] = []
        self._path_faults: list[_PathFault] = []
        self._paths: dict[int, str] = {}
        self._synced_sizes: dict[str, int] = {}
        self._unsynced_names: set[str] = set()

    @property
    def has_failed(self) -> bool:
        return 0 < self.fails_at <= len(self.calls)

    def hang(self, part: str, verbs: Iterable[str], *, for_s: float = _HANG_S_MAX) -> None:
        """Calls of `verbs` on paths that contain `part` hang until `heal`, or for so long.

        Such a path is not in page cache: what hangs there is `read_into`.
        """
        fault = _PathFault(part, frozenset(verbs), None, threading.Event(), for_s)
        self._path_faults.append(fault)

    def fail(self, part: str, verbs: Iterable[str], error: StorageError | None = None) -> None:
        """Calls of `verbs` on paths that contain `part` raise until `heal`."""
        error = error or StorageUnavailable("EIO")
        fault = _PathFault(part, frozenset(verbs), error, threading.Event(), 0.0)
        self._path_faults.append(fault)

    def heal(self) -> None:
        """Ends what `hang` and `fail` began; hung calls go on and succeed."""
        faults, self._path_faults = self._path_faults, []
        for fault in faults:
            fault.released.set()

    def attempts(self, verb: str, part: str) -> int:
        """How often a verb was called on paths that contain `part`."""
        return sum(it == verb and part in path for it, path in list(self.touched))

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
        self._count("open_read", path)
        fd = super().open_read(path)
        if fd is not None:
            self._paths[fd] = path
        return fd

    def create(self, path: str) -> int | None:
        self._count("create", path)
        fd = super().create(path)
        if fd is not None:
            self._paths[fd] = path
            self._synced_sizes[path] = 0
            self._unsynced_names.add(path)
        return fd

    def open_write(self, path: str) -> int:
        self._count("open_write", path)
        fd = super().open_write(path)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        # Before it is closed: another thread may get the same number at once.
        path = self._paths.pop(fd, "")
        try:
            self._count("close", path)
        finally:
            super().close(fd)

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        self._count("read_into", self._paths.get(fd, ""))
        return super().read_into(fd, into, offset)

    def read_parts(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._count("read_into", self._paths.get(fd, ""))  # a read as any other
        return super().read_parts(fd, parts, offset)

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        path = self._paths.get(fd, "")
        if any("read_into" in it.verbs and it.part in path for it in self._path_faults):
            return None
        return super().read_cached(fd, into, offset)

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        try:
            self._count("write_all", self._paths.get(fd, ""))
        except StorageError:
            if self.tears:
                super().write_all(fd, memoryview(data)[: len(data) // 2], offset)
            raise
        super().write_all(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count("sync", self._paths.get(fd, ""))
        super().sync(fd)
        self._synced_sizes[self._paths[fd]] = os.fstat(fd).st_size

    def sync_dir(self, path: str) -> None:
        self._count("sync_dir", path)
        super().sync_dir(path)
        self._unsynced_names = {
            name for name in self._unsynced_names if os.path.dirname(name) != path
        }

    def stat(self, path: str) -> FileStat | None:
        self._count("stat", path)
        return super().stat(path)

    def stat_open(self, fd: int) -> FileStat:
        self._count("stat_open", self._paths.get(fd, ""))
        return super().stat_open(fd)

    def touch(self, path: str, at: float) -> bool:
        self._count("touch", path)
        return super().touch(path, at)

    def mark(self, path: str, *, is_marked: bool) -> bool:
        self._count("mark", path)
        return super().mark(path, is_marked=is_marked)

    def is_same(self, fd: int, path: str) -> bool:
        self._count("is_same", path)
        return super().is_same(fd, path)

    def rename(self, source: str, target: str) -> None:
        self._count("rename", source)
        super().rename(source, target)
        if source in self._synced_sizes:
            self._synced_sizes[target] = self._synced_sizes.pop(source)
        self._unsynced_names.discard(source)
        self._unsynced_names.add(target)

    def unlink(self, path: str) -> bool:
        self._count("unlink", path)
        self._synced_sizes.pop(path, None)
        self._unsynced_names.discard(path)
        return super().unlink(path)

    def make_dirs(self, path: str) -> list[str]:
        self._count("make_dirs", path)
        made = super().make_dirs(path)
        self._unsynced_names.update(made)
        return made

    def list_dir(self, path: str) -> list[str]:
        self._count("list_dir", path)
        return super().list_dir(path)

    def scan(self, path: str) -> Iterator[Entry]:
        self._count("scan", path)
        return super().scan(path)

    def _count(self, verb: str, path: str) -> None:
        self.touched.append((verb, path))
        for fault in list(self._path_faults):
            if verb in fault.verbs and fault.part in path:
                fault.meet()
        if verb not in self.verbs:
            return
        self.calls.append(verb)
        if len(self.calls) == self.fails_at:
            raise self.error
