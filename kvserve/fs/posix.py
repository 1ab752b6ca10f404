"""The real file system, by the calls of `os`; the only place where `OSError` is translated."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvserve.errors import Overloaded, StorageFull, StorageUnavailable
from kvserve.fs.base import Entry, FileInfo

# More than a chunk has parents.
_MKDIR_TRIES = 64

# f_type of statfs(2); linux/magic.h, and Lustre's own.
_KINDS = {
    0x0BD00BD0: "lustre",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x00C36400: "ceph",
    0x2FC12FC1: "zfs",
}
# Reads from these never wait for a device, and they refuse RWF_NOWAIT.
_MEMORY_KINDS = {"tmpfs"}


@contextmanager
def _translated(verb: str, path: str | int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        message = f"{verb} {path}: {name} ({error.strerror})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(message) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Overloaded(f"out of file descriptors: {message}", retry_after_s=1.0) from error
        raise StorageUnavailable(message) from error


class PosixFileSystem:
    """Implements `FileSystem` on the tree that the kernel shows."""

    def __init__(self) -> None:
        self._cached_flags = os.RWF_NOWAIT

    def open_read(self, path: str) -> int | None:
        with _translated("open", path):
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, path: str) -> int | None:
        with _translated("create", path):
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            except FileNotFoundError:
                return None
            except FileExistsError:
                pass
        raise FileExistsError(path)

    def open_write(self, path: str) -> int:
        with _translated("open for writing", path):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        with _translated("close", fd):
            os.close(fd)

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        with _translated("read", fd):
            done = 0
            # A short read is the end of the file or an interruption: asking again tells.
            while done < len(into):
                got = os.preadv(fd, (into[done:],), offset + done)
                if not got:
                    break
                done += got
            return done

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        try:
            return os.preadv(fd, (into,), offset, self._cached_flags)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not self._cached_flags:
                return None  # the waiting read meets the same error and reports it
        if not self._is_in_memory(fd):
            return None
        # From now on without the flag: one tree is one file system.
        self._cached_flags = 0
        return self.read_cached(fd, into, offset)

    @staticmethod
    def _is_in_memory(fd: int) -> bool:
        with _translated("statfs", fd):
            return _fd_kind(fd) in _MEMORY_KINDS

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        with _translated("write", fd):
            view = memoryview(data)
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        with _translated("fsync", fd):
            os.fsync(fd)

    def sync_dir(self, path: str) -> None:
        with _translated("fsync", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def size(self, path: str) -> int | None:
        with _translated("stat", path):
            try:
                return os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def is_same(self, fd: int, path: str) -> bool:
        with _translated("stat", path):
            try:
                return os.path.samestat(os.fstat(fd), os.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                return False

    def modified_at(self, path: str) -> float | None:
        with _translated("stat", path):
            try:
                return os.stat(path).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None

    def rename(self, source: str, target: str) -> None:
        with _translated("rename", source):
            os.rename(source, target)

    def unlink(self, path: str) -> bool:
        with _translated("unlink", path):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def make_dirs(self, path: str) -> list[str]:
        made: list[str] = []
        missing = [path]
        tries = 0
        with _translated("mkdir", path):
            while missing:
                try:
                    os.mkdir(missing[-1], 0o750)
                    made.append(missing.pop())
                except FileExistsError:
                    if not os.path.isdir(missing[-1]):
                        raise
                    missing.pop()
                except FileNotFoundError:
                    # The parent is missing, or was until now, or (/proc) the name is refused.
                    tries += 1
                    if tries > _MKDIR_TRIES:
                        raise
                    parent = os.path.dirname(missing[-1])
                    if not os.path.isdir(parent):
                        missing.append(parent)
        return made

    def list_dir(self, path: str) -> list[str]:
        with _translated("list", path):
            try:
                return os.listdir(path)
            except FileNotFoundError:
                return []

    def scan(self, path: str) -> Iterator[Entry]:
        with _translated("list", path):
            try:
                listing = os.scandir(path)
            except FileNotFoundError:
                return
            with listing:
                for entry in listing:
                    yield _entry(entry)

    def info(self, path: str) -> FileInfo | None:
        with _translated("stat", path):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return FileInfo(found.st_size, found.st_blocks * 512, found.st_mtime)

    def kind(self, path: str) -> str:
        with _translated("statfs", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _fd_kind(fd)
            finally:
                os.close(fd)


def _entry(entry: os.DirEntry[str]) -> Entry:
    try:
        if entry.is_dir():
            return Entry(entry.name, "directory")
        if entry.is_file():
            return Entry(entry.name, "file")
    except OSError:
        pass  # a link that leads nowhere: ELOOP, EACCES
    return Entry(entry.name, "other")


def _fd_kind(fd: int) -> str:
    # Python's statvfs has no f_type. It is the first word of struct statfs on every Linux port.
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(fd, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    f_type = ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF
    return _KINDS.get(f_type, f"0x{f_type:08x}")
