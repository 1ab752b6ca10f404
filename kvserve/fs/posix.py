"""The real file system, by the calls of `os`; the only place where `OSError` is translated."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvserve.errors import Overloaded, QuotaExceeded, StorageFull, StorageUnavailable
from kvserve.fs.base import Entry, FileStat

_MODE = 0o640

# IOV_MAX of Linux: more parts in one call are EINVAL.
_PARTS_MAX = 1024

# More than a chunk has parents.
_MKDIR_TRIES = 64

# A link that leads to itself is no file either.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}

# What people can do about it, where that is not obvious.
_ADVICE = {
    errno.EISDIR: "a directory in the place of a file: move it away, or run kvserve fsck --repair",
}

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
        advice = _ADVICE.get(error.errno or 0, error.strerror)
        message = f"{verb} {path}: {name} ({advice})"
        if error.errno == errno.EDQUOT:
            raise QuotaExceeded(message) from error
        if error.errno == errno.ENOSPC:
            raise StorageFull(message) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Overloaded(f"out of file descriptors: {message}", retry_after_s=1.0) from error
        raise StorageUnavailable(message) from error


class _IfThere:
    """The rest of the block is left out if there is no such file."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, OSError) and error.errno in _NO_FILE


_IF_THERE = _IfThere()


class PosixFileSystem:
    """Implements `FileSystem` on the tree that the kernel shows."""

    full_retries = 0

    def __init__(self) -> None:
        # One tree is one file system: what its first file shows goes for all.
        self._is_in_memory: bool | None = None
        self._refuses_nowait = False

    def open_read(self, path: str) -> int | None:
        with _translated("open", path):
            fd = None
            with _IF_THERE:
                fd = _open_fresh(path)
        if fd is None:
            return None
        if self._is_in_memory is None:
            # Here and not in `read_cached`: on a hung mount statfs waits, and the loop with it.
            self._is_in_memory = self._shows_memory(fd)
        return fd

    def create(self, path: str) -> int | None:
        with _translated("create", path):
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
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
            return _read_all(fd, (into,), offset)

    def read_parts(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        with _translated("read", fd):
            return _read_all(fd, parts, offset)

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        if self._refuses_nowait:
            return None
        try:
            return os.preadv(fd, (into,), offset, 0 if self._is_in_memory else os.RWF_NOWAIT)
        except OSError as error:
            # Whatever it is, the waiting read meets it again and reports it.
            self._refuses_nowait = error.errno == errno.EOPNOTSUPP
            return None

    @staticmethod
    def _shows_memory(fd: int) -> bool:
        try:
            return _fd_kind(fd) in _MEMORY_KINDS
        except OSError:
            return False

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

    def stat(self, path: str) -> FileStat | None:
        with _translated("stat", path), _IF_THERE:
            return _file_stat(os.stat(path))
        return None

    def stat_open(self, fd: int) -> FileStat:
        with _translated("stat", fd):
            return _file_stat(os.fstat(fd))

    def touch(self, path: str, at: float) -> bool:
        with _translated("touch", path), _IF_THERE:
            os.utime(path, (at, at))
            return True
        return False

    def mark(self, path: str, *, is_marked: bool) -> bool:
        with _translated("chmod", path), _IF_THERE:
            os.chmod(path, _MODE | stat.S_IXUSR if is_marked else _MODE)
            return True
        return False

    def is_same(self, fd: int, path: str) -> bool:
        with _translated("stat", path), _IF_THERE:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        return False

    def rename(self, source: str, target: str) -> None:
        with _translated("rename", source):
            try:
                os.rename(source, target)
            except IsADirectoryError:
                with _translated("rename to", target):
                    raise

    def unlink(self, path: str) -> bool:
        with _translated("unlink", path), _IF_THERE:
            os.unlink(path)
            return True
        return False

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
                    # By `stat`: a dead mount then says so itself, `isdir` would only say no.
                    if not stat.S_ISDIR(os.stat(missing[-1]).st_mode):
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

    def kind(self, path: str) -> str:
        with _translated("statfs", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _fd_kind(fd)
            finally:
                os.close(fd)


def _read_all(fd: int, into: Iterable[memoryview], offset: int) -> int:
    parts = [part for part in into if part]
    done = 0
    while parts:
        got = os.preadv(fd, parts[:_PARTS_MAX], offset + done)
        # A short read is the end of the file or an interruption: asking again tells.
        if not got:
            break
        done += got
        whole = 0
        while whole < len(parts) and got >= len(parts[whole]):
            got -= len(parts[whole])
            whole += 1
        del parts[:whole]
        if got:
            parts[0] = parts[0][got:]
    return done


def _file_stat(found: os.stat_result) -> FileStat:
    is_marked = bool(found.st_mode & stat.S_IXUSR)
    return FileStat(found.st_size, found.st_blocks * 512, found.st_mtime, is_marked)


def _open_fresh(path: str) -> int:
    # Not blocking: the open of a FIFO would wait for a writer that never comes. Regular files do
    # not know the difference; reads from here on are to wait.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # A directory on the way was replaced elsewhere: the system has dropped what it knew of it.
        fd = os.open(path, flags)
    os.set_blocking(fd, True)
    return fd


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
