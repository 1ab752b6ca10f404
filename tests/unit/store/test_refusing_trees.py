"""Trees that are full, gone, or refuse to forget: what a server does about each by itself."""

import logging
from pathlib import Path
from random import Random

import pytest

from kvserve.errors import StorageError, StorageFull, StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import SERVERS_DIR, TempNames
from kvserve.store.temp_file import remove_left_blocking, remove_temp_blocking
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.contract.store_tree import Tree


class Full(PosixFileSystem):
    """No byte and, with `has_inodes` off, no file more."""

    is_full = True
    has_inodes = True

    def create(self, path: str) -> int | None:
        if self.is_full and not self.has_inodes:
            raise StorageFull("create: ENOSPC")
        return super().create(path)

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        if self.is_full:
            raise StorageFull("write: ENOSPC")
        super().write_all(fd, data, offset)


@pytest.mark.parametrize("has_inodes", [True, False])
def test_a_claim_on_a_full_tree(tmp_path: Path, *, has_inodes: bool) -> None:
    """Taken as far as it can be, and shown as soon as there is room."""
    fs = Full()
    fs.has_inodes = has_inodes
    owner = Owner(fs, str(tmp_path), Random(1), lease_s=60)
    owner.claim_blocking()
    assert owner.tag
    assert owner.lives_blocking(owner.tag)
    with pytest.raises(StorageFull):
        owner.beat_blocking()
    fs.is_full = False
    owner.beat_blocking()
    assert [it.name for it in (tmp_path / SERVERS_DIR).iterdir()] == [owner.tag]


def test_a_claim_whose_tree_is_gone(tmp_path: Path) -> None:
    """An error of the file system, which upkeep tries again; not the end of showing it."""
    owner = Owner(PosixFileSystem(), str(tmp_path), Random(1), lease_s=60)
    owner.claim_blocking()
    (tmp_path / SERVERS_DIR).rename(tmp_path / "elsewhere")
    with pytest.raises(StorageUnavailable, match="still mounted"):
        owner.beat_blocking()
    (tmp_path / "elsewhere").rename(tmp_path / SERVERS_DIR)
    owner.beat_blocking()


def test_a_root_without_space_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(tmp_path / "kv", fs=Full())
    with caplog.at_level(logging.WARNING):
        tree.store.check_root_blocking()
    assert f"the root {tmp_path / 'kv'} is full" in caplog.text
    assert tree.files() == []


def test_nothing_is_stored_below_a_mount_that_is_gone(tmp_path: Path) -> None:
    """The root's own mark tells the tree from the empty directory under it."""
    tree = Tree(tmp_path / "kv")
    Owner(tree.store.fs, str(tree.root), Random(1), lease_s=60).claim_blocking()
    tree.store.check_root_blocking()
    key = tree.where.descriptor.key(0)
    tree.store.ensure_namespace_blocking(key)
    tree.root.rename(tree.root.with_name("unmounted"))
    tree.root.mkdir()
    with pytest.raises(StorageUnavailable, match="still mounted"):
        tree.store.ensure_namespace_blocking(key)
    assert list(tree.root.iterdir()) == []
    tree.root.rmdir()
    tree.root.with_name("unmounted").rename(tree.root)
    tree.store.ensure_namespace_blocking(key)


def test_what_could_not_be_removed_is_tried_again(tmp_path: Path) -> None:
    fs = FaultyFileSystem(1, verbs=frozenset(["unlink"]))
    names = TempNames("aB3", Random(1))
    temp = names.beside(f"{tmp_path}/{'ab' * 16}")
    Path(temp).touch()
    with pytest.raises(StorageError):
        remove_temp_blocking(fs, names, temp)
    assert Path(temp).exists()
    remove_left_blocking(fs, names)
    assert not Path(temp).exists()
    assert names.left == set()
