"""Where damaged files go: evidence for people, out of every reader's way, within a bound.

The oldest files make room for the newest. Servers of one tree share the directory and the bound.
"""

import logging
import threading
from contextlib import suppress

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.store.paths import QUARANTINE_DIR

log = logging.getLogger(__name__)


class Quarantine:
    """`size_bytes_max`: all of it together; a larger file is not kept."""

    def __init__(self, fs: FileSystem, root: str, *, size_bytes_max: int) -> None:
        self._fs = fs
        self._root = root
        self._directory = f"{root}/{QUARANTINE_DIR}"
        self._size_bytes_max = size_bytes_max
        self._trimming = threading.Lock()
        self.taken = 0

    def take_blocking(self, path: str, fd: int) -> int:
        """Moves the file at `path` here if it is the one open as `fd`; returns its size, else 0.

        Only that file: a good one that has taken its name meanwhile stays. A file system that
        refuses the move leaves the file where it is; it stays a miss, since every read checks it.
        """
        flat = f"{self._directory}/{path[len(self._root) + 1 :].replace('/', '@')}"
        try:
            if not self._fs.is_same(fd, path):
                return 0
            size_bytes = self._fs.stat_open(fd).size_bytes
            self._fs.make_dirs(self._directory)
            self._fs.rename(path, flat)
            if not self._fs.is_same(fd, flat):
                # A good file took the name between the check and the move: put it back.
                self._fs.rename(flat, path)
                return 0
        except StorageError as error:
            log.warning("a damaged file stays where it is: %s", error)
            return 0
        self.taken += 1
        log.warning("damaged: %s is now %s", path, flat)
        with suppress(StorageError):  # the next one tries again
            self._trim_blocking()
        return size_bytes

    def _trim_blocking(self) -> None:
        with self._trimming:
            files = []
            for name in self._fs.list_dir(self._directory):
                found = self._fs.stat(f"{self._directory}/{name}")
                if found is not None:
                    files.append((found.modified_at, name, found.size_bytes))
            excess = sum(size_bytes for _, _, size_bytes in files) - self._size_bytes_max
            for _, name, size_bytes in sorted(files):
                if excess <= 0:
                    return
                self._fs.unlink(f"{self._directory}/{name}")
                excess -= size_bytes
