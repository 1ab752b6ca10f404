"""The file system seam: what the store needs of a tree of files, and nothing else."""

from kvserve.fs.base import Entry, FileInfo, FileSystem
from kvserve.fs.posix import PosixFileSystem

__all__ = ["Entry", "FileInfo", "FileSystem", "PosixFileSystem"]
