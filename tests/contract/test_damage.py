"""Reading chunks on a real file system: the original bytes, or a miss with the right reason."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.model import ChunkStatus, Verdict
from kvserve.policy.quota import Amount, total_of
from tests.contract.store_tree import ABSENT, HIT, SIZES, Tree
from tests.descriptors import open_files
from tests.unit.samples import HYBRID, descriptor_of, slice_of


def truncate(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def flip(offset: int) -> Callable[[Path], None]:
    def flip_one(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return flip_one


def overwrite_with(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


# The file of one HYBRID chunk: header at 0, slices at 4096, 8192 and 12288, 16384 bytes in all.
DAMAGE: dict[str, tuple[Callable[[Path], None], ChunkStatus]] = {
    "truncated to 0": (truncate(0), ChunkStatus.MISS_CORRUPT),
    "truncated to 100": (truncate(100), ChunkStatus.MISS_CORRUPT),
    "truncated in the header": (truncate(40), ChunkStatus.MISS_CORRUPT),
    "truncated after the header": (truncate(4096), ChunkStatus.MISS_CORRUPT),
    "truncated in the last slice": (truncate(12288 + 50), ChunkStatus.MISS_CORRUPT),
    "magic": (flip(0), ChunkStatus.MISS_CORRUPT),
    "version": (flip(8), ChunkStatus.MISS_IDENTITY),
    "identity": (flip(60), ChunkStatus.MISS_CORRUPT),
    "first slice": (flip(4096), ChunkStatus.MISS_CORRUPT),
    "middle slice": (flip(8192 + 191), ChunkStatus.MISS_CORRUPT),
    "last slice": (flip(12288 + 99), ChunkStatus.MISS_CORRUPT),
    "zeros": (overwrite_with(bytes(16384)), ChunkStatus.MISS_CORRUPT),
    "another kind of file": (overwrite_with(b"#!/bin/sh\n" * 2000), ChunkStatus.MISS_CORRUPT),
}


class TestDamage:
    """T5: whatever happened to a file, its reader gets a miss with a reason, or its bytes."""

    def test_the_offsets_above_are_right(self, tree: Tree) -> None:
        assert tree.where.geometry.slice_offsets == (4096, 8192, 12288)
        assert tree.where.geometry.file_size_bytes == 16384

    @pytest.mark.parametrize("name", DAMAGE)
    def test_a_damaged_file_is_a_miss_with_the_right_reason(self, tree: Tree, name: str) -> None:
        damage, status = DAMAGE[name]
        tree.put(0, 1, 2)
        damage(tree.file(1))
        found = tree.read(1)
        assert isinstance(found, Verdict), "wrong bytes were delivered as good"
        assert found.status is status
        assert found.message
        assert tree.is_whole(0)
        assert tree.is_whole(2)

    def test_a_fifo_in_its_place_is_a_miss_and_the_next_put_heals_it(self, tree: Tree) -> None:
        tree.put(0)
        tree.file(0).unlink()
        os.mkfifo(tree.file(0))
        found = tree.read(0)
        assert isinstance(found, Verdict)
        assert found.status is ChunkStatus.MISS_ERROR
        tree.put(0)
        assert tree.file(0).is_file()

    def test_a_file_that_has_grown_counts_as_a_chunk_when_it_is_set_aside(self, tree: Tree) -> None:
        tree.put(0, 1)
        flip(60)(tree.file(0))
        os.truncate(tree.file(0), 1 << 40)
        before = total_of(tree.ledger.usage())
        assert isinstance(tree.open(0), Verdict)
        assert not tree.file(0).exists()
        gone = before - total_of(tree.ledger.usage())
        assert gone == Amount(tree.where.geometry.file_size_bytes, 1)

    @pytest.mark.parametrize(
        "name", [name for name in DAMAGE if not re.search("slice|after|version", name)]
    )
    def test_a_bad_header_is_set_aside_and_the_next_put_heals_it(
        self, tree: Tree, name: str
    ) -> None:
        """C3: a failed read makes the next lookup a miss."""
        tree.put(1)
        DAMAGE[name][0](tree.file(1))
        damaged = tree.file(1).read_bytes()
        assert isinstance(tree.open(1), Verdict)
        assert tree.status(1) == ABSENT
        (kept,) = tree.quarantined()
        assert (tree.root / kept).read_bytes() == damaged, "kept as evidence"
        tree.put(1)
        assert tree.is_whole(1)

    @pytest.mark.parametrize("size", [0, 100, 16383, 16385])
    def test_a_lookup_finds_a_wrong_size_without_opening(self, tree: Tree, size: int) -> None:
        tree.put(0)
        os.truncate(tree.file(0), size)
        assert tree.status(0) == Verdict(
            ChunkStatus.MISS_CORRUPT, f"{size} bytes long instead of 16384"
        )
        tree.put(0)
        assert tree.status(0) == HIT, "a put replaces it"

    def test_files_of_two_chunks_swapped(self, tree: Tree) -> None:
        tree.put(2, 3, 4)
        aside = tree.root / "aside"
        tree.file(3).rename(aside)
        tree.file(4).rename(tree.file(3))
        aside.rename(tree.file(4))
        for index in (3, 4):
            assert tree.open(index) == Verdict(
                ChunkStatus.MISS_IDENTITY, "the file holds another chunk's identity"
            )
            assert tree.status(index) == ABSENT
        assert tree.is_whole(2)

    def test_a_chunk_of_another_tenant_in_this_ones_place(self, tree: Tree) -> None:
        """A4: also an administrator's `cp -r` makes no cross-tenant hit."""
        tree.put(0)
        theirs = descriptor_of(5, HYBRID, tenant="b")
        where = tree.store.locate(theirs)
        Path(where.path(0)).parent.mkdir(parents=True)
        Path(where.path(0)).write_bytes(tree.file(0).read_bytes())
        found = tree.store.open_blocking(where, 0)
        assert isinstance(found, Verdict)
        assert found.status is ChunkStatus.MISS_IDENTITY

    def test_padding_that_changed_harms_nobody(self, tree: Tree) -> None:
        """Between header, slices and the end: never read, so never wrong."""
        tree.put(0)
        for offset in (4095, 4096 + 256, 8192 + 192, 16383):
            flip(offset)(tree.file(0))
        assert tree.status(0) == HIT
        assert tree.is_whole(0)

    def test_a_directory_in_a_chunks_place_is_an_error_that_says_what_to_do(
        self, tree: Tree
    ) -> None:
        tree.file(0).mkdir(parents=True)
        found = tree.open(0)
        assert isinstance(found, Verdict)
        assert found.status is ChunkStatus.MISS_ERROR
        with pytest.raises(StorageUnavailable) as refused:
            tree.put(0)
        for text in (found.message, str(refused.value)):
            assert str(tree.file(0)) in text
            assert "EISDIR (a directory in the place of a file: move it away, or run" in text

    def test_a_link_that_leads_to_itself_is_no_chunk_and_the_next_put_heals_it(
        self, tree: Tree
    ) -> None:
        tree.file(0).parent.mkdir(parents=True)
        tree.file(0).symlink_to(tree.file(0))
        assert tree.status(0) == tree.open(0) == ABSENT
        tree.put(0)
        assert tree.is_whole(0)


class TestDeletion:
    def test_deleted_between_open_and_read(self, tree: Tree) -> None:
        """T12, B7: the reader has the original bytes, everybody else a miss."""
        tree.put(0, 1)
        chunk = tree.opened(0)
        assert tree.store.delete_blocking(tree.where, 0) is ChunkStatus.DELETED
        for layer, size in enumerate(SIZES):
            assert tree.read_open(chunk, layer) == slice_of(layer, 0, size)
        assert tree.status(0) == tree.open(0) == ABSENT
        tree.store.open_chunks.release(chunk)
        assert tree.is_whole(1)

    def test_deleted_by_another_server_between_open_and_read(self, tree: Tree) -> None:
        tree.put(0)
        chunk = tree.opened(0)
        tree.file(0).unlink()
        assert tree.read_open(chunk, 2) == slice_of(2, 0, SIZES[2])
        assert tree.status(0) == ABSENT
        tree.store.open_chunks.release(chunk)

    def test_deleted_between_open_and_read_without_a_descriptor_of_its_own(
        self, tmp_path: Path
    ) -> None:
        tree = Tree(tmp_path / "kv", open_files_max=0)
        tree.put(0)
        chunk = tree.opened(0)
        assert chunk.fd is None
        assert tree.read_open(chunk, 0) == slice_of(0, 0, SIZES[0])
        tree.file(0).unlink()
        assert tree.read_open(chunk, 1) == Verdict(
            ChunkStatus.MISS_ABSENT, "deleted while being read"
        )

    def test_truncated_while_open_is_a_miss_and_never_other_bytes(self, tree: Tree) -> None:
        tree.put(0)
        chunk = tree.opened(0)
        os.truncate(tree.file(0), 8192)
        assert tree.read_open(chunk, 0) == slice_of(0, 0, SIZES[0])
        assert tree.read_open(chunk, 1) == Verdict(ChunkStatus.MISS_CORRUPT, "layer 1 is cut short")
        tree.store.open_chunks.release(chunk)

    def test_deleting_twice_is_harmless(self, tree: Tree) -> None:
        tree.put(0)
        assert tree.store.delete_blocking(tree.where, 0) is ChunkStatus.DELETED
        assert tree.store.delete_blocking(tree.where, 0) is ChunkStatus.MISS_ABSENT
        tree.put(0)
        assert tree.is_whole(0)

    def test_a_deleted_chunk_that_nobody_reads_gives_its_space_back(self, tree: Tree) -> None:
        tree.put(0)
        assert tree.is_whole(0)
        before = open_files()
        tree.store.delete_blocking(tree.where, 0)
        assert open_files() == before - 1


class TestQuarantine:
    def test_the_name_tells_where_the_file_was(self, tree: Tree) -> None:
        tree.put(0)
        os.truncate(tree.file(0), 1)
        assert isinstance(tree.open(0), Verdict)
        (kept,) = tree.quarantined()
        where = kept.removeprefix(".quarantine/").replace("@", "/")
        assert tree.root / where == tree.file(0)

    def test_a_file_that_cannot_be_moved_stays_a_miss(self, tmp_path: Path) -> None:
        """E5: one file that cannot be set aside wedges nothing."""

        class Unmovable(PosixFileSystem):
            def rename(self, source: str, target: str) -> None:
                if ".quarantine" in target:
                    raise StorageUnavailable("rename: EPERM")
                super().rename(source, target)

        tree = Tree(tmp_path / "kv", fs=Unmovable())
        tree.put(0)
        flip(0)(tree.file(0))
        for _ in range(2):
            found = tree.open(0)
            assert isinstance(found, Verdict)
            assert found.status is ChunkStatus.MISS_CORRUPT
        tree.put(0)
        assert tree.is_whole(0)
        tree.store.open_chunks.close_idle_blocking()

    def test_a_chunk_healed_in_the_middle_of_the_move_is_put_back(self, tmp_path: Path) -> None:
        """The other server's put lands between the check and the rename."""
        other = Tree(tmp_path / "kv")

        class Slow(PosixFileSystem):
            def is_same(self, fd: int, path: str) -> bool:
                same = super().is_same(fd, path)
                if same and ".quarantine" not in path:
                    other.file(0).unlink()
                    other.put(0)
                return same

        tree = Tree(tmp_path / "kv", fs=Slow())
        tree.put(0)
        flip(4096)(tree.file(0))
        chunk = tree.opened(0)
        tree.store.reject_blocking(chunk)
        tree.store.open_chunks.release(chunk)
        assert other.status(0) == HIT, "a chunk that was acknowledged as stored is gone"
        assert other.is_whole(0)
        assert tree.quarantined() == []

    def test_a_chunk_healed_meanwhile_is_not_set_aside(self, tree: Tree) -> None:
        """Two servers: one still holds the damaged file open, the other has healed the chunk."""
        tree.put(0)
        flip(4096)(tree.file(0))
        chunk = tree.opened(0)
        other = Tree(tree.root)
        other.file(0).unlink()
        other.put(0)
        assert isinstance(tree.read_open(chunk, 0), Verdict)
        tree.store.reject_blocking(chunk)  # as the fetch pump does
        tree.store.open_chunks.release(chunk)
        assert other.status(0) == HIT, "a chunk that was acknowledged as stored is gone"
