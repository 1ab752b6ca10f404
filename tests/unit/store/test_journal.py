"""Journals: what a writer appended readers find once, also after failures and replacements."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.errors import StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.store import journal
from kvserve.store.journal import (
    JournalReader,
    JournalWriter,
    Record,
    RecordKind,
    read_all_blocking,
)
from kvserve.testing.faulty_fs import READING, FaultyFileSystem

records = st.builds(
    Record,
    st.integers(0, 2**64 - 1),
    st.sampled_from(RecordKind),
    st.floats(allow_nan=False),
)
FS = PosixFileSystem()


def numbered(*keys: int) -> list[Record]:
    return [Record(key, RecordKind.LEAVING, 1.0) for key in keys]


def keys_of(found: list[Record]) -> list[int]:
    return [record.key for record in found]


def add(writer: JournalWriter, some: list[Record]) -> None:
    """As who has no other records."""
    writer.append(some, lambda: some)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["append", "replace", "read"]), st.lists(records))))
def test_a_reader_finds_what_was_written_once_and_in_order(
    steps: list[tuple[str, list[Record]]],
) -> None:
    """What a replacement may have hidden is said to be missing."""
    with TemporaryDirectory() as directory:
        path = f"{directory}/j/aB3"
        writer, reader = JournalWriter(FS, path), JournalReader(FS, path)
        unread: list[Record] = []
        in_file: list[Record] = []
        was_replaced = has_read = False
        for what, some in [*steps, ("read", [])]:
            if what == "append":
                add(writer, some)
                unread += some
                in_file = in_file + some
            elif what == "replace":
                writer.replace(some)
                unread = some if not has_read else unread + some
                in_file = some
                was_replaced = was_replaced or has_read
            else:
                found, is_replaced = reader.read_blocking()
                assert is_replaced == was_replaced
                if is_replaced:
                    # What came and was replaced again in between is not seen; the rest is.
                    assert found[len(found) - len(in_file) :] == in_file
                    left = iter(unread)
                    assert all(record in left for record in found), "in order"
                else:
                    assert found == unread
                unread, was_replaced = [], False
                has_read = has_read or os.path.exists(path)
        writer.close()
        reader.close()


def test_the_end_of_the_old_file_and_all_of_the_new_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    writer, reader = JournalWriter(FS, path), JournalReader(FS, path)
    assert reader.read_blocking() == ([], False), "no file yet"
    add(writer, numbered(1))
    assert reader.read_blocking() == (numbered(1), False)
    add(writer, numbered(2))
    writer.replace(numbered(3))
    add(writer, numbered(4))
    assert reader.read_blocking() == (numbered(2, 3, 4), True)
    assert reader.read_blocking() == ([], False)
    assert read_all_blocking(FS, path) == numbered(3, 4)
    assert os.listdir(tmp_path) == ["j"]
    writer.close()
    reader.close()


def test_half_a_record_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer, reader = JournalWriter(FS, str(path)), JournalReader(FS, str(path))
    add(writer, numbered(1, 2))
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 5)
    assert reader.read_blocking() == (numbered(1), False)
    with path.open("r+b") as file:
        file.write(whole)
    assert reader.read_blocking() == (numbered(2), False)
    writer.close()
    reader.close()


def test_kinds_of_later_versions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer = JournalWriter(FS, str(path))
    add(writer, numbered(1, 2, 3))
    data = bytearray(path.read_bytes())
    data[24 + 16] = 77
    path.write_bytes(data)
    assert keys_of(read_all_blocking(FS, str(path))) == [1, 3]
    writer.close()


def test_long_files_are_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More leases than one reads at once, and than a file that is only appended to would have."""
    monkeypatch.setattr(journal, "_READ_SIZE_BYTES", 24 * 4)
    monkeypatch.setattr(journal, "_SIZE_BYTES_MAX", 24 * 16)
    path = str(tmp_path / "j")
    writer = JournalWriter(FS, path)
    writer.replace(numbered(*range(1000)))
    assert writer.is_due
    assert keys_of(read_all_blocking(FS, path)) == list(range(1000))
    writer.close()


def test_it_is_due_when_there_is_no_file_or_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SIZE_BYTES_MAX", 24 * 2)
    writer = JournalWriter(FS, str(tmp_path / "j"))
    assert writer.is_due
    add(writer, numbered(1))
    assert not writer.is_due
    add(writer, numbered(2))
    assert writer.is_due
    writer.replace(())
    assert not writer.is_due
    writer.close()


class TestFailures:
    def test_what_follows_a_torn_append_is_not_written_over_it(self, tmp_path: Path) -> None:
        """A reader that has passed the part that arrived would never see what takes its place."""
        path = str(tmp_path / "j")
        fs = FaultyFileSystem(verbs=frozenset(["write_all"]))
        writer, reader = JournalWriter(fs, path), JournalReader(FS, path)
        add(writer, numbered(1))
        fs.fails_at = len(fs.calls) + 1
        with pytest.raises(StorageUnavailable):
            add(writer, numbered(2, 3))
        assert keys_of(reader.read_blocking()[0]) == [1, 2], "half of it has arrived"
        assert writer.is_due
        add(writer, numbered(4, 5))
        assert reader.read_blocking() == (numbered(4, 5), True)
        writer.close()
        reader.close()

    @pytest.mark.parametrize("fails_at", range(1, 7))
    def test_a_failed_replacement_leaves_the_old_file_and_the_next_is_seen(
        self, tmp_path: Path, fails_at: int
    ) -> None:
        """Nothing may go to a file that never got its name."""
        path = str(tmp_path / "j")
        fs = FaultyFileSystem()
        writer = JournalWriter(fs, path)
        add(writer, numbered(1))
        fs.fails_at = len(fs.calls) + fails_at
        try:
            writer.replace(numbered(2))
        except StorageUnavailable:
            assert keys_of(read_all_blocking(FS, path)) == [1]
            assert writer.is_due
        else:  # the old file's end, which does not count, or no call was left to fail
            assert keys_of(read_all_blocking(FS, path)) == [2]
            assert fails_at in (1, 6)
        fs.fails_at = 0
        add(writer, numbered(3))
        assert keys_of(read_all_blocking(FS, path))[-1] == 3
        writer.close()

    def test_a_failed_read_is_done_again_from_the_start(self, tmp_path: Path) -> None:
        """What it had got was told to nobody."""
        path = str(tmp_path / "j")
        fs = FaultyFileSystem(verbs=READING)
        writer, reader = JournalWriter(FS, path), JournalReader(fs, path)
        add(writer, numbered(1))
        reader.read_blocking()
        add(writer, numbered(2))
        fs.fails_at = len(fs.calls) + 2
        with pytest.raises(StorageUnavailable):
            reader.read_blocking()
        assert fs.calls[-1] == "is_same"
        found, may_have_missed = reader.read_blocking()
        assert keys_of(found) == [1, 2]
        assert may_have_missed
        assert reader.read_blocking() == ([], False)
        writer.close()
        reader.close()

    def test_a_directory_that_vanishes_is_an_error_of_the_storage(self, tmp_path: Path) -> None:
        class Vanishing(PosixFileSystem):
            def create(self, path: str) -> int | None:
                return None

        with pytest.raises(StorageUnavailable, match="vanished"):
            add(JournalWriter(Vanishing(), str(tmp_path / "j")), numbered(1))


@pytest.mark.parametrize("comes_back", [False, True], ids=["removed", "another file there"])
def test_a_file_that_others_have_removed_is_started_anew(tmp_path: Path, comes_back: bool) -> None:
    """They do once they take this server for dead: what it then wrote on, nobody would read."""
    path = tmp_path / "j"
    writer, reader = JournalWriter(FS, str(path)), JournalReader(FS, str(path))
    add(writer, numbered(1))
    assert keys_of(reader.read_blocking()[0]) == [1]
    path.unlink()
    if comes_back:
        path.write_bytes(b"")
    assert writer.is_lost_blocking()
    writer.append(numbered(2), lambda: numbered(1, 2))
    assert not writer.is_lost_blocking()
    found, is_replaced = reader.read_blocking()
    assert (keys_of(found)[-2:], is_replaced) == ([1, 2], True)
    add(writer, numbered(3))
    assert keys_of(reader.read_blocking()[0]) == [3]
    writer.close()
    reader.close()
