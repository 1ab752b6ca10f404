"""Setting aside moves that very file, whatever happens to its name in between."""

import os
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.store.quarantine import Quarantine, set_aside_blocking, set_aside_no_file_blocking

BAD, GOOD = b"damaged", b"a good one"


class Racing(PosixFileSystem):
    """A writer publishes a good file at `path` right before the n-th call of `verb`."""

    def __init__(self, path: Path, verb: str) -> None:
        super().__init__()
        self.path = path
        self.verb = verb

    def _race(self, verb: str) -> None:
        if verb == self.verb:
            self.verb = ""
            new = self.path.with_name("new")
            new.write_bytes(GOOD)
            new.replace(self.path)

    def is_same(self, fd: int, path: str) -> bool:
        self._race("is_same")
        return super().is_same(fd, path)

    def rename(self, source: str, target: str) -> None:
        self._race("rename")
        super().rename(source, target)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = tmp_path / "t" / "file"
    path.parent.mkdir()
    path.write_bytes(BAD)
    return path


def set_aside(fs: PosixFileSystem, root: Path, path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return set_aside_blocking(fs, str(root), str(path), fd)
    finally:
        os.close(fd)


def test_the_file_is_kept_as_evidence(tmp_path: Path, damaged: Path) -> None:
    assert set_aside(PosixFileSystem(), tmp_path, damaged)
    assert not damaged.exists()
    assert (tmp_path / ".quarantine" / "t@file").read_bytes() == BAD


@pytest.mark.parametrize("verb", ["is_same", "rename"])
def test_a_good_file_that_takes_the_name_stays(tmp_path: Path, damaged: Path, verb: str) -> None:
    """Before the check, and between the check and the move."""
    assert not set_aside(Racing(damaged, verb), tmp_path, damaged)
    assert damaged.read_bytes() == GOOD
    quarantine = tmp_path / ".quarantine"
    assert not quarantine.exists() or os.listdir(quarantine) == []


def test_a_file_that_is_gone_is_nothing_to_move(tmp_path: Path, damaged: Path) -> None:
    fd = os.open(damaged, os.O_RDONLY)
    damaged.unlink()
    assert not set_aside_blocking(PosixFileSystem(), str(tmp_path), str(damaged), fd)
    os.close(fd)


def test_a_refused_move_is_told(tmp_path: Path, damaged: Path) -> None:
    class Refusing(PosixFileSystem):
        def rename(self, source: str, target: str) -> None:
            raise StorageUnavailable("rename: EROFS")

    with pytest.raises(StorageUnavailable, match="EROFS"):
        set_aside(Refusing(), tmp_path, damaged)
    assert damaged.read_bytes() == BAD


class TestBound:
    """All files together; the oldest make room."""

    def take(self, root: Path, name: str, size_bytes: int, at: float, bound: int = 100) -> bool:
        path = root / "t" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size_bytes))
        os.utime(path, (at, at))
        fd = os.open(path, os.O_RDONLY)
        try:
            quarantine = Quarantine(PosixFileSystem(), str(root), size_bytes_max=bound)
            return quarantine.take_blocking(str(path), fd)
        finally:
            os.close(fd)

    def kept(self, root: Path) -> list[str]:
        return sorted(os.listdir(root / ".quarantine"))

    def test_the_oldest_make_room(self, tmp_path: Path) -> None:
        assert self.take(tmp_path, "b", 40, 1.0)
        self.take(tmp_path, "a", 40, 2.0)
        self.take(tmp_path, "c", 20, 3.0)
        assert self.kept(tmp_path) == ["t@a", "t@b", "t@c"], "just within the bound"
        self.take(tmp_path, "d", 1, 4.0)
        assert self.kept(tmp_path) == ["t@a", "t@c", "t@d"]

    def test_a_larger_file_is_not_kept_and_counts_as_taken(self, tmp_path: Path) -> None:
        assert self.take(tmp_path, "a", 101, 1.0)
        assert self.kept(tmp_path) == []
        assert not (tmp_path / "t" / "a").exists()

    def test_no_room_at_all(self, tmp_path: Path) -> None:
        self.take(tmp_path, "a", 1, 1.0, bound=0)
        assert self.kept(tmp_path) == []

    def test_a_refusing_file_system_costs_the_evidence_its_room_only(self, tmp_path: Path) -> None:
        class Refusing(PosixFileSystem):
            def unlink(self, path: str) -> bool:
                raise StorageUnavailable("unlink: EIO")

        path = tmp_path / "t" / "a"
        path.parent.mkdir()
        path.write_bytes(BAD)
        fd = os.open(path, os.O_RDONLY)
        quarantine = Quarantine(Refusing(), str(tmp_path), size_bytes_max=0)
        assert quarantine.take_blocking(str(path), fd)
        assert quarantine.taken == 1
        os.close(fd)


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_what_is_no_file_is_kept_beside_what_was_set_aside_before(
    tmp_path: Path, damaged: Path, kind: str
) -> None:
    fs = PosixFileSystem()
    assert set_aside(fs, tmp_path, damaged)
    for _ in range(2):
        if kind == "directory":
            damaged.mkdir()
            (damaged / "inside").write_bytes(BAD)
        else:
            damaged.symlink_to(damaged)
        assert set_aside_no_file_blocking(fs, str(tmp_path), str(damaged))
    kept = sorted(path.name for path in (tmp_path / ".quarantine").iterdir())
    assert kept == ["t@file", "t@file.1", "t@file.2"]
    if kind == "directory":
        assert (tmp_path / ".quarantine" / "t@file.2" / "inside").read_bytes() == BAD


def test_a_good_file_in_the_place_of_what_was_none_stays(tmp_path: Path, damaged: Path) -> None:
    damaged.unlink()
    damaged.symlink_to(damaged)
    assert not set_aside_no_file_blocking(Racing(damaged, "rename"), str(tmp_path), str(damaged))
    assert damaged.read_bytes() == GOOD
    assert list((tmp_path / ".quarantine").iterdir()) == []


def test_what_is_no_file_does_not_keep_the_bound_from_being_kept(tmp_path: Path) -> None:
    quarantine = Quarantine(PosixFileSystem(), str(tmp_path), size_bytes_max=10)
    kept = tmp_path / ".quarantine"
    (kept / "directory").mkdir(parents=True)
    (kept / "loop").symlink_to(kept / "loop")
    for number in range(3):
        path = tmp_path / f"file{number}"
        path.write_bytes(BAD)
        fd = os.open(path, os.O_RDONLY)
        assert quarantine.take_blocking(str(path), fd)
        os.close(fd)
    assert len([path for path in kept.iterdir() if path.is_file()]) == 1
