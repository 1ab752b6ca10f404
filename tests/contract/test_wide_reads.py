"""Several slices of a chunk in one read, wherever they land."""

from pathlib import Path

import pytest

from kvserve.model import ChunkStatus, Verdict
from kvserve.testing.faulty_fs import READING, FaultyFileSystem
from tests.contract.store_tree import SIZES, Tree
from tests.unit.samples import slice_of


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem(verbs=READING)


@pytest.fixture
def tree(root: Path, fs: FaultyFileSystem) -> Tree:
    tree = Tree(root, fs=fs)
    tree.put(0)
    return tree


def read(tree: Tree, layers: list[int]) -> tuple[list[bytes], Verdict | None]:
    chunk = tree.opened(0)
    buffers = [bytearray(SIZES[layer]) for layer in layers]
    pieces = [(layer, 0, memoryview(it)) for layer, it in zip(layers, buffers, strict=True)]
    fault = tree.store.read_blocking(chunk, pieces)
    tree.store.open_chunks.release(chunk)
    return [bytes(it) for it in buffers], fault


@pytest.mark.parametrize(("layers", "reads"), [([0, 1, 2], 1), ([2, 0, 1], 1), ([0, 2], 2)])
def test_neighbours_are_one_call(
    tree: Tree, fs: FaultyFileSystem, layers: list[int], reads: int
) -> None:
    """In any order, over the padding between slices; but a layer nobody asked for is not read."""
    tree.store.open_chunks.release(tree.opened(0))
    before = fs.calls.count("read_into")
    found, fault = read(tree, layers)
    assert fault is None
    assert found == [slice_of(layer, 0, SIZES[layer]) for layer in layers]
    assert fs.calls.count("read_into") - before == reads


def test_the_layer_that_is_cut_short_is_named(tree: Tree) -> None:
    chunk = tree.opened(0)
    with tree.file(0).open("r+b") as file:
        file.truncate(chunk.offsets[1] + 1)
    tree.store.open_chunks.release(chunk)
    _, fault = read(tree, [0, 1, 2])
    assert fault == Verdict(ChunkStatus.MISS_CORRUPT, "layer 1 is cut short")
