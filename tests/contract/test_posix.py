"""The real file system keeps the contract, and translates every errno."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvserve.errors import Overloaded, QuotaExceeded, StorageFull, StorageUnavailable
from kvserve.fs import FileSystem, PosixFileSystem
from kvserve.testing.faulty_fs import CHANGING, READING, FaultyFileSystem
from kvserve.testing.slow_fs import SlowFileSystem
from tests.contract.file_system_contract import KV, FileSystemContract

SHARED_MEMORY = Path("/dev/shm")


class OnDisk(FileSystemContract):
    @pytest.fixture
    def fs(self) -> FileSystem:
        return PosixFileSystem()

    def put(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def get(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if Path(path).exists() else None


class TestPosix(OnDisk):
    @pytest.fixture
    def tree(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestFaulty(OnDisk):
    """The test double keeps the contract as long as its faults are for other paths."""

    @pytest.fixture
    def fs(self) -> FileSystem:
        fs = FaultyFileSystem()
        fs.hang("another-path", READING | CHANGING)
        fs.fail("another-path", READING | CHANGING)
        return fs

    @pytest.fixture
    def tree(self, tmp_path: Path) -> str:
        return str(tmp_path)


@pytest.mark.skipif(
    not os.access(SHARED_MEMORY, os.W_OK), reason="no writable tmpfs at /dev/shm on this machine"
)
class TestSlow(OnDisk):
    @pytest.fixture
    def fs(self) -> FileSystem:
        return SlowFileSystem(0.0001)

    @pytest.fixture
    def tree(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestPosixInMemory(OnDisk):
    """tmpfs refuses RWF_NOWAIT and never waits for a device."""

    @pytest.fixture
    def tree(self) -> Iterator[str]:
        with TemporaryDirectory(dir=SHARED_MEMORY, prefix="kvserve-test-") as directory:
            yield directory

    def test_read_cached_always_reads(self, fs: FileSystem, tree: str) -> None:
        if fs.kind(tree) != "tmpfs":
            pytest.skip("/dev/shm is no tmpfs here")
        self.put(f"{tree}/file", KV)
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        for _ in range(2):
            buffer = bytearray(100)
            assert fs.read_cached(fd, memoryview(buffer), 7) == 100
            assert buffer == KV[7:107]
        fs.close(fd)


def test_kind_of_proc_is_a_number() -> None:
    """A file system that is not in the table."""
    assert PosixFileSystem().kind("/proc") == "0x00009fa0"


class TestErrors:
    fs = PosixFileSystem()

    def test_no_space_is_storage_full(self) -> None:
        """B3: real ENOSPC, from the device that is always full."""
        fd = self.fs.open_write("/dev/full")
        with pytest.raises(StorageFull, match=r"write \d+: ENOSPC \(No space left on device\)"):
            self.fs.write_all(fd, b"kv", 0)
        self.fs.close(fd)

    def test_out_of_descriptors_is_overloaded(self, tmp_path: Path) -> None:
        """Retryable, and it says what ran out."""
        (tmp_path / "file").write_bytes(KV)
        probe = os.open("/dev/null", os.O_RDONLY)
        os.close(probe)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
        try:
            with pytest.raises(Overloaded, match=r"out of file descriptors: open .*EMFILE") as one:
                self.fs.open_read(str(tmp_path / "file"))
            with pytest.raises(Overloaded, match=r"out of file descriptors: create .*EMFILE"):
                self.fs.create(str(tmp_path / "new"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert one.value.retryable
        assert one.value.retry_after_s > 0

    def test_a_short_write_is_never_counted_as_done(self, tmp_path: Path) -> None:
        """B3: the system takes the first half and refuses the rest (here: a limit on file size)."""
        fd = self.fs.create(str(tmp_path / "file"))
        assert fd is not None
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(StorageUnavailable, match=r"write \d+: EFBIG"):
                self.fs.write_all(fd, bytes(2 << 20), 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.fs.close(fd)
        assert (tmp_path / "file").stat().st_size == 1 << 20, "it was short, else no test of it"

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        fd = self.fs.open_read(str(tmp_path))
        assert fd is not None
        with pytest.raises(StorageUnavailable, match=r"read \d+: EISDIR"):
            self.fs.read_into(fd, memoryview(bytearray(1)), 0)
        self.fs.close(fd)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
    def test_no_permission_names_the_path_and_errno(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(StorageUnavailable, match=rf"create {tmp_path}/new: EACCES"):
            self.fs.create(str(tmp_path / "new"))

    def test_a_name_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable, match="ENAMETOOLONG"):
            self.fs.open_read(str(tmp_path / ("x" * 300)))

    def test_the_cause_is_kept(self, tmp_path: Path) -> None:
        with pytest.raises(StorageUnavailable) as caught:
            self.fs.open_write(str(tmp_path / "absent"))
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.ENOENT


def test_files_are_not_for_the_whole_world(tmp_path: Path) -> None:
    """KV is made of users' prompts."""
    fs = PosixFileSystem()
    old = os.umask(0)
    try:
        fs.make_dirs(str(tmp_path / "a" / "b"))
        fd = fs.create(str(tmp_path / "a" / "b" / "file"))
    finally:
        os.umask(old)
    assert fd is not None
    fs.close(fd)
    assert (tmp_path / "a" / "b" / "file").stat().st_mode & 0o007 == 0
    assert (tmp_path / "a" / "b").stat().st_mode & 0o007 == 0


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """Engines and servers start other programs."""
    fs = PosixFileSystem()
    fd = fs.create(str(tmp_path / "file"))
    again = fs.open_read(str(tmp_path / "file"))
    assert fd is not None
    assert again is not None
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(again)
    fs.close(fd)
    fs.close(again)


@pytest.mark.parametrize(("fails", "opens"), [(1, True), (2, False)])
def test_a_stale_open_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, opens: bool
) -> None:
    """ESTALE: a directory on the way was replaced by another client."""
    (tmp_path / "file").write_bytes(KV)
    real_open, calls = os.open, []

    def stale_open(path: str, flags: int, *more: int) -> int:
        calls.append(path)
        if len(calls) <= fails:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real_open(path, flags, *more)

    monkeypatch.setattr("kvserve.fs.posix.os.open", stale_open)
    fs = PosixFileSystem()
    if opens:
        fd = fs.open_read(str(tmp_path / "file"))
        assert fd is not None
        fs.close(fd)
    else:
        with pytest.raises(StorageUnavailable, match=r"open .*: ESTALE"):
            fs.open_read(str(tmp_path / "file"))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StorageFull), (errno.EDQUOT, QuotaExceeded)]
)
def test_no_space_and_no_quota_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StorageFull]
) -> None:
    """The first may pass with the next file, the second does not."""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("kvserve.fs.posix.os.open", refuse)
    with pytest.raises(StorageFull) as caught:
        PosixFileSystem().create(str(tmp_path / "file"))
    assert type(caught.value) is kind


def test_scan_tells_what_one_must_not_open(tmp_path: Path) -> None:
    """Opening a FIFO waits for ever; a link to nothing has nothing to open; others are followed."""
    (tmp_path / "real").write_bytes(KV)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "up").symlink_to(tmp_path)
    kinds = {entry.name: entry.kind for entry in PosixFileSystem().scan(str(tmp_path))}
    assert kinds == {
        "real": "file",
        "fifo": "other",
        "dangling": "other",
        "circle": "other",
        "link": "file",
        "up": "directory",
    }
