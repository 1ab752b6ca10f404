"""Setting aside moves that very file, whatever happens to its name in between."""

import os
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.store.quarantine import set_aside_blocking

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
