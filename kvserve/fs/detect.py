"""Which file system a root lies on decides how the store talks to it."""

from kvserve.config import LustreConfig
from kvserve.fs.base import FileSystem
from kvserve.fs.lustre import LustreFileSystem
from kvserve.fs.posix import PosixFileSystem


def open_file_system_blocking(root: str, lustre: LustreConfig) -> FileSystem:
    """The file system of `root`, which is made if it is missing, and prepared where it is Lustre.

    Raises:
        StorageError: the root cannot be made or asked.
    """
    posix = PosixFileSystem()
    posix.make_dirs(root)
    if posix.kind(root) != "lustre":
        return posix
    fs = LustreFileSystem()
    fs.prepare_root_blocking(root, lustre)
    return fs
