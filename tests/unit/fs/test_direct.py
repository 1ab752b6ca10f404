"""Reads past the page cache: the same bytes on every file system, and the cache stays as it was."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.fs.direct import PAGE_SIZE_BYTES, DirectReader

WINDOW = 4 * PAGE_SIZE_BYTES
SHARED_MEMORY = Path("/dev/shm")
KV = os.urandom(3 * WINDOW)


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no writable tmpfs at /dev/shm on this machine")
    with TemporaryDirectory(dir=SHARED_MEMORY, prefix="kvserve-test-") as name:
        yield Path(name)


def read(reader: DirectReader, path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(bytes(window) for window in reader.windows(fd))
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "size",
    [0, 1, 511, 4095, 4096, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 5000],
)
def test_every_byte_in_order_whatever_the_size(directory: Path, size: int) -> None:
    (directory / "file").write_bytes(KV[:size])
    reader = DirectReader(PosixFileSystem(), window_size_bytes=WINDOW)
    assert read(reader, directory / "file") == KV[:size]
    assert read(reader, directory / "file") == KV[:size], "a reader is used again"


def test_holes_are_zeros(directory: Path) -> None:
    with (directory / "file").open("wb") as file:
        file.seek(2 * WINDOW)
        file.write(b"end")
    reader = DirectReader(PosixFileSystem(), window_size_bytes=WINDOW)
    assert read(reader, directory / "file") == bytes(2 * WINDOW) + b"end"


def test_only_the_last_window_is_not_whole(directory: Path) -> None:
    (directory / "file").write_bytes(KV[: 2 * WINDOW + 100])
    reader = DirectReader(PosixFileSystem(), window_size_bytes=WINDOW)
    fd = os.open(directory / "file", os.O_RDONLY)
    assert [len(window) for window in reader.windows(fd)] == [WINDOW, WINDOW, 100]
    os.close(fd)


def test_what_was_not_in_the_cache_is_not_after(tmp_path: Path) -> None:
    """A check of the whole tree must not push out what running servers keep in memory."""
    if PosixFileSystem().kind(str(tmp_path)) not in ("ext4", "xfs", "btrfs"):
        pytest.skip("tells about local disks")
    path = tmp_path / "file"
    path.write_bytes(KV)
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        reader = DirectReader(PosixFileSystem(), window_size_bytes=WINDOW)
        assert read(reader, path) == KV
        assert reader.is_direct
        assert not is_cached(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not is_cached(fd), "the test can tell"
        # And what the servers have stays there.
        assert path.read_bytes() == KV
        assert is_cached(fd)
        assert read(reader, path) == KV
        assert is_cached(fd)
    finally:
        os.close(fd)


def is_cached(fd: int) -> bool:
    """Whether the first page is; by mincore: a read, even RWF_NOWAIT, starts reading ahead."""
    with mmap.mmap(fd, PAGE_SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        resident = ctypes.c_ubyte()
        start = ctypes.c_char.from_buffer(pages)
        address = ctypes.c_void_p(ctypes.addressof(start))
        length = ctypes.c_size_t(PAGE_SIZE_BYTES)
        failed = ctypes.CDLL(None).mincore(address, length, ctypes.byref(resident))
        del start
    assert not failed
    return bool(resident.value & 1)


class Refusing(PosixFileSystem):
    """Takes O_DIRECT and then refuses such reads: what some file systems do for some files."""

    def __init__(self, code: int, *, refuses_all: bool = False) -> None:
        super().__init__()
        self.code = code
        self.refuses_all = refuses_all

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        if self.refuses_all or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise StorageUnavailable("read") from OSError(self.code, "refused")
        return super().read_into(fd, into, offset)


def test_a_file_that_refuses_is_read_through_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(KV)
    fs = Refusing(errno.EINVAL)
    reader = DirectReader(fs, window_size_bytes=WINDOW)
    assert read(reader, tmp_path / "file") == KV
    assert not reader.is_direct


def test_one_file_that_refuses_says_nothing_of_the_next(tmp_path: Path) -> None:
    if PosixFileSystem().kind(str(tmp_path)) != "ext4":
        pytest.skip("needs a file system that takes O_DIRECT")
    (tmp_path / "file").write_bytes(KV)
    fs = Refusing(errno.EINVAL)
    reader = DirectReader(fs, window_size_bytes=WINDOW)
    read(reader, tmp_path / "file")
    fs.read_into = PosixFileSystem().read_into  # type: ignore[method-assign]
    assert read(reader, tmp_path / "file") == KV
    assert reader.is_direct


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_an_error_that_is_not_about_direct_reads_is_told(tmp_path: Path, code: int) -> None:
    (tmp_path / "file").write_bytes(KV)
    reader = DirectReader(Refusing(code, refuses_all=True), window_size_bytes=WINDOW)
    with pytest.raises(StorageUnavailable):
        read(reader, tmp_path / "file")


def test_a_file_system_without_direct_reads_is_asked_once(tmp_path: Path) -> None:
    """/proc refuses O_DIRECT; what follows is not tried there again."""
    reader = DirectReader(PosixFileSystem(), window_size_bytes=WINDOW)
    assert read(reader, Path("/proc/self/cmdline"))
    assert not reader.is_direct
    (tmp_path / "file").write_bytes(KV)
    assert read(reader, tmp_path / "file") == KV
    assert not reader.is_direct
