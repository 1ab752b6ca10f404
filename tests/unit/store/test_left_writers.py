"""Writers that wait for another try are bounded, and no descriptor is lost for it."""

from pathlib import Path

import pytest

import kvserve.store.left_writers
from kvserve.store.left_writers import LeftWriters
from kvserve.store.publish import ChunkWriter
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.contract.store_tree import Tree
from tests.unit.samples import slice_of


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()


def begun(tree: Tree, index: int) -> ChunkWriter:
    writer = tree.store.writer(tree.where, index)
    writer.write_blocking(0, 0, memoryview(slice_of(0, index, 256)))
    return writer


def temp_files(root: Path) -> int:
    return sum(path.name.startswith(".") and len(path.name) > 64 for path in root.rglob("*"))


def test_beyond_the_bound_only_those_with_a_descriptor(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvserve.store.left_writers, "_WITHOUT_FILE_MAX", 1)
    tree = Tree(root, open_files_max=2, chunks=6)
    writers = [begun(tree, index) for index in range(5)]
    assert [it.holds_descriptor for it in writers] == [True, True, False, False, False]
    left = LeftWriters(tree.store.fs, tree.store._names)
    for writer in (writers[2], writers[0], writers[3], writers[1], writers[4]):
        left.add(writer)
    assert len(left) == 3
    assert caplog.text.count("is left") == 2
    left.remove_blocking()
    assert (len(left), tree.store.open_chunks.taken) == (0, 0)
    assert temp_files(root) == 2, "for the sweep after this server"


def test_one_that_cannot_be_removed_does_not_keep_the_others(
    root: Path, fs: FaultyFileSystem
) -> None:
    tree = Tree(root, fs=fs, chunks=3)
    left = LeftWriters(tree.store.fs, tree.store._names)
    for index in range(3):
        left.add(begun(tree, index))
    fs.fail(tree.where.descriptor.chunk_hashes[0].hex(), ["unlink"])
    left.remove_blocking()
    assert (len(left), temp_files(root)) == (0, 1)
    fs.heal()
    left.remove_blocking()
    assert temp_files(root) == 0, "it was remembered by its name"
