"""A descriptor that went bad under a reader (evicted client, lost mount) is replaced once."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.open_chunks import OpenChunk
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.contract.file_system_contract import run_together
from tests.contract.store_tree import SIZES, Tree
from tests.descriptors import open_files
from tests.unit.samples import slice_of


class EvictedFileSystem(FaultyFileSystem):
    """Reads through a descriptor in `broken` fail, as after an eviction: for ever."""

    def __init__(self, errno_name: str = "ESHUTDOWN") -> None:
        super().__init__()
        self.errno_name = errno_name
        self.broken: set[int] = set()

    def evict(self) -> None:
        """Everything that is open now stays broken."""
        self.broken = set(range(3, 1024))

    def open_read(self, path: str) -> int | None:
        fd = super().open_read(path)
        if fd is not None:
            self.broken.discard(fd)
        return fd

    def read_into(self, fd: int, into: memoryview, offset: int) -> int:
        if fd in self.broken:
            raise StorageUnavailable(f"read {fd}: {self.errno_name}")
        return super().read_into(fd, into, offset)

    def read_parts(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        if fd in self.broken:
            raise StorageUnavailable(f"read {fd}: {self.errno_name}")
        return super().read_parts(fd, parts, offset)

    def read_cached(self, fd: int, into: memoryview, offset: int) -> int | None:
        return None if fd in self.broken else super().read_cached(fd, into, offset)


@pytest.fixture
def fs() -> EvictedFileSystem:
    return EvictedFileSystem()


@pytest.fixture
def tree(root: Path, fs: EvictedFileSystem) -> Tree:
    tree = Tree(root, fs=fs)
    tree.put(0, 1)
    return tree


def read_all(tree: Tree, chunk: OpenChunk) -> list[bytes | Verdict]:
    return [tree.read_open(chunk, layer) for layer in range(len(SIZES))]


WHOLE = [slice_of(layer, 0, size) for layer, size in enumerate(SIZES)]


@pytest.mark.parametrize("errno_name", ["ESTALE", "ESHUTDOWN", "ENOTCONN", "EIO"])
def test_a_reader_goes_on_with_a_new_descriptor(root: Path, errno_name: str) -> None:
    fs = EvictedFileSystem(errno_name)
    tree = Tree(root, fs=fs)
    tree.put(0)
    before = open_files()
    chunk = tree.opened(0)
    fs.evict()
    assert read_all(tree, chunk) == WHOLE
    assert tree.store.open_chunks.taken == 2, "the broken one may still be in use by another thread"
    assert tree.store.open_chunks.acquire(chunk.path) is chunk, "the next reader gets it, mended"
    tree.store.open_chunks.release(chunk)
    tree.store.open_chunks.release(chunk)
    tree.store.open_chunks.close_idle_blocking()
    assert open_files() == before
    assert tree.store.open_chunks.taken == 0


def test_many_readers_share_the_new_descriptor(tree: Tree, fs: EvictedFileSystem) -> None:
    before = open_files()
    chunk = tree.opened(0)
    fs.evict()
    barrier = threading.Barrier(8)
    read: list[list[bytes | Verdict]] = []

    def run() -> None:
        barrier.wait()
        read.append(read_all(tree, chunk))

    run_together([run] * 8)
    assert read == [WHOLE] * 8
    assert tree.store.open_chunks.taken == 2
    tree.store.open_chunks.release(chunk)
    tree.store.open_chunks.close_idle_blocking()
    assert open_files() == before


def test_the_second_time_it_is_a_miss_and_the_next_reader_opens_anew(
    tree: Tree, fs: EvictedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserve.store.failing._FAILING_S", 0.0)
    before = open_files()
    chunk = tree.opened(0)
    for _ in range(2):
        fs.evict()
        last = tree.read_open(chunk, 0)
    assert isinstance(last, Verdict)
    assert last.status is ChunkStatus.MISS_ERROR
    assert "ESHUTDOWN" in last.message
    tree.store.open_chunks.release(chunk)
    assert tree.is_whole(0)
    tree.store.open_chunks.close_idle_blocking()
    assert open_files() == before


@pytest.mark.parametrize("what", ["gone", "another chunk", "cut short", "other bytes"])
def test_a_name_that_stands_for_something_else_by_now_is_a_miss(
    tree: Tree, fs: EvictedFileSystem, what: str
) -> None:
    before = open_files()
    chunk = tree.opened(0)
    if what == "gone":
        tree.file(0).unlink()
    elif what == "another chunk":
        tree.file(1).replace(tree.file(0))
    else:
        whole = bytearray(tree.file(0).read_bytes())
        tree.file(0).unlink()
        tree.file(0).write_bytes(whole[:100])
        if what == "other bytes":  # a second writer's, whole
            sums = [number + 1 for number in tree.sums(0)]
            chunk_hash = tree.descriptor.chunk_hashes[0]
            whole[:4096] = tree.where.geometry.encode_header(chunk_hash, sums)
            tree.file(0).write_bytes(whole)
    fs.evict()
    found = tree.read_open(chunk, 0)
    assert isinstance(found, Verdict)
    assert found.status is ChunkStatus.MISS_ERROR
    tree.store.open_chunks.release(chunk)
    tree.store.open_chunks.close_idle_blocking()
    assert open_files() == before
    assert tree.store.open_chunks.taken == 0
    assert tree.quarantined() == []


def test_no_room_for_a_second_descriptor_is_a_miss(root: Path) -> None:
    fs = EvictedFileSystem()
    tree = Tree(root, fs=fs, open_files_max=1)
    tree.put(0)
    before = open_files()
    chunk = tree.opened(0)
    fs.evict()
    assert isinstance(tree.read_open(chunk, 0), Verdict)
    tree.store.open_chunks.release(chunk)
    tree.store.open_chunks.close_idle_blocking()
    assert open_files() == before
    assert tree.store.open_chunks.taken == 0
