"""Open files are shared, bounded and given back; nobody loses the bytes he is reading."""

import os
from pathlib import Path

import pytest

from kvserve.format.chunk_file import ChunkGeometry, checksum
from kvserve.fs import PosixFileSystem
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.open_chunks import OpenChunk, OpenChunks
from tests.descriptors import open_files
from tests.unit.samples import SMALL, descriptor_of, slice_of

DESCRIPTOR = descriptor_of(chunks=8)
GEOMETRY = ChunkGeometry(DESCRIPTOR.key(0))


def chunk_file(chunk_index: int) -> bytes:
    slices = [slice_of(layer, chunk_index, size) for layer, size in enumerate(SMALL.slice_sizes)]
    header = GEOMETRY.encode_header(
        DESCRIPTOR.chunk_hashes[chunk_index], [checksum(data) for data in slices]
    )
    whole = bytearray(header.ljust(GEOMETRY.file_size_bytes, b"\0"))
    for offset, data in zip(GEOMETRY.slice_offsets, slices, strict=True):
        whole[offset : offset + len(data)] = data
    return bytes(whole)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for index in range(8):
        (tmp_path / str(index)).write_bytes(chunk_file(index))
    return tmp_path


class Cache:
    """`OpenChunks` with a budget, over `tree`."""

    def __init__(self, tree: Path, limit: int) -> None:
        self.tree = tree
        self.chunks = OpenChunks(PosixFileSystem(), limit)
        self.rejected: list[str] = []

    @property
    def taken(self) -> int:
        return self.chunks.taken

    def reject(self, path: str, fd: int) -> None:
        os.fstat(fd)  # still open
        self.rejected.append(path)

    def path(self, index: int) -> str:
        return str(self.tree / str(index))

    def acquire(self, index: int) -> OpenChunk:
        found = self.chunks.acquire_blocking(
            self.path(index),
            GEOMETRY,
            DESCRIPTOR.chunk_hashes[index],
            reject_blocking=self.reject,
        )
        assert isinstance(found, OpenChunk), found
        return found


def first_layer(chunk: OpenChunk) -> bytes:
    assert chunk.fd is not None
    return os.pread(chunk.fd, SMALL.slice_sizes[0], chunk.offsets[0])


class TestCache:
    def test_the_next_reader_gets_the_same_open_file(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        one = cache.acquire(0)
        assert cache.acquire(0) is one
        assert cache.chunks.acquire(cache.path(0)) is one
        assert cache.taken == 1
        for _ in range(3):
            cache.chunks.release(one)
        assert repr(cache.chunks) == "<OpenChunks 1 files of 8, 1 open, 1 idle>"
        assert cache.chunks.acquire(cache.path(0)) is one, "idle entries stay"
        cache.chunks.release(one)
        cache.chunks.close_idle_blocking()

    def test_checksums_and_offsets_come_from_the_header(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        chunk = cache.acquire(3)
        assert chunk.offsets == GEOMETRY.slice_offsets
        assert list(chunk.checksums) == [checksum(slice_of(layer, 3, 256)) for layer in range(2)]
        assert first_layer(chunk) == slice_of(0, 3, 256)
        cache.chunks.release(chunk)
        cache.chunks.close_idle_blocking()

    def test_a_file_that_is_no_such_chunk_is_a_verdict_and_not_kept_open(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        before = open_files()

        def acquire(name: int, hash_of: int) -> OpenChunk | Verdict:
            return cache.chunks.acquire_blocking(
                cache.path(name),
                GEOMETRY,
                DESCRIPTOR.chunk_hashes[hash_of],
                reject_blocking=cache.reject,
            )

        wrong, absent = acquire(0, 1), acquire(99, 0)
        assert cache.rejected == [cache.path(0)]
        assert isinstance(wrong, Verdict)
        assert wrong.status is ChunkStatus.MISS_IDENTITY
        assert absent == Verdict(ChunkStatus.MISS_ABSENT)
        assert open_files() == before
        assert cache.taken == 0

    def test_many_are_acquired_and_released_like_one_by_one(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        held = [cache.acquire(index) for index in range(6)]
        paths = [cache.path(index) for index in (5, 99, 0, 7)] * 300
        found = cache.chunks.acquire_all(paths)
        assert found == [held[5], None, held[0], None] * 300
        cache.chunks.forget(cache.path(0))
        cache.chunks.release_all(chunk for chunk in found if chunk is not None)
        assert [chunk.users for chunk in held] == [1] * 6
        cache.chunks.release_all(held)
        cache.chunks.close_released_blocking()
        assert cache.taken == 5, "the forgotten one is closed, the others stay for the next reader"
        cache.chunks.close_idle_blocking()
        assert cache.taken == 0

    def test_nothing_open_is_found_without_io(self, tree: Path) -> None:
        assert Cache(tree, 8).chunks.acquire(str(tree / "0")) is None


class TestBudget:
    def test_beyond_the_bound_a_chunk_has_no_file_of_its_own(self, tree: Path) -> None:
        cache = Cache(tree, 2)
        held = [cache.acquire(index) for index in range(4)]
        assert [chunk.fd is not None for chunk in held] == [True, True, False, False]
        assert cache.taken == 2
        for chunk in held:
            cache.chunks.release(chunk)
        cache.chunks.close_idle_blocking()
        assert cache.taken == 0

    def test_the_longest_idle_makes_room(self, tree: Path) -> None:
        cache = Cache(tree, 2)
        before = open_files()
        for index in (0, 1, 0):
            cache.chunks.release(cache.acquire(index))
        third = cache.acquire(2)
        assert third.fd is not None
        assert cache.chunks.acquire(cache.path(1)) is None, "1 was idle for longer than 0"
        assert open_files() == before + 2
        cache.chunks.release(third)
        cache.chunks.close_idle_blocking()
        assert open_files() == before

    def test_a_file_in_use_is_never_closed_to_make_room(self, tree: Path) -> None:
        cache = Cache(tree, 1)
        used = cache.acquire(0)
        for index in range(1, 8):
            cache.chunks.release(cache.acquire(index))
        assert first_layer(used) == slice_of(0, 0, 256)
        cache.chunks.release(used)
        cache.chunks.close_idle_blocking()

    def test_a_full_budget_takes_no_more_and_gives_back(self) -> None:
        chunks = OpenChunks(PosixFileSystem(), 2)
        assert [chunks.take_blocking() for _ in range(3)] == [True, True, False]
        chunks.give()
        assert chunks.taken == 1
        assert chunks.take_blocking()


class TestForget:
    def test_readers_keep_the_original_bytes_of_a_deleted_file(self, tree: Path) -> None:
        """B7: an open reader always gets the original bytes."""
        cache = Cache(tree, 8)
        chunk = cache.acquire(0)
        (tree / "0").unlink()
        cache.chunks.forget(cache.path(0))
        assert first_layer(chunk) == slice_of(0, 0, 256)
        assert cache.chunks.acquire(cache.path(0)) is None, "nobody new finds it"
        cache.chunks.release(chunk)
        cache.chunks.close_released_blocking()
        assert cache.taken == 0

    def test_a_forgotten_idle_file_is_closed_by_the_next_opener(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        before = open_files()
        cache.chunks.release(cache.acquire(0))
        cache.chunks.forget(cache.path(0))
        cache.chunks.forget(cache.path(0))
        other = cache.acquire(1)
        assert open_files() == before + 1
        cache.chunks.release(other)
        cache.chunks.close_idle_blocking()
        assert open_files() == before

    def test_a_new_file_of_that_name_is_opened_anew(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        old = cache.acquire(0)
        cache.chunks.forget(cache.path(0))
        new = cache.acquire(0)
        assert new is not old
        cache.chunks.release(old)
        assert cache.chunks.acquire(cache.path(0)) is new, "the old one's end does not touch it"
        cache.chunks.release(new)
        cache.chunks.release(new)
        cache.chunks.close_idle_blocking()
        assert cache.taken == 0

    def test_forgetting_what_is_not_open_is_harmless(self, tree: Path) -> None:
        Cache(tree, 8).chunks.forget(str(tree / "0"))


def test_a_held_chunk_stays_open_when_its_transfer_has_ended(tree: Path) -> None:
    """A read that hangs still uses the descriptor: it must not become another file's."""
    cache = Cache(tree, 4)
    chunk = cache.acquire(0)
    cache.chunks.hold(chunk)
    cache.chunks.forget(chunk.path)
    cache.chunks.release(chunk)
    cache.chunks.close_idle_blocking()
    assert chunk.fd is not None
    os.fstat(chunk.fd)
    assert cache.taken == 1
    cache.chunks.release(chunk)
    cache.chunks.close_released_blocking()
    assert cache.taken == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(chunk.fd)


class TestForgettingWhatIsIdle:
    """An evictor leaves what is being read."""

    def test_a_chunk_in_use_stays_found(self, tree: Path) -> None:
        cache = Cache(tree, 8)
        chunk = cache.acquire(0)
        assert not cache.chunks.forget_idle(cache.path(0))
        assert cache.acquire(0) is chunk
        cache.chunks.release_all([chunk, chunk])
        assert cache.chunks.forget_idle(cache.path(0))
        assert cache.chunks.acquire(cache.path(0)) is None
        cache.chunks.close_released_blocking()
        assert cache.taken == 0

    def test_what_nobody_has_open_may_go(self, tree: Path) -> None:
        assert Cache(tree, 8).chunks.forget_idle("nowhere")
