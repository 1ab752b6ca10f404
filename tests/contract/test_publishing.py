"""Publishing chunks on a real file system: all of a chunk or none of it.

Whatever happens around it, abandoned and failed writers leave nothing, two writers of one chunk do
not disturb each other, and files are given back.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvserve.errors import StorageFull, StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.model import Verdict
from kvserve.testing.faulty_fs import FaultyFileSystem
from kvserve.testing.stepped_fs import Actor, SteppedFileSystem
from tests.contract.store_tree import ABSENT, HIT, SIZES, Tree
from tests.descriptors import open_files
from tests.unit.samples import slice_of


class TestPublishing:
    def test_a_chunk_is_visible_at_its_commit_and_not_before(self, tree: Tree) -> None:
        """T3, B1: a put is never half visible."""
        assert tree.status(0) == ABSENT
        writer = tree.store.writer(tree.where, 0)

        assert tree.status(0) == ABSENT
        for layer, size in enumerate(SIZES):
            writer.write_blocking(layer, 0, memoryview(slice_of(layer, 0, size)))
            assert tree.status(0) == tree.open(0) == ABSENT
        writer.commit_blocking(tree.sums(0))
        assert tree.status(0) == HIT
        assert tree.is_whole(0)
        assert tree.files() == [str(tree.file(0).relative_to(tree.root))], "and nothing else"

    def test_a_file_is_exactly_as_long_as_its_geometry_says(self, tree: Tree) -> None:
        tree.put(0)
        assert tree.file(0).stat().st_size == tree.where.geometry.file_size_bytes

    def test_pieces_of_slices_in_any_order(self, tree: Tree) -> None:
        writer = tree.begin(0, range(0))
        for layer in (2, 0, 1):
            data = slice_of(layer, 0, SIZES[layer])
            writer.write_blocking(layer, 60, memoryview(data)[60:])
            writer.write_blocking(layer, 0, memoryview(data)[:60])
        writer.commit_blocking(tree.sums(0))
        assert tree.is_whole(0)

    @pytest.mark.parametrize("layers", [range(0), range(1), range(3)])
    def test_an_abandoned_writer_leaves_nothing(self, tree: Tree, layers: range) -> None:
        before = open_files()
        writer = tree.begin(0, layers)
        assert len(tree.files()) == (1 if layers else 0), "the first write makes the file"
        writer.abandon_blocking()
        writer.abandon_blocking()
        assert tree.files() == []
        assert tree.status(0) == ABSENT
        assert open_files() == before
        assert " 0 files" in repr(tree.store)

    def test_abandoning_after_the_commit_changes_nothing(self, tree: Tree) -> None:
        writer = tree.begin(0)
        writer.commit_blocking(tree.sums(0))
        writer.abandon_blocking()
        assert tree.is_whole(0)

    def test_a_writer_never_opened_may_be_abandoned(self, tree: Tree) -> None:
        tree.store.writer(tree.where, 0).abandon_blocking()
        assert not tree.root.exists()

    def test_temporary_files_are_in_the_final_directory_and_hidden(self, tree: Tree) -> None:
        writer = tree.begin(0)
        (temp,) = tree.file(0).parent.iterdir()
        assert temp.name.startswith(f".{tree.file(0).name}.")
        writer.abandon_blocking()

    def test_two_writers_of_one_chunk_both_succeed(self, tree: Tree) -> None:
        """T3, B1, B2: no shared staging name; the loser of the race replaces whole by whole."""
        one, other = tree.begin(0, range(1)), tree.begin(0, range(3))
        assert len(tree.files()) == 2
        other.commit_blocking(tree.sums(0))
        assert tree.is_whole(0)
        for layer in (1, 2):
            one.write_blocking(layer, 0, memoryview(slice_of(layer, 0, SIZES[layer])))
        assert tree.is_whole(0)
        one.commit_blocking(tree.sums(0))
        assert tree.is_whole(0)
        assert len(tree.files()) == 1

    def test_a_temporary_name_that_is_taken_is_not_shared(self, tree: Tree) -> None:
        """B2: two servers that draw the same random numbers still write two files."""
        other = Tree(tree.root)
        one, two = tree.begin(0, range(1)), other.begin(0)
        assert len(tree.files()) == 2
        two.commit_blocking(other.sums(0))
        one.abandon_blocking()
        assert tree.is_whole(0)
        assert len(tree.files()) == 1

    @pytest.mark.parametrize("abandoned_first", [True, False])
    def test_a_writer_that_gives_up_does_not_touch_the_other(
        self, tree: Tree, abandoned_first: bool
    ) -> None:
        one, other = tree.begin(0, range(1)), tree.begin(0)
        if abandoned_first:
            one.abandon_blocking()
        other.commit_blocking(tree.sums(0))
        one.abandon_blocking()
        assert tree.is_whole(0)
        assert len(tree.files()) == 1

    def test_a_reader_keeps_its_file_while_a_writer_replaces_it(self, tree: Tree) -> None:
        tree.put(0)
        chunk = tree.opened(0)
        tree.put(0)
        assert tree.read_open(chunk, 1) == slice_of(1, 0, SIZES[1])
        tree.store.open_chunks.release(chunk)

    def test_a_pin_that_comes_while_a_writer_replaces_its_chunk_stays(self, tmp_path: Path) -> None:
        """At whatever step of the replacement it comes."""
        plain = PosixFileSystem()
        for steps in range(1, 1000):
            stepped = SteppedFileSystem()
            tree = Tree(tmp_path / str(steps), fs=stepped)
            tree.put(0)
            writer = tree.begin(0)
            with Actor(stepped, partial(writer.commit_blocking, tree.sums(0))) as commit:
                has_ended = commit.run(steps) < steps
                plain.mark(str(tree.file(0)), is_marked=True)
                commit.run()
            found = plain.stat(str(tree.file(0)))
            assert found is not None
            assert found.is_marked, steps
            assert tree.is_whole(0)
            if has_ended:
                return
        pytest.fail("the commit does not end")

    def test_another_store_on_the_tree_sees_it_at_once(self, tree: Tree) -> None:
        """B8: stored means readable from another node."""
        tree.put(0)
        other = Tree(tree.root)
        assert other.status(0) == HIT
        assert other.is_whole(0)
        other.store.open_chunks.close_idle_blocking()


def calls_of_one_put(root: Path, open_files_max: int) -> list[str]:
    fs = FaultyFileSystem()
    Tree(root, fs=fs, survives_power_loss=True, open_files_max=open_files_max).put(0)
    return fs.calls


class TestFailingPuts:
    """T4, B1, B3: fail the n-th call, for every n."""

    def test_the_order_of_publishing(self, tmp_path: Path) -> None:
        """New directories' names, bytes, header, sync, the name, its sync."""
        assert calls_of_one_put(tmp_path / "kv", 64) == [
            "create",
            "make_dirs",
            *["sync_dir"] * 5,  # root, tenant, namespace, shard, fan
            "create",
            *["write_all"] * (len(SIZES) + 3),  # the header's room, slices, padding, the header
            "sync",
            "close",
            "rename",
            "sync_dir",
        ]

    @pytest.mark.parametrize("open_files_max", [64, 0], ids=["with", "without descriptors"])
    def test_a_put_that_fails_anywhere_leaves_nothing_and_can_be_repeated(
        self, tmp_path: Path, open_files_max: int
    ) -> None:
        count = len(calls_of_one_put(tmp_path / "whole", open_files_max))
        for error in (StorageUnavailable("EIO"), StorageFull("ENOSPC")):
            for fails_at in range(1, count + 1):
                fs = FaultyFileSystem(fails_at, error)
                root = tmp_path / f"{type(error).__name__}-{fails_at}"
                tree = Tree(root, fs=fs, survives_power_loss=True, open_files_max=open_files_max)
                before = open_files()
                writer = tree.store.writer(tree.where, 0)
                with pytest.raises(type(error)):
                    tree.write_whole(writer, 0)
                writer.abandon_blocking()
                where = f"call {fails_at}, {fs.calls[fails_at - 1]}"
                assert tree.files() == [], where
                assert tree.status(0) == ABSENT, where
                assert open_files() == before, where
                assert " 0 files" in repr(tree.store), where
                tree.put(0)
                assert tree.is_whole(0), where
                tree.store.open_chunks.close_idle_blocking()

    @pytest.mark.parametrize("open_files_max", [64, 0], ids=["with", "without descriptors"])
    def test_a_commit_that_fails_cleans_up_by_itself(
        self, tmp_path: Path, open_files_max: int
    ) -> None:
        """On an error nothing is visible and the temporary file is gone, before any `abandon`."""
        count = len(calls_of_one_put(tmp_path / "whole", open_files_max))
        failed = 0
        for fails_at in range(1, count + 1):
            fs = FaultyFileSystem()
            root = tmp_path / str(fails_at)
            tree = Tree(root, fs=fs, survives_power_loss=True, open_files_max=open_files_max)
            before = open_files()
            writer = tree.begin(0)
            if fails_at <= len(fs.calls):
                writer.abandon_blocking()
                continue
            fs.fails_at = fails_at
            with pytest.raises(StorageUnavailable):
                writer.commit_blocking(tree.sums(0))
            failed += 1
            assert tree.files() == [], fs.calls[fails_at - 1]
            assert open_files() == before, fs.calls[fails_at - 1]
        assert failed >= 5, "padding, header, sync, close, rename"

    def test_no_space_is_still_no_space_for_the_caller(self, tmp_path: Path) -> None:
        fs = FaultyFileSystem(4, StorageFull("write 7: ENOSPC"))
        with pytest.raises(StorageFull, match="ENOSPC"):
            Tree(tmp_path / "kv", fs=fs).put(0)

    def test_an_error_after_the_rename_is_no_half_success(self, tmp_path: Path) -> None:
        """Said to be invisible on an error; a later put is then KNOWN, though never synced."""

        class UnsyncedNames(PosixFileSystem):
            def sync_dir(self, path: str) -> None:
                raise StorageUnavailable("fsync: EIO")

        tree = Tree(tmp_path / "kv", fs=UnsyncedNames(), survives_power_loss=True)
        with pytest.raises(StorageUnavailable):
            tree.put(0)
        assert tree.status(0) == ABSENT
        assert tree.ledger.usage() == {}

    def test_one_that_replaced_another_takes_it_out_of_the_books(self, tmp_path: Path) -> None:
        class UnsyncedNames(PosixFileSystem):
            refuses = False

            def sync_dir(self, path: str) -> None:
                if self.refuses:
                    raise StorageUnavailable("fsync: EIO")

        fs = UnsyncedNames()
        tree = Tree(tmp_path / "kv", fs=fs, survives_power_loss=True)
        tree.put(0)
        tree.store.open_chunks.release(tree.opened(0))
        assert tree.status(0) == HIT
        fs.refuses = True
        with pytest.raises(StorageUnavailable):
            tree.put(0)
        assert tree.ledger.usage() == {}
        assert tree.store.unknown(tree.where) == dict.fromkeys(range(5))
        assert tree.open(0) == ABSENT, "not from a descriptor that was kept"


class TestGivenUp:
    """A call hangs and nobody waits for it: nothing is published, whoever comes back cleans up."""

    @pytest.mark.parametrize("verb", ["create", "write_all", "close"])
    def test_the_call_that_hangs_cleans_up(self, tmp_path: Path, verb: str) -> None:
        fs = FaultyFileSystem()
        tree = Tree(tmp_path / "kv", fs=fs)
        before = open_files()
        writer = tree.store.writer(tree.where, 0)
        fs.hang(tree.file(0).name, [verb])
        thread = threading.Thread(target=swallow, args=(tree.write_whole, writer, 0))
        thread.start()
        while not fs.attempts(verb, tree.file(0).name):
            time.sleep(0.001)
        writer.give_up()
        assert not writer.is_open, "it is not for the request to abandon"
        fs.heal()
        thread.join(10)
        assert tree.files() == []
        assert open_files() == before
        assert " 0 files" in repr(tree.store)
        with pytest.raises(StorageUnavailable, match="given up"):
            tree.write_whole(writer, 0)
        assert tree.files() == []

    def test_the_last_of_several_cleans_up(self, tmp_path: Path) -> None:
        """The file stays open for the others: its number must not name another file meanwhile."""
        fs = FaultyFileSystem()
        tree = Tree(tmp_path / "kv", fs=fs)
        writer = tree.begin(0, range(1))
        gates = [threading.Event(), threading.Event()]
        entered = threading.Barrier(3)

        def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
            layer = 1 if len(data) == SIZES[1] else 2
            entered.wait(10)
            gates[layer - 1].wait(10)
            os.pwrite(fd, data, offset)

        fs.write_all = write_all  # type: ignore[method-assign]
        data = [memoryview(slice_of(layer, 0, SIZES[layer])) for layer in (1, 2)]
        threads = [
            threading.Thread(target=writer.write_blocking, args=(layer, 0, data[layer - 1]))
            for layer in (1, 2)
        ]
        for thread in threads:
            thread.start()
        entered.wait(10)
        writer.give_up()
        gates[0].set()
        threads[0].join(10)
        assert len(tree.files()) == 1, "one still writes to it"
        gates[1].set()
        threads[1].join(10)
        assert tree.files() == []

    def test_where_no_call_runs_the_request_abandons(self, tree: Tree) -> None:
        writer = tree.begin(0)
        writer.give_up()
        assert writer.is_open
        with pytest.raises(StorageUnavailable, match="given up"):
            writer.commit_blocking(tree.sums(0))
        writer.abandon_blocking()
        assert tree.files() == []


def swallow(call: Callable[..., object], *args: object) -> None:
    with suppress(StorageUnavailable):
        call(*args)


class TestOpenFilesBudget:
    def test_a_hundred_chunks_with_sixteen_files(self, tmp_path: Path) -> None:
        """No number of descriptors can fail a transfer; they return to the baseline (T9)."""
        baseline = open_files()
        tree = Tree(tmp_path / "kv", chunks=100, open_files_max=16)
        writers = [tree.begin(index, range(1)) for index in range(100)]
        assert open_files() <= baseline + 16
        for layer in (1, 2):
            for index, writer in enumerate(writers):
                writer.write_blocking(layer, 0, memoryview(slice_of(layer, index, SIZES[layer])))
        for index, writer in enumerate(writers):
            writer.commit_blocking(tree.sums(index))
        assert open_files() == baseline
        chunks = [tree.opened(index) for index in range(100)]
        assert open_files() <= baseline + 16
        for layer, size in enumerate(SIZES):
            for index, chunk in enumerate(chunks):
                assert tree.read_open(chunk, layer) == slice_of(layer, index, size)
        for chunk in chunks:
            tree.store.open_chunks.release(chunk)
        assert all(tree.is_whole(index) for index in range(100)), "also one after another"
        tree.store.open_chunks.close_idle_blocking()
        assert open_files() == baseline
        assert repr(tree.store).endswith(" <OpenChunks 0 files of 16, 0 open, 0 idle>>")

    def test_idle_readers_make_room_for_writers(self, tmp_path: Path) -> None:
        fs = FaultyFileSystem()
        tree = Tree(tmp_path / "kv", fs=fs, open_files_max=2)
        tree.put(0, 1)
        assert tree.is_whole(0)
        assert tree.is_whole(1)
        tree.put(2)
        tree.store.open_chunks.close_idle_blocking()
        assert "open_write" not in fs.calls

    def test_failed_opens_give_their_descriptor_back(self, tree: Tree) -> None:
        tree.put(0)
        before = open_files()
        for _ in range(20):
            tree.file(1).parent.mkdir(parents=True, exist_ok=True)
            tree.file(1).write_bytes(b"rot")
            assert isinstance(tree.open(1), Verdict)
            assert isinstance(tree.open(2), Verdict)
        assert open_files() == before


class TestRoot:
    def test_the_probe_leaves_nothing(self, tree: Tree) -> None:
        tree.store.check_root_blocking()
        tree.store.check_root_blocking()
        assert tree.files() == []
        assert list(tree.root.iterdir()) == []

    @pytest.mark.parametrize("verb", ["write_all", "sync"])
    def test_a_root_that_refuses_says_so_and_keeps_no_probe(
        self, tmp_path: Path, verb: str
    ) -> None:
        class Refusing(PosixFileSystem):
            pass

        def refuse(*_: object) -> None:
            raise StorageUnavailable(f"{verb}: EROFS")

        setattr(Refusing, verb, refuse)
        tree = Tree(tmp_path / "kv", fs=Refusing())
        with pytest.raises(StorageUnavailable, match=f"{verb}: EROFS"):
            tree.store.check_root_blocking()
        assert tree.files() == []

    def test_a_file_in_the_roots_place(self, tmp_path: Path) -> None:
        (tmp_path / "kv").write_text("")
        with pytest.raises(StorageUnavailable, match="mkdir"):
            Tree(tmp_path / "kv").store.check_root_blocking()

    def test_two_servers_of_one_process_id_start_together(self, tmp_path: Path) -> None:
        """Containers on one tree: the second checks while the first is in the middle."""
        other = Tree(tmp_path / "kv")

        class Interrupted(PosixFileSystem):
            def sync(self, fd: int) -> None:
                super().sync(fd)
                other.store.check_root_blocking()

        Tree(tmp_path / "kv", fs=Interrupted()).store.check_root_blocking()
        assert other.files() == []
