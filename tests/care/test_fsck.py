"""A check of real damaged trees: the right word for every file, repairs that mend and harm nothing,
interruptions that lose nothing."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.care.fsck import FsckOptions, FsckResult, Watcher, fsck_blocking
from kvserve.care.order import InOrder
from kvserve.care.tally import Finding, Kind
from kvserve.errors import InvalidRequest, StorageError, StorageUnavailable
from kvserve.format.chunk_file import checksum
from kvserve.fs import Entry, FileSystem, PosixFileSystem
from kvserve.model import Layout, attention, opaque
from kvserve.store.locations import ChunkLocations
from kvserve.testing.faulty_fs import CHANGING, FaultyFileSystem
from tests.care.damaged_tree import (
    damage,
    flip,
    good_tree,
    live_owner,
    namespace_dir,
    other_identity,
    place,
    temp_beside,
)
from tests.contract.store_tree import Tree
from tests.descriptors import open_files
from tests.unit.samples import descriptor_of, slice_of

FS = PosixFileSystem()


@pytest.fixture
def tree(root: Path) -> Iterator[Tree]:
    tree = good_tree(root)
    yield tree
    tree.store.open_chunks.close_idle_blocking()


def fsck(root: Path, *, fs: FileSystem = FS, **options: object) -> FsckResult:
    made = FsckOptions(**{"threads": 3, **options})  # type: ignore[arg-type]
    return fsck_blocking(fs, str(root), made)


def found(result: FsckResult) -> dict[str, tuple[str, str]]:
    return {it.path: (it.kind.value, it.reason) for it in result.tally.findings}


def counts(result: FsckResult) -> dict[str, int]:
    return {kind.value: count for kind, count in result.tally.counts.items() if count}


def snapshot(root: Path) -> dict[str, bytes | None]:
    """Every path under the root with its bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def assert_told(result: FsckResult, expected: dict[str, tuple[str, str]]) -> None:
    told = found(result)
    assert set(told) == set(expected)
    for path, (kind, words) in expected.items():
        assert told[path][0] == kind, (path, told[path])
        assert words in told[path][1], (path, told[path])


class TestWhatItSays:
    def test_a_good_tree(self, tree: Tree) -> None:
        result = fsck(tree.root)
        assert counts(result) == {"ok": 13}, "twelve chunks and the identity file"
        assert (result.tally.problems, result.warnings, result.is_resumed) == (0, (), False)
        assert result.tally.size_bytes == 12 * 16384 + len(tree.descriptor.identity.encoded)

    def test_an_empty_root(self, root: Path) -> None:
        root.mkdir()
        assert counts(fsck(root)) == {}

    def test_a_missing_root_is_not_made(self, root: Path) -> None:
        with pytest.raises(InvalidRequest, match="there is no directory"):
            fsck(root)
        assert not root.exists()

    def test_every_kind_of_damage(self, tree: Tree) -> None:
        expected = damage(tree)
        result = fsck(tree.root)
        assert_told(result, expected)
        assert counts(result)["ok"] == 3, "the identity and two chunks"
        assert sum(kind in ("corrupt", "misplaced", "orphan") for kind, _ in expected.values()) == (
            result.tally.problems
        )

    def test_without_repair_nothing_is_changed(self, tree: Tree) -> None:
        damage(tree)
        (tree.root / ".fsck").mkdir()
        before = snapshot(tree.root)
        fsck(tree.root)
        assert snapshot(tree.root) == before

    def test_a_chunk_of_large_slices_is_read_in_windows(self, root: Path) -> None:
        """Slices that start, end and lie across windows of 1 MiB."""
        layout = Layout("bfloat16", 64, (opaque(1 << 20), opaque(2_500_000), attention(8, 128)))
        tree = Tree(root)
        where = ChunkLocations(str(root), descriptor_of(1, layout))
        writer = tree.store.writer(where, 0)
        slices = [slice_of(layer, 0, size) for layer, size in enumerate(layout.slice_sizes)]
        for layer, data in enumerate(slices):
            writer.write_blocking(layer, 0, memoryview(data))
        writer.commit_blocking([checksum(data) for data in slices])
        assert counts(fsck(root)) == {"ok": 1}
        offsets = where.geometry.slice_offsets
        for layer in range(3):
            for at in (0, layout.slice_sizes[layer] // 2, layout.slice_sizes[layer] - 1):
                flip(Path(where.path(0)), offsets[layer] + at)
                (told,) = fsck(root).tally.findings
                assert told.reason == f"checksum of layer {layer} does not match"
                flip(Path(where.path(0)), offsets[layer] + at)
        assert counts(fsck(root)) == {"ok": 1}

    def test_padding_is_nobodys(self, tree: Tree) -> None:
        flip(tree.file(0), 5000)
        assert fsck(tree.root).tally.problems == 0

    def test_identity_files(self, tree: Tree) -> None:
        path = namespace_dir(tree) / "identity"
        name = str(path.relative_to(tree.root))
        path.write_bytes(other_identity().encoded)
        kind, reason = found(fsck(tree.root))[name]
        assert kind == "misplaced"
        assert reason == f"it is the identity of {other_identity().namespace}"
        path.write_bytes(b"\x91noise")
        assert found(fsck(tree.root))[name][0] == "corrupt"
        path.write_bytes(b"")
        assert found(fsck(tree.root))[name][0] == "corrupt"
        path.unlink()
        assert fsck(tree.root).tally.problems == 0, "chunks are read without it"

    def test_another_version_where_no_identity_tells_is_left_alone(self, tree: Tree) -> None:
        """A later version's tree must survive an older fsck; in our own namespaces it is rot."""
        flip(tree.file(0), 8)
        assert found(fsck(tree.root))[place(tree, 0)][0] == "corrupt"
        (namespace_dir(tree) / "identity").unlink()
        before = tree.file(0).read_bytes()
        assert found(fsck(tree.root, repairs=True))[place(tree, 0)][0] == "unknown"
        assert tree.file(0).read_bytes() == before

    def test_a_file_that_cannot_be_read_is_told_and_the_others_go_on(self, tree: Tree) -> None:
        """EIO at each open and read in turn."""
        reading = frozenset(("open_read", "read_into"))
        for fails_at in range(1, 200):
            fs = FaultyFileSystem(fails_at, verbs=reading)
            result = fsck(tree.root, fs=fs, threads=1, repairs=True)
            if not fs.has_failed:
                assert fails_at > 13
                assert counts(result) == {"ok": 13}
                return
            assert counts(result) in ({"ok": 12, "unreadable": 1}, {"ok": 13}), fails_at
            for finding in result.tally.findings:
                assert (finding.kind, finding.reason) == (Kind.UNREADABLE, "EIO")
        raise AssertionError("it did not end")

    def test_a_directory_that_cannot_be_listed(self, tree: Tree) -> None:
        bad = tree.file(3).parent

        class Broken(PosixFileSystem):
            def scan(self, path: str) -> Iterator[Entry]:
                if path == str(bad):
                    raise StorageUnavailable("list: EIO")
                return super().scan(path)

        result = fsck(tree.root, fs=Broken())
        assert found(result)[f"{bad.relative_to(tree.root)}/"] == ("unreadable", "list: EIO")
        assert result.tally.counts[Kind.OK] >= 11

    def test_a_file_that_vanishes_is_not_counted(self, tree: Tree) -> None:
        class Vanishing(PosixFileSystem):
            def open_read(self, path: str) -> int | None:
                if path == str(tree.file(2)):
                    os.unlink(path)
                return super().open_read(path)

        assert counts(fsck(tree.root, fs=Vanishing())) == {"ok": 12}

    def test_no_descriptor_and_no_thread_is_left(self, tree: Tree) -> None:
        damage(tree)
        before = open_files(), threading.active_count()
        fsck(tree.root, repairs=True)
        assert (open_files(), threading.active_count()) == before


class TestRepair:
    def test_what_is_damaged_goes_to_quarantine_and_orphans_go(self, tree: Tree) -> None:
        expected = damage(tree)
        before = snapshot(tree.root)
        result = fsck(tree.root, repairs=True)
        assert_told(result, expected)
        after = snapshot(tree.root)
        for path, (kind, _) in expected.items():
            if kind in ("corrupt", "misplaced"):
                assert path not in after
                assert after[f".quarantine/{path.replace('/', '@')}"] == before[path]
            elif kind == "orphan":
                assert path not in after
            else:
                assert after[path] == before[path]
        assert result.tally.repaired == result.tally.problems
        again = fsck(tree.root)
        assert again.tally.problems == 0
        assert counts(again) == {
            "ok": 3,
            "live": 1,
            "unknown": sum(kind == "unknown" for kind, _ in expected.values()),
        }

    def test_what_was_good_is_untouched_and_what_was_not_can_be_put_again(self, tree: Tree) -> None:
        damage(tree)
        fsck(tree.root, repairs=True)
        assert [tree.is_whole(index) for index in range(12)] == [False] * 10 + [True] * 2
        tree.put(*range(10))
        assert all(tree.is_whole(index) for index in range(12))
        assert fsck(tree.root).tally.problems == 0

    @pytest.mark.parametrize("verb", ["is_same", "rename"])
    def test_a_good_file_that_takes_the_name_meanwhile_stays(self, tree: Tree, verb: str) -> None:
        """A writer heals the chunk while fsck is about to move the damaged file."""
        good = tree.file(4).read_bytes()
        flip(tree.file(4), 4096)

        class Racing(PosixFileSystem):
            has_raced = False

            def race(self, at: str) -> None:
                if at == verb and not self.has_raced:
                    self.has_raced = True
                    new = tree.file(4).with_name("new")
                    new.write_bytes(good)
                    new.replace(tree.file(4))

            def is_same(self, fd: int, path: str) -> bool:
                self.race("is_same")
                return super().is_same(fd, path)

            def rename(self, source: str, target: str) -> None:
                self.race("rename")
                super().rename(source, target)

        result = fsck(tree.root, fs=Racing(), repairs=True)
        assert tree.is_whole(4)
        assert tree.quarantined() == []
        assert counts(result) == {"ok": 13}, "what lies there now was checked in its place"

    def test_the_n_th_change_fails_for_every_n(self, tree: Tree) -> None:
        """Nothing good is lost, what is not repaired is said to be, the next repair is complete."""
        expected = damage(tree)
        damaged = snapshot(tree.root)
        for fails_at in range(1, 300):
            _restore(tree.root, damaged)
            fs = FaultyFileSystem(fails_at, verbs=CHANGING - {"write_all", "sync"})
            try:
                result = fsck(tree.root, fs=fs, threads=1, repairs=True)
            except StorageError:
                result = None
            assert [tree.is_whole(index) for index in (10, 11)] == [True, True], fails_at
            if result is not None:
                for finding in result.tally.findings:
                    exists = os.path.lexists(tree.root / finding.path)
                    if finding.is_repaired:
                        assert not exists, finding
                    elif finding.kind.is_problem:
                        assert "EIO" in finding.reason, finding
            if not fs.has_failed:
                assert result is not None
                assert set(found(result)) == set(expected)
                return
            again = fsck(tree.root, repairs=True)
            assert again.tally.repaired == again.tally.problems
            assert fsck(tree.root).tally.problems == 0
        raise AssertionError("it did not end")

    def test_an_orphan_is_only_one_while_its_writer_is_dead(self, tree: Tree) -> None:
        """Asked at the moment of removal: a server that came up after the check began is safe."""
        seen: list[Path] = []

        class Late(PosixFileSystem):
            def scan(self, path: str) -> Iterator[Entry]:
                if path == str(tree.file(0).parent) and not seen:
                    seen.append(temp_beside(tree.file(0), live_owner(tree.root).tag))
                return super().scan(path)

        result = fsck(tree.root, fs=Late(), repairs=True)
        assert counts(result) == {"ok": 13, "live": 1}
        assert seen[0].exists()


def _restore(root: Path, files: dict[str, bytes | None]) -> None:
    """As it was, claims and their ages left alone."""
    for name in set(snapshot(root)) - set(files):
        if (root / name).is_file():
            (root / name).unlink()
    for name, data in files.items():
        if name.startswith(".servers"):
            continue
        if data is None:
            if not os.path.lexists(root / name):  # what is no file is moved as it is
                (root / ".quarantine" / name.replace("/", "@")).rename(root / name)
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


class Stopping(PosixFileSystem):
    """Notes which chunks are opened; at the n-th the check is interrupted."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.at = at

    def open_read(self, path: str) -> int | None:
        name = path.rpartition("/")[2]
        if len(name) == 64:
            self.opened.append(path)
            if len(self.opened) == self.at:
                raise KeyboardInterrupt
        return super().open_read(path)


class TestResume:
    @pytest.mark.parametrize("at", [1, 2, 7, 25, 39, 40])
    def test_every_file_is_covered_once_in_the_report(self, root: Path, at: int) -> None:
        tree = good_tree(root, 40)
        expected = damage(tree)
        whole = fsck(root)
        first = Stopping(at)
        with pytest.raises(KeyboardInterrupt):
            # One thread: another that waits for the processor holds the mark up.
            fsck(root, fs=first, threads=1, save_interval_s=0.0)
        second = Stopping(0)
        result = fsck(root, fs=second, resumes=True)
        assert_told(result, expected)
        assert _sorted(result) == _sorted(whole)
        assert set(first.opened) | set(second.opened) == {
            str(path) for path in root.rglob("?" * 64) if path.is_file()
        }
        again = Counter(first.opened) & Counter(second.opened)
        assert len(again) <= 3 * 3, "only what was in work and its directories is read twice"
        assert result.is_resumed
        assert not list((root / ".fsck").iterdir()), "a finished run leaves nothing to resume"

    def test_a_repair_cannot_go_back_behind_the_mark_and_says_so(self, root: Path) -> None:
        tree = good_tree(root, 40)
        first = min(range(40), key=lambda index: str(tree.file(index)))
        flip(tree.file(first), 4096)
        with pytest.raises(KeyboardInterrupt):
            fsck(root, fs=Stopping(20), save_interval_s=0.0)
        result = fsck(root, resumes=True, repairs=True)
        assert (result.tally.problems, result.tally.repaired) == (1, 0)
        assert result.warnings == (
            "the interrupted check ran without repair: what it had found is left as it is",
        )
        assert fsck(root, repairs=True).tally.repaired == 1

    def test_nothing_to_resume_checks_all(self, tree: Tree) -> None:
        result = fsck(tree.root, resumes=True)
        assert (result.is_resumed, counts(result)) == (False, {"ok": 13})

    def test_a_new_check_forgets_an_interrupted_one(self, tree: Tree) -> None:
        with pytest.raises(KeyboardInterrupt):
            fsck(tree.root, fs=Stopping(10), save_interval_s=0.0)
        assert counts(fsck(tree.root)) == {"ok": 13}
        assert not fsck(tree.root, resumes=True).is_resumed

    def test_a_state_that_cannot_be_kept_is_a_warning(self, tree: Tree) -> None:
        class Full(PosixFileSystem):
            def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
                if len(data) > 100:
                    raise StorageUnavailable("write: ENOSPC")
                super().write_all(fd, data, offset)

        result = fsck(tree.root, fs=Full(), save_interval_s=0.0)
        assert counts(result) == {"ok": 13}
        (warning,) = result.warnings
        assert "ENOSPC" in warning

    def test_no_claim_is_left_behind(self, tree: Tree) -> None:
        fsck(tree.root)
        with pytest.raises(KeyboardInterrupt):
            fsck(tree.root, fs=Stopping(3))
        assert os.listdir(tree.root / ".servers") == []


def _sorted(result: FsckResult) -> tuple[object, ...]:
    tally = result.tally
    lines = sorted((it.path, it.kind, it.reason) for it in tally.findings)
    return lines, tally.counts, tally.directories, tally.size_bytes, tally.direct_files


def test_what_is_in_work_is_bounded(root: Path) -> None:
    """However large the tree, and however slow its first file."""
    good_tree(root, 200)
    slow = threading.Event()
    most: list[int] = []

    class Slow(PosixFileSystem):
        first = True

        def open_read(self, path: str) -> int | None:
            if path.endswith("identity") or not self.first:
                return super().open_read(path)
            self.first = False
            assert slow.wait(30)
            return super().open_read(path)

    class Watching(Watcher):
        def moved(self, directory: str, seen: InOrder) -> None:
            most.append(len(seen))
            if seen.files > 150:
                slow.set()

        def found(self, finding: Finding) -> None:
            raise AssertionError(finding)

    result = fsck_blocking(Slow(), str(root), FsckOptions(threads=2), watcher=Watching())
    assert result.tally.files == 201
    assert max(most) <= 2 * 2 + 2
