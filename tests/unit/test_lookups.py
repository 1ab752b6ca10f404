"""Leases and pins on a mount that hangs: late answers in time, and no lease left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs.threads import FsThreads
from kvserve.lookups import Lookups
from kvserve.model import ChunkStatus
from kvserve.open_tree import OpenTree
from kvserve.storage_health import StorageHealth
from kvserve.store.locations import ChunkLocations
from kvserve.store.paths import LEASES_DIR
from kvserve.testing.faulty_fs import FaultyFileSystem
from kvserve.transfer.long_steps import LongSteps
from tests.trees import tree_on
from tests.unit.samples import HYBRID, descriptor_of, slice_of

OWNER = ("default", "request")
HIT, TIMEOUT = ChunkStatus.HIT, ChunkStatus.MISS_TIMEOUT


@pytest.fixture
def fs() -> Iterator[FaultyFileSystem]:
    fs = FaultyFileSystem()
    yield fs
    fs.heal()


@pytest.fixture
def tree(fs: FaultyFileSystem, tmp_path: Path) -> OpenTree:
    return tree_on(tmp_path / "kv", fs, store={"known_ttl_s": 0.0})


@pytest.fixture
def where(tree: OpenTree) -> ChunkLocations:
    """Three chunks, stored."""
    where = tree.store.locate(descriptor_of(3, HYBRID))
    for index in range(3):
        writer = tree.store.writer(where, index)
        for layer, size in enumerate(HYBRID.slice_sizes):
            writer.write_blocking(layer, 0, memoryview(slice_of(layer, index, size)))
        writer.commit_blocking([0] * len(HYBRID.slice_sizes))
    return where


@pytest.fixture
def lookups(tree: OpenTree, fs: FaultyFileSystem) -> Iterator[Lookups]:
    threads, steps = FsThreads(4, timeout_s=0.2), LongSteps()
    yield Lookups(tree, threads, steps, StorageHealth())
    fs.heal()
    steps.close()
    threads.shutdown()


async def test_a_leased_chunk_that_hangs_is_a_late_miss(
    lookups: Lookups, tree: OpenTree, where: ChunkLocations, fs: FaultyFileSystem
) -> None:
    fs.hang(where.path(1), ["stat"])
    verdicts, leased = await lookups.lease(where, OWNER, 60)
    assert [it.status for it in verdicts] == [HIT, TIMEOUT, HIT]
    assert leased == 2
    assert tree.exchange.leases.chunks == 2
    await lookups.lease(where, OWNER, 60)
    assert fs.attempts("stat", where.path(1)) == 2, "the put's, and the one that hangs"


async def test_a_lease_that_cannot_be_told_is_none(
    lookups: Lookups, tree: OpenTree, where: ChunkLocations, fs: FaultyFileSystem
) -> None:
    fs.hang(f"/{LEASES_DIR}", ["create", "write_all", "make_dirs"])
    with pytest.raises(StorageUnavailable, match="did not end within"):
        await lookups.lease(where, OWNER, 60)
    assert tree.exchange.leases.chunks == 0


async def test_a_pin_that_hangs_fails(
    lookups: Lookups, where: ChunkLocations, fs: FaultyFileSystem
) -> None:
    fs.hang(where.path(2), ["mark"])
    with pytest.raises(StorageUnavailable, match="did not end within"):
        await lookups.pin(where, is_pinned=True)


def test_a_file_that_no_thread_could_remove_goes_with_a_later_beat(
    tree: OpenTree, where: ChunkLocations
) -> None:
    other = tree.store.locate(descriptor_of(1, HYBRID))
    writer = tree.store.writer(other, 0)
    writer.write_blocking(0, 0, memoryview(slice_of(0, 0, HYBRID.slice_sizes[0])))
    tree.store.left_writers.add(writer)
    assert writer.is_open
    tree.store.left_writers.remove_blocking()
    assert not writer.is_open
    assert tree.store.open_chunks.taken == 0
