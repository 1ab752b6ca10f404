"""What every `FileSystem` promises, as tests: subclass `FileSystemContract` for yours.

```python
class TestMine(FileSystemContract):
    @pytest.fixture
    def fs(self) -> MyFileSystem: ...
    @pytest.fixture
    def tree(self) -> str: ...              # an existing, empty directory
    def put(self, path: str, data: bytes) -> None: ...
    def get(self, path: str) -> bytes | None: ...
```

`put` and `get` reach the files behind the file system's back, so that reading and writing are
tested each by itself and a pair of opposite mistakes cannot cancel out.
"""

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from random import Random

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.fs import FileSystem

KV = bytes(range(256)) * 64


class FileSystemContract(ABC):
    """One test class; the names of its tests are the contract."""

    @pytest.fixture
    @abstractmethod
    def fs(self) -> FileSystem:
        """The file system under test."""

    @pytest.fixture
    @abstractmethod
    def tree(self) -> str:
        """An existing, empty directory."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Makes a file, its directories too."""

    @abstractmethod
    def get(self, path: str) -> bytes | None:
        """A file's bytes; None if there is none."""

    @pytest.fixture
    def reading(self, fs: FileSystem) -> Iterator[Callable[[str], int]]:
        """Opens for reading; closes at the end of the test."""
        fds: list[int] = []

        def open_it(path: str) -> int:
            fd = fs.open_read(path)
            assert fd is not None
            fds.append(fd)
            return fd

        yield open_it
        for fd in fds:
            fs.close(fd)

    # full_retries

    def test_full_retries_are_few(self, fs: FileSystem) -> None:
        """Each costs a copy of the file."""
        assert 0 <= fs.full_retries <= 3

    # open_read

    def test_open_read_of_a_fifo_does_not_wait_for_a_writer(
        self, fs: FileSystem, tree: str
    ) -> None:
        try:
            os.mkfifo(f"{tree}/fifo")
        except OSError:
            pytest.skip("a tree without FIFOs")
        fd = fs.open_read(f"{tree}/fifo")
        assert fd is not None
        with pytest.raises(StorageUnavailable):
            fs.read_into(fd, memoryview(bytearray(8)), 0)
        fs.close(fd)

    def test_open_read_of_a_missing_file_is_none(self, fs: FileSystem, tree: str) -> None:
        assert fs.open_read(f"{tree}/absent") is None

    def test_a_link_to_itself_is_no_file(self, fs: FileSystem, tree: str) -> None:
        loop = f"{tree}/loop"
        try:
            os.symlink(loop, loop)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            pytest.skip("this file system has no symbolic links")
        assert fs.open_read(loop) is None
        assert fs.stat(loop) is None
        assert not fs.touch(loop, 1.0)
        assert not fs.mark(loop, is_marked=True)
        self.put(f"{tree}/new", KV)
        fs.rename(f"{tree}/new", loop)
        assert self.get(loop) == KV

    def test_open_read_below_a_missing_directory_or_a_file_is_none(
        self, fs: FileSystem, tree: str
    ) -> None:
        self.put(f"{tree}/file", KV)
        assert fs.open_read(f"{tree}/absent/x") is None
        assert fs.open_read(f"{tree}/file/x") is None

    # create

    def test_create_makes_an_empty_file_to_write(self, fs: FileSystem, tree: str) -> None:
        fd = fs.create(f"{tree}/new")
        assert fd is not None
        assert self.get(f"{tree}/new") == b""
        fs.write_all(fd, b"kv", 0)
        fs.close(fd)
        assert self.get(f"{tree}/new") == b"kv"

    def test_create_never_touches_an_existing_file(self, fs: FileSystem, tree: str) -> None:
        """Two writers never share a temporary file."""
        self.put(f"{tree}/taken", KV)
        with pytest.raises(FileExistsError):
            fs.create(f"{tree}/taken")
        assert self.get(f"{tree}/taken") == KV

    def test_create_of_one_name_by_many_threads_succeeds_once(
        self, fs: FileSystem, tree: str
    ) -> None:
        fds: list[int] = []
        refused: list[FileExistsError] = []
        barrier = threading.Barrier(8)

        def create() -> None:
            barrier.wait()
            try:
                fd = fs.create(f"{tree}/one")
            except FileExistsError as error:
                refused.append(error)
            else:
                assert fd is not None
                fds.append(fd)

        run_together([create] * 8)
        assert (len(fds), len(refused)) == (1, 7)
        fs.close(fds[0])

    def test_create_in_a_missing_directory_is_none(self, fs: FileSystem, tree: str) -> None:
        assert fs.create(f"{tree}/absent/new") is None
        assert fs.list_dir(tree) == []

    def test_create_below_a_file_is_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", b"")
        with pytest.raises(StorageUnavailable, match=rf"create {tree}/file/x: ENOTDIR"):
            fs.create(f"{tree}/file/x")

    # open_write

    def test_open_write_keeps_what_is_there(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", b"0123456789")
        fd = fs.open_write(f"{tree}/file")
        fs.write_all(fd, b"kv", 4)
        fs.close(fd)
        assert self.get(f"{tree}/file") == b"0123kv6789"

    def test_open_write_of_a_missing_file_is_refused(self, fs: FileSystem, tree: str) -> None:
        with pytest.raises(StorageUnavailable, match=rf"open .*{tree}/absent: ENOENT"):
            fs.open_write(f"{tree}/absent")
        assert fs.list_dir(tree) == []

    # close

    def test_close_of_what_is_not_open_is_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", b"")
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        fs.close(fd)
        with pytest.raises(StorageUnavailable, match=r"close .*: EBADF"):
            fs.close(fd)

    # read_into

    def test_read_into_fills_the_buffer_from_the_offset(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", KV)
        buffer = bytearray(308)
        assert fs.read_into(reading(f"{tree}/file"), memoryview(buffer), 100) == 308
        assert buffer == KV[100:408]

    def test_read_into_is_positional_and_leaves_no_position(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", KV)
        fd = reading(f"{tree}/file")
        for offset in (500, 0, 500):
            buffer = bytearray(8)
            assert fs.read_into(fd, memoryview(buffer), offset) == 8
            assert buffer == KV[offset : offset + 8]

    def test_read_into_is_short_only_at_the_end_of_the_file(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", b"0123456789")
        fd = reading(f"{tree}/file")
        buffer = bytearray(b"............")
        assert fs.read_into(fd, memoryview(buffer), 0) == 10
        assert fs.read_into(fd, memoryview(buffer), 10) == 0
        assert fs.read_into(fd, memoryview(buffer), 1 << 40) == 0
        assert buffer == b"0123456789..", "nothing is written beyond what was read"

    def test_read_into_no_room_reads_nothing(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", KV)
        assert fs.read_into(reading(f"{tree}/file"), memoryview(b""), 0) == 0

    def test_read_parts_fills_any_number_of_buffers_in_order(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        """More than one system call takes, some of them empty."""
        self.put(f"{tree}/file", KV)
        fd = reading(f"{tree}/file")
        for size in (1, 0, 7, len(KV)):
            buffers = [bytearray(size) for _ in range(2500)]
            got = fs.read_parts(fd, [memoryview(it) for it in buffers], 3)
            assert got == min(2500 * size, len(KV) - 3)
            assert b"".join(buffers)[:got] == KV[3 : 3 + got]
        assert fs.read_parts(fd, [], 0) == 0
        assert fs.read_parts(fd, [memoryview(bytearray(9))], len(KV)) == 0

    def test_one_descriptor_is_read_by_many_threads_at_once(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        data = Random(1).randbytes(1 << 20)
        self.put(f"{tree}/file", data)
        fd = reading(f"{tree}/file")
        wrong: list[int] = []

        def read(seed: int) -> None:
            random = Random(seed)
            for _ in range(100):
                offset = random.randrange(len(data) - 4096)
                buffer = bytearray(4096)
                got = fs.read_into(fd, memoryview(buffer), offset)
                if got != 4096 or buffer != data[offset : offset + 4096]:
                    wrong.append(offset)

        run_together([lambda seed=seed: read(seed) for seed in range(8)])  # type: ignore[misc]
        assert wrong == []

    def test_reads_of_what_is_not_open_are_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        fs.close(fd)
        with pytest.raises(StorageUnavailable, match=r"read .*: EBADF"):
            fs.read_into(fd, memoryview(bytearray(1)), 0)
        with pytest.raises(StorageUnavailable):
            fs.read_parts(fd, [memoryview(bytearray(1))], 0)

    # read_cached

    def test_read_cached_gives_the_same_bytes_or_none(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", KV)
        fd = reading(f"{tree}/file")
        fs.read_into(fd, memoryview(bytearray(len(KV))), 0)
        buffer = bytearray(300)
        got = fs.read_cached(fd, memoryview(buffer), 50)
        if got is not None:
            assert 0 < got <= 300
            assert buffer[:got] == KV[50 : 50 + got]

    def test_read_cached_beyond_the_end_gives_no_bytes(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        self.put(f"{tree}/file", b"kv")
        buffer = bytearray(8)
        fd = reading(f"{tree}/file")
        assert fs.read_cached(fd, memoryview(buffer), 100) in (0, None)
        assert fs.read_cached(fd, memoryview(buffer), 0) in (2, None)

    def test_read_cached_never_raises_what_a_waiting_read_will_say(
        self, fs: FileSystem, tree: str
    ) -> None:
        self.put(f"{tree}/file", KV)
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        fs.close(fd)
        assert fs.read_cached(fd, memoryview(bytearray(1)), 0) is None

    # write_all

    def test_write_all_writes_at_the_offset_and_holes_are_zeros(
        self, fs: FileSystem, tree: str
    ) -> None:
        """Slices are written in any order, alignment gaps never."""
        fd = fs.create(f"{tree}/new")
        assert fd is not None
        fs.write_all(fd, memoryview(b"second"), 4096)
        fs.write_all(fd, b"first", 10)
        fs.write_all(fd, b"", 9999)
        fs.close(fd)
        assert self.get(f"{tree}/new") == bytes(10) + b"first" + bytes(4081) + b"second"

    def test_write_all_takes_large_data_whole(self, fs: FileSystem, tree: str) -> None:
        data = Random(2).randbytes(8 << 20)
        fd = fs.create(f"{tree}/new")
        assert fd is not None
        fs.write_all(fd, data, 0)
        fs.close(fd)
        assert self.get(f"{tree}/new") == data

    def test_one_descriptor_is_written_by_many_threads_at_once(
        self, fs: FileSystem, tree: str
    ) -> None:
        fd = fs.create(f"{tree}/new")
        assert fd is not None

        def write(number: int) -> None:
            for at in range(number, 256, 8):
                fs.write_all(fd, bytes([at]) * 100, at * 100)

        run_together([lambda number=number: write(number) for number in range(8)])  # type: ignore[misc]
        fs.close(fd)
        assert self.get(f"{tree}/new") == b"".join(bytes([at]) * 100 for at in range(256))

    def test_writing_what_is_not_open_for_it_is_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        with pytest.raises(StorageUnavailable, match=r"write .*: EBADF"):
            fs.write_all(fd, b"kv", 0)
        fs.close(fd)
        assert self.get(f"{tree}/file") == KV

    # sync, sync_dir

    def test_sync_keeps_bytes_and_sync_dir_names(self, fs: FileSystem, tree: str) -> None:
        fd = fs.create(f"{tree}/new")
        assert fd is not None
        fs.write_all(fd, b"kv", 0)
        fs.sync(fd)
        fs.sync_dir(tree)
        fs.close(fd)
        assert self.get(f"{tree}/new") == b"kv"

    def test_sync_of_what_is_not_there_is_refused(self, fs: FileSystem, tree: str) -> None:
        fd = fs.create(f"{tree}/new")
        assert fd is not None
        fs.close(fd)
        with pytest.raises(StorageUnavailable, match="EBADF"):
            fs.sync(fd)
        with pytest.raises(StorageUnavailable, match=rf"{tree}/absent: ENOENT"):
            fs.sync_dir(f"{tree}/absent")

    # stat, touch, mark

    def test_stat_tells_the_size(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        self.put(f"{tree}/empty", b"")
        for name, size in (("file", len(KV)), ("empty", 0)):
            found = fs.stat(f"{tree}/{name}")
            assert found is not None
            assert found.size_bytes == size
            assert found.disk_bytes >= 0
            assert not found.is_marked

    def test_stat_of_a_missing_file_is_none(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        assert fs.stat(f"{tree}/absent") is None
        assert fs.stat(f"{tree}/absent/x") is None
        assert fs.stat(f"{tree}/file/x") is None

    def test_an_open_file_tells_the_same(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        fd = fs.open_read(f"{tree}/file")
        assert fd is not None
        assert fs.stat_open(fd) == fs.stat(f"{tree}/file")
        fs.close(fd)
        with pytest.raises(StorageUnavailable, match="EBADF"):
            fs.stat_open(fd)

    def test_a_touched_file_keeps_its_time_and_bytes(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        assert fs.touch(f"{tree}/file", 1_600_000_000.25)
        found = fs.stat(f"{tree}/file")
        assert found is not None
        assert found.modified_at == 1_600_000_000.25
        assert self.get(f"{tree}/file") == KV

    def test_a_mark_stays_until_it_is_cleared(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        for is_marked in (True, True, False, False):
            assert fs.mark(f"{tree}/file", is_marked=is_marked)
            found = fs.stat(f"{tree}/file")
            assert found is not None
            assert found.is_marked is is_marked
        assert self.get(f"{tree}/file") == KV

    def test_a_missing_file_cannot_be_touched_or_marked(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        for name in ("absent", "absent/x", "file/x"):
            assert not fs.touch(f"{tree}/{name}", 1.0)
            assert not fs.mark(f"{tree}/{name}", is_marked=True)

    # rename

    def test_rename_moves_the_name(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/.temp", KV)
        fs.rename(f"{tree}/.temp", f"{tree}/final")
        assert self.get(f"{tree}/final") == KV
        assert fs.list_dir(tree) == ["final"]

    def test_rename_replaces_and_open_readers_keep_the_old_bytes(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        """Two writers of one chunk: the second replaces the first, nobody is disturbed."""
        self.put(f"{tree}/final", b"old")
        self.put(f"{tree}/.temp", b"new")
        fd = reading(f"{tree}/final")
        fs.rename(f"{tree}/.temp", f"{tree}/final")
        buffer = bytearray(3)
        fs.read_into(fd, memoryview(buffer), 0)
        assert buffer == b"old"
        assert self.get(f"{tree}/final") == b"new"

    def test_rename_of_a_missing_file_is_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/final", KV)
        with pytest.raises(StorageUnavailable, match=rf"rename {tree}/absent: ENOENT"):
            fs.rename(f"{tree}/absent", f"{tree}/final")
        assert self.get(f"{tree}/final") == KV

    def test_rename_to_a_directory_is_refused_and_names_it(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/new", KV)
        fs.make_dirs(f"{tree}/in the way")
        with pytest.raises(
            StorageUnavailable, match=rf"rename to {tree}/in the way: EISDIR \(a dir"
        ):
            fs.rename(f"{tree}/new", f"{tree}/in the way")
        assert self.get(f"{tree}/new") == KV

    # unlink

    def test_unlink_says_whether_the_name_was_there(self, fs: FileSystem, tree: str) -> None:
        """A double delete is harmless."""
        self.put(f"{tree}/file", KV)
        assert fs.unlink(f"{tree}/file") is True
        assert fs.unlink(f"{tree}/file") is False
        assert self.get(f"{tree}/file") is None

    def test_unlink_below_a_missing_directory_or_a_file_is_false(
        self, fs: FileSystem, tree: str
    ) -> None:
        self.put(f"{tree}/file", KV)
        assert fs.unlink(f"{tree}/absent/x") is False
        assert fs.unlink(f"{tree}/file/x") is False

    def test_an_open_reader_outlives_the_name(
        self, fs: FileSystem, tree: str, reading: Callable[[str], int]
    ) -> None:
        """T12: evicted under a read, the reader still gets the original bytes."""
        self.put(f"{tree}/file", KV)
        fd = reading(f"{tree}/file")
        fs.unlink(f"{tree}/file")
        buffer = bytearray(len(KV))
        assert fs.read_into(fd, memoryview(buffer), 0) == len(KV)
        assert buffer == KV

    # make_dirs, list_dir

    def test_make_dirs_makes_parents_and_is_content_with_existing_ones(
        self, fs: FileSystem, tree: str
    ) -> None:
        for _ in range(2):
            fs.make_dirs(f"{tree}/a/b/c")
        fs.make_dirs(f"{tree}/a/b/d")
        assert sorted(fs.list_dir(f"{tree}/a/b")) == ["c", "d"]

    def test_make_dirs_by_many_threads(self, fs: FileSystem, tree: str) -> None:
        barrier = threading.Barrier(8)

        def make() -> None:
            barrier.wait()
            fs.make_dirs(f"{tree}/a/b/c/d")

        run_together([make] * 8)
        assert fs.list_dir(f"{tree}/a/b/c") == ["d"]

    def test_make_dirs_where_a_file_is_in_the_way_is_refused(
        self, fs: FileSystem, tree: str
    ) -> None:
        self.put(f"{tree}/file", KV)
        for path in (f"{tree}/file", f"{tree}/file/a"):
            with pytest.raises(StorageUnavailable, match=rf"mkdir {path}: "):
                fs.make_dirs(path)

    def test_list_dir_has_every_name_dot_names_too(self, fs: FileSystem, tree: str) -> None:
        for name in ("b", ".hidden", "a"):
            self.put(f"{tree}/dir/{name}", KV)
        fs.make_dirs(f"{tree}/dir/sub")
        assert sorted(fs.list_dir(f"{tree}/dir")) == [".hidden", "a", "b", "sub"]

    def test_list_dir_of_a_missing_directory_is_empty(self, fs: FileSystem, tree: str) -> None:
        assert fs.list_dir(f"{tree}/absent") == []

    def test_scan_has_every_name_with_what_it_names(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/dir/file", KV)
        self.put(f"{tree}/dir/.hidden", b"")
        fs.make_dirs(f"{tree}/dir/sub")
        assert sorted((entry.name, entry.kind) for entry in fs.scan(f"{tree}/dir")) == [
            (".hidden", "file"),
            ("file", "file"),
            ("sub", "directory"),
        ]

    def test_scan_of_a_missing_directory_is_empty(self, fs: FileSystem, tree: str) -> None:
        assert list(fs.scan(f"{tree}/absent")) == []

    def test_scan_of_a_file_is_refused(self, fs: FileSystem, tree: str) -> None:
        self.put(f"{tree}/file", KV)
        with pytest.raises(StorageUnavailable, match="ENOTDIR"):
            list(fs.scan(f"{tree}/file"))

    def test_names_may_go_while_they_are_scanned(self, fs: FileSystem, tree: str) -> None:
        """A repair removes what it is shown."""
        for number in range(300):
            self.put(f"{tree}/dir/{number}", b"")
        shown = 0
        for entry in fs.scan(f"{tree}/dir"):
            assert fs.unlink(f"{tree}/dir/{entry.name}")
            shown += 1
        assert shown == 300

    # kind

    def test_kind_is_a_name_or_a_number(self, fs: FileSystem, tree: str) -> None:
        kind = fs.kind(tree)
        assert kind
        assert kind == kind.strip().lower()

    def test_kind_of_a_missing_path_is_refused(self, fs: FileSystem, tree: str) -> None:
        with pytest.raises(StorageUnavailable, match=rf"{tree}/absent: ENOENT"):
            fs.kind(f"{tree}/absent")


def run_together(calls: list[Callable[[], None]]) -> None:
    """Each call on a thread of its own; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
