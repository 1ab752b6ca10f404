"""The file system seam: what the store needs of a tree of files, and nothing else."""

from kvserve.fs.base import REFUSED, Entry, FileStat, FileSystem
from kvserve.fs.detect import open_file_system_blocking
from kvserve.fs.posix import PosixFileSystem

__all__ = [
    "REFUSED",
    "Entry",
    "FileStat",
    "FileSystem",
    "PosixFileSystem",
    "open_file_system_blocking",
]
