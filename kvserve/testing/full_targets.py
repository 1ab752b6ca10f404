"""A file system whose files each lie on one of several storage targets, some of them full.

What Lustre looks like to a writer of small files: a new file lands on the next target, a full
target takes `room_bytes` of it and refuses the rest with ENOSPC, the others know nothing of that.
"""

import itertools
from collections.abc import Collection

from kvserve.errors import QuotaExceeded, StorageError, StorageFull
from kvserve.testing.faulty_fs import CHANGING, FaultyFileSystem


class FullTargetsFileSystem(FaultyFileSystem):
    """Files land on target 0, 1, ... in turn; those in `full` have `room_bytes` for each file.

    `has_quota` makes the refusals EDQUOT instead, `creates_refused` that many creates ENOSPC.
    `full_retries` may be set; `created` counts the files, `lost_below` makes a full target forget
    the bytes of a file before that offset when it refuses: they were in a cache and never on disk.
    """

    def __init__(
        self,
        fails_at: int = 0,
        error: StorageError | None = None,
        *,
        targets: int = 3,
        full: Collection[int] = (0,),
        room_bytes: int = 0,
        verbs: frozenset[str] = CHANGING,
    ) -> None:
        super().__init__(fails_at, error, verbs=verbs)
        self.full_retries = 3
        self.full = frozenset(full)
        self.room_bytes = room_bytes
        self.has_quota = False
        self.creates_refused = 0
        self.lost_below = 0
        self.created = 0
        self._targets = itertools.cycle(range(targets))
        self._target_of: dict[str, int] = {}

    def create(self, path: str) -> int | None:
        if self.creates_refused:
            self.creates_refused -= 1
            raise StorageFull(f"create {path}: ENOSPC (No space left on device)")
        fd = super().create(path)
        if fd is not None:
            self.created += 1
            self._target_of[path] = next(self._targets)
        return fd

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        room = self.room_bytes - offset
        if self._target_of.get(self._paths.get(fd, ""), -1) not in self.full or len(data) <= room:
            super().write_all(fd, data, offset)
            return
        super().write_all(fd, memoryview(data)[: max(room, 0)], offset)
        if self.lost_below:
            super().write_all(fd, bytes(self.lost_below), 0)
        if self.has_quota:
            raise QuotaExceeded(f"write {fd}: EDQUOT (Disk quota exceeded)")
        raise StorageFull(f"write {fd}: ENOSPC (No space left on device)")

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if source in self._target_of:
            self._target_of[target] = self._target_of.pop(source)

    def unlink(self, path: str) -> bool:
        was_there = super().unlink(path)
        self._target_of.pop(path, None)
        return was_there
