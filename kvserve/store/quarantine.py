"""Sets damaged files aside in `.quarantine`, as evidence, while others write to the same names."""

from kvserve.fs import FileSystem
from kvserve.store.paths import QUARANTINE_DIR


def set_aside_blocking(fs: FileSystem, root: str, path: str, fd: int) -> bool:
    """Moves the file that is open as `fd` out of every reader's way; True if that was done.

    Only that file: a good one that has taken its name meanwhile stays. `fd` keeps the file's inode
    taken, so that no new file can be mistaken for it.

    Raises:
        StorageError: the file system refused; the file may still be where it was.
    """
    if not fs.is_same(fd, path):
        return False
    aside = f"{root}/{QUARANTINE_DIR}/{path[len(root) + 1 :].replace('/', '@')}"
    fs.make_dirs(f"{root}/{QUARANTINE_DIR}")
    fs.rename(path, aside)
    if fs.is_same(fd, aside):
        return True
    # A good file took the name between the check and the move: put it back.
    fs.rename(aside, path)
    return False
