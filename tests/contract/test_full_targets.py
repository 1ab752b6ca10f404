"""ENOSPC of one storage target: a chunk moves to another, whole, and nothing is left behind."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Timer

import pytest

from kvserve.errors import QuotaExceeded, StorageError, StorageFull, StorageUnavailable
from kvserve.fs import FileSystem
from kvserve.store.namespaces import Namespaces
from kvserve.store.owners import Owner
from kvserve.store.paths import TempNames, namespace_dir
from kvserve.store.temp_file import TempFile
from kvserve.testing.faulty_fs import CHANGING, READING
from kvserve.testing.full_targets import FullTargetsFileSystem
from tests.contract.file_system_contract import run_together
from tests.contract.store_tree import ABSENT, HIT, SIZES, Tree
from tests.contract.test_posix import OnDisk
from tests.descriptors import open_files
from tests.unit.samples import descriptor_of, slice_of

FILE_SIZE = 16384
"""Of one chunk: header at 0, slices at 4096, 8192 and 12288, the file ends with padding."""


class TestWithRoom(OnDisk):
    """The double keeps the contract where nothing is full."""

    @pytest.fixture
    def fs(self) -> FileSystem:
        return FullTargetsFileSystem(full=())

    @pytest.fixture
    def tree(self, tmp_path: Path) -> str:
        return str(tmp_path)


def is_clean(tree: Tree, files_before: int) -> bool:
    """No temporary file, no descriptor, no count of one."""
    tree.store.open_chunks.close_idle_blocking()
    temps = [name for name in tree.files() if "/." in name]
    return not temps and open_files() == files_before and tree.store.open_chunks.taken == 0


@pytest.fixture(params=[64, 0], ids=["with descriptors", "without"])
def open_files_max(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# Refused in the first slice, between slices, in the middle of one, at the padding.
@pytest.mark.parametrize("room_bytes", [0, 4096, 4100, 8192, 8300, 12288, 12300, 12400])
def test_a_chunk_moves_off_a_full_target(
    tmp_path: Path, room_bytes: int, open_files_max: int
) -> None:
    fs = FullTargetsFileSystem(room_bytes=room_bytes)
    tree = Tree(tmp_path / "kv", fs=fs, open_files_max=open_files_max, survives_power_loss=True)
    before = open_files()
    tree.put(0)
    assert fs.created == 2, "it was full, else no test of it"
    assert tree.status(0) == HIT
    assert tree.is_whole(0)
    assert tree.file(0).stat().st_size == FILE_SIZE
    assert is_clean(tree, before)


def test_pieces_in_any_order_survive_the_move(tmp_path: Path) -> None:
    """Layer 2 is written, then layer 0 does not fit any more: the copy has a hole."""
    tree = Tree(tmp_path / "kv", fs=FullTargetsFileSystem(room_bytes=12300))
    writer = tree.begin(0, range(0))
    for layer in (1, 0, 2):
        data = memoryview(slice_of(layer, 0, SIZES[layer]))
        writer.write_blocking(layer, 60, data[60:])
        writer.write_blocking(layer, 0, data[:60])
    writer.commit_blocking(tree.sums(0))
    assert tree.is_whole(0)


def temp_file(fs: FileSystem, path: Path) -> TempFile:
    names = TempNames("aB3", Random(1))
    return TempFile(fs, None, names, path=str(path), survives_power_loss=False)


def test_a_large_file_is_copied_in_pieces(tmp_path: Path) -> None:
    file = temp_file(FullTargetsFileSystem(room_bytes=2_500_000), tmp_path / "large")
    data = Random(1).randbytes(3_000_000)
    for offset in range(0, len(data), 100_000):
        file.write_blocking(data[offset : offset + 100_000], offset)
    assert file.has_moved
    file.publish_blocking()
    assert (tmp_path / "large").read_bytes() == data


@pytest.mark.parametrize("seed", range(5))
def test_many_threads_write_while_it_moves(tmp_path: Path, seed: int) -> None:
    """Two of three targets fill up under eight writers; what any of them wrote is there."""
    fs = FullTargetsFileSystem(full=(0, 1), room_bytes=64 * 700)
    file = temp_file(fs, tmp_path / "shared")
    data = Random(seed).randbytes(64 * 1024)
    offsets = list(range(0, len(data), 64))
    Random(seed).shuffle(offsets)
    before = open_files()

    def write(number: int) -> None:
        for offset in offsets[number::8]:
            file.write_blocking(data[offset : offset + 64], offset)

    run_together([lambda number=number: write(number) for number in range(8)])  # type: ignore[misc]
    assert fs.created == 3
    file.publish_blocking()
    assert (tmp_path / "shared").read_bytes() == data
    assert os.listdir(tmp_path) == ["shared"]
    assert open_files() == before


def test_a_move_waits_for_the_other_threads_writes(tmp_path: Path) -> None:
    """Else it would close a descriptor that is being written through, or miss those bytes."""
    writes, go_on = threading.Event(), threading.Event()

    class Slow(FullTargetsFileSystem):
        def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
            if data == b"slow":
                writes.set()
                assert go_on.wait(10)
            super().write_all(fd, data, offset)

    fs = Slow(room_bytes=100)
    file = temp_file(fs, tmp_path / "shared")

    def slow() -> None:
        file.write_blocking(b"slow", 0)

    def refused() -> None:
        assert writes.wait(10)
        Timer(0.1, go_on.set).start()
        file.write_blocking(b"more", 98)
        assert go_on.is_set(), "it moved under the other's hands"

    run_together([slow, refused])
    file.publish_blocking()
    assert (tmp_path / "shared").read_bytes() == b"slow" + bytes(94) + b"more"


class TestTheBound:
    def refused(
        self, fs: FullTargetsFileSystem, root: Path, error: type[StorageError], words: str
    ) -> None:
        tree = Tree(root, fs=fs)
        before = open_files()
        writer = tree.store.writer(tree.where, 0)
        with pytest.raises(error, match=words):
            tree.write_whole(writer, 0)
        writer.abandon_blocking()
        assert tree.status(0) == ABSENT
        assert is_clean(tree, before)

    @pytest.mark.parametrize("room_bytes", [0, 8192, 12400])
    def test_all_full_is_full(self, root: Path, room_bytes: int) -> None:
        """NO_SPACE after the first file and three more."""
        fs = FullTargetsFileSystem(full=range(3), room_bytes=room_bytes)
        self.refused(fs, root, StorageFull, "ENOSPC .*, as 3 files before it")
        assert fs.created == 4

    def test_a_quota_is_final(self, root: Path) -> None:
        fs = FullTargetsFileSystem(room_bytes=8192)
        fs.has_quota = True
        self.refused(fs, root, QuotaExceeded, "EDQUOT")
        assert fs.created == 1

    def test_where_space_is_one_pool_nothing_is_tried_again(self, root: Path) -> None:
        fs = FullTargetsFileSystem(room_bytes=8192)
        fs.full_retries = 0
        self.refused(fs, root, StorageFull, "ENOSPC .No space left on device.$")
        assert fs.created == 1

    def test_refused_creates_count_too(self, tmp_path: Path) -> None:
        for refused in range(4):
            fs = FullTargetsFileSystem(full=())
            fs.creates_refused = refused
            tree = Tree(tmp_path / str(refused), fs=fs)
            tree.put(0)
            assert tree.is_whole(0)
            tree.store.open_chunks.close_idle_blocking()
        fs = FullTargetsFileSystem(full=())
        fs.creates_refused = 4
        self.refused(fs, tmp_path / "4", StorageFull, "create .*ENOSPC .*, as 3 files before it")

    def test_two_of_three_are_full(self, root: Path) -> None:
        fs = FullTargetsFileSystem(full=(0, 1), room_bytes=8192)
        tree = Tree(root, fs=fs)
        tree.put(0)
        assert fs.created == 3
        assert tree.is_whole(0)
        tree.store.open_chunks.close_idle_blocking()

    def test_what_a_full_target_lost_is_never_published(self, root: Path) -> None:
        """Written into a cache, reported as written, gone when the target is full."""
        fs = FullTargetsFileSystem(room_bytes=12300)
        fs.lost_below = 4100
        self.refused(fs, root, StorageUnavailable, "layer 0 was lost where there was no space")


# Refused while the second slice is written, and while the commit pads the file.
@pytest.mark.parametrize("room_bytes", [8200, 12400])
@pytest.mark.parametrize("error", [StorageUnavailable("EIO"), StorageFull("ENOSPC")], ids=str)
def test_every_call_of_a_move_fails_once(
    tmp_path: Path, error: StorageError, room_bytes: int, open_files_max: int
) -> None:
    """Whole, or absent and said so; nothing left but what could not be removed."""
    for fails_at in range(1, 200):
        fs = FullTargetsFileSystem(fails_at, error, room_bytes=room_bytes, verbs=CHANGING | READING)
        root = tmp_path / str(fails_at)
        tree = Tree(root, fs=fs, open_files_max=open_files_max, survives_power_loss=True)
        before = open_files()
        writer = tree.store.writer(tree.where, 0)
        raised = False
        try:
            tree.write_whole(writer, 0)
        except StorageError:
            raised = True
            with suppress(StorageError):  # removing may be the call that fails
                writer.abandon_blocking()
        other = Tree(root)
        where = f"call {fails_at}"
        if not fs.has_failed:
            assert not raised
            assert fs.created == 2
            assert fails_at > 25, "the sweep covers a whole put and a move"
            return
        where = f"call {fails_at}, {fs.calls[fails_at - 1]}"
        assert raised == (other.status(0) == ABSENT), where
        assert fs.calls[fails_at - 1] == "unlink" or is_clean(tree, before), where
        if not raised:
            assert other.is_whole(0), where
        other.put(0)
        assert other.is_whole(0), where
        other.store.open_chunks.close_idle_blocking()
    raise AssertionError("the sweep did not end")


def test_an_identity_file_moves_too(tmp_path: Path) -> None:
    fs = FullTargetsFileSystem(room_bytes=10)
    names = TempNames("aB3", Random(1))
    namespaces = Namespaces(fs, str(tmp_path), names, survives_power_loss=True)
    key = descriptor_of().key(0)
    namespaces.ensure_blocking(key)
    (written,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == tmp_path / namespace_dir(key) / "identity"
    assert written.read_bytes() == key.identity.encoded


class TestStart:
    """One full target of many keeps no server from starting."""

    def start(self, fs: FullTargetsFileSystem, root: Path) -> str:
        owner = Owner(fs, str(root), Random(1), lease_s=60.0)
        owner.claim_blocking()
        Tree(root, fs=fs).store.check_root_blocking()
        return owner.tag

    def test_claim_and_probe_move(self, root: Path) -> None:
        fs = FullTargetsFileSystem(targets=2)
        before = open_files()
        tag = self.start(fs, root)
        assert fs.created == 4, "each was refused once"
        assert Tree(root).files() == [f".servers/{tag}"]
        assert open_files() == before

    @pytest.mark.parametrize(("has_quota", "files"), [(False, 4), (True, 1)])
    def test_all_full_is_said_and_serves_what_is_stored(
        self, root: Path, has_quota: bool, files: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        fs = FullTargetsFileSystem(targets=1)
        fs.has_quota = has_quota
        before = open_files()
        tag = self.start(fs, root)
        assert "claim is not written" in caplog.text
        assert "new chunks end as NO_SPACE" in caplog.text
        assert fs.created == 2 * files
        assert Tree(root).files() == [f".servers/{tag}"], "an empty claim is one"
        assert open_files() == before


def test_a_move_that_hangs_cleans_up_when_it_comes_back(tmp_path: Path) -> None:
    """Both files go, the one that was left and the one that was to be."""
    fs = FullTargetsFileSystem(room_bytes=12300)
    tree = Tree(tmp_path / "kv", fs=fs)
    before = open_files()
    writer = tree.store.writer(tree.where, 0)

    def write() -> None:
        with suppress(StorageUnavailable):
            tree.write_whole(writer, 0)

    fs.hang(tree.file(0).name, ["read_into"])
    thread = threading.Thread(target=write)
    thread.start()
    while not fs.attempts("read_into", tree.file(0).name):
        time.sleep(0.001)
    writer.give_up()
    assert not writer.is_open
    fs.heal()
    thread.join(10)
    assert tree.files() == []
    assert is_clean(tree, before)
