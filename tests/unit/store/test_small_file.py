"""Small files: whole or the old one, bounded, and what is in the way is said."""

from pathlib import Path

import pytest

from kvserve.errors import StorageError, StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.store.small_file import read_small_blocking, replace_small_blocking
from kvserve.testing.faulty_fs import CHANGING, FaultyFileSystem

FS = PosixFileSystem()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "made" / "file")
    assert read_small_blocking(FS, path, 100) is None
    for data in (b"one", b"", b"other"):
        replace_small_blocking(FS, path, data, temp=f"{path}.new")
        assert read_small_blocking(FS, path, 100) == data
    assert [it.name for it in (tmp_path / "made").iterdir()] == ["file"]


def test_a_file_that_is_too_large_is_longer_than_the_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    assert read_small_blocking(FS, str(tmp_path / "file"), 1000) == bytes(1000)
    assert read_small_blocking(FS, str(tmp_path / "file"), 10) == bytes(11)


@pytest.mark.parametrize("is_synced", [False, True])
def test_every_call_fails_once(tmp_path: Path, is_synced: bool) -> None:
    """The old file or the new one; the next try works, whatever was left."""
    path = str(tmp_path / "file")
    for fails_at in range(1, 20):
        replace_small_blocking(FS, path, b"old", temp=f"{path}.new")
        fs = FaultyFileSystem(fails_at, verbs=CHANGING)
        try:
            replace_small_blocking(fs, path, b"new", temp=f"{path}.new", is_synced=is_synced)
        except StorageError:
            assert read_small_blocking(FS, path, 100) == b"old"
        if not fs.has_failed:
            assert ("sync" in fs.calls) == is_synced
            assert fails_at > 5
            return
    raise AssertionError("the sweep did not end")


def test_a_temporary_name_that_comes_back_is_said(tmp_path: Path) -> None:
    class Racing(PosixFileSystem):
        def unlink(self, path: str) -> bool:
            return False

    (tmp_path / "file.new").write_bytes(b"")
    path = str(tmp_path / "file")
    with pytest.raises(StorageUnavailable, match=r"file\.new is another's"):
        replace_small_blocking(Racing(), path, b"x", temp=f"{path}.new")
