"""Where damaged files go: evidence for people, out of every reader's way, within a bound.

The oldest files make room for the newest. Servers of one tree share the directory and the bound.
"""

import logging
import threading
from contextlib import suppress

from kvserve.errors import StorageError
from kvserve.fs import REFUSED, FileSystem
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

    def take_blocking(self, path: str, fd: int) -> bool:
        """Moves the file at `path` here if it is the one open as `fd`; whether it did.

        Only that file: a good one that has taken its name meanwhile stays. A file system that
        refuses the move leaves the file where it is; it stays a miss, since every read checks it.
        """
        try:
            if not set_aside_blocking(self._fs, self._root, path, fd):
                return False
        except StorageError as error:
            log.warning("a damaged chunk stays at its place, as a miss: %s", error)
            return False
        self.taken += 1
        log.warning("damaged, now in %s: %s", self._directory, path)
        with suppress(*REFUSED):  # the next one tries again
            self._trim_blocking()
        return True

    def _trim_blocking(self) -> None:
        with self._trimming:
            files = []
            # Files only: a directory that fsck has put there is for people to remove.
            for name in [it.name for it in self._fs.scan(self._directory) if it.kind == "file"]:
                found = self._fs.stat(f"{self._directory}/{name}")
                if found is not None:
                    files.append((found.modified_at, name, found.size_bytes))
            excess = sum(size_bytes for _, _, size_bytes in files) - self._size_bytes_max
            for _, name, size_bytes in sorted(files):
                if excess <= 0:
                    return
                self._fs.unlink(f"{self._directory}/{name}")
                excess -= size_bytes


def set_aside_blocking(fs: FileSystem, root: str, path: str, fd: int) -> bool:
    """Moves the file that is open as `fd` out of every reader's way; True if that was done.

    Only that file: a good one that has taken its name meanwhile stays. `fd` keeps the file's inode
    taken, so that no new file can be mistaken for it.

    Raises:
        StorageError: the file system refused; the file may still be where it was.
    """
    if not fs.is_same(fd, path):
        return False
    fs.make_dirs(f"{root}/{QUARANTINE_DIR}")
    aside = f"{root}/{QUARANTINE_DIR}/{_name_aside(root, path)}"
    fs.rename(path, aside)
    if fs.is_same(fd, aside):
        return True
    # A good file took the name between the check and the move: put it back.
    fs.rename(aside, path)
    return False


def set_aside_no_file_blocking(fs: FileSystem, root: str, path: str) -> bool:
    """Moves what lies in the place of a file and is none, a directory or a link that leads nowhere,
    with all that is in it, and replaces nothing; True if that was done.

    Raises:
        StorageError: the file system refused; it is still where it was.
    """
    directory = f"{root}/{QUARANTINE_DIR}"
    fs.make_dirs(directory)
    taken = set(fs.list_dir(directory))
    name = _name_aside(root, path)
    names = [name, *(f"{name}.{number}" for number in range(1, len(taken) + 1))]
    name = next(it for it in names if it not in taken)
    fs.rename(path, f"{directory}/{name}")
    if not any(it.name == name and it.kind == "file" for it in fs.scan(directory)):
        return True
    # A good file took the name meanwhile: put it back.
    fs.rename(f"{directory}/{name}", path)
    return False


def _name_aside(root: str, path: str) -> str:
    return path[len(root) + 1 :].replace("/", "@")
