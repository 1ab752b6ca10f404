"""The state of an interrupted check: whole or absent, and never another check's."""

import json
import os
from pathlib import Path

import pytest

from kvserve.care.saved_run import Progress, SavedRun
from kvserve.care.tally import Finding, Kind, Tally
from kvserve.errors import InvalidRequest, StorageError, StorageUnavailable
from kvserve.fs import PosixFileSystem
from kvserve.testing.faulty_fs import FaultyFileSystem

FS = PosixFileSystem()


def progress(*mark: str) -> Progress:
    tally = Tally(directories=2)
    tally.count(Finding("a", Kind.CORRUPT, "r"))
    return Progress(mark, tally, repairs=True, took_s=1.5)


def test_it_comes_back(tmp_path: Path) -> None:
    SavedRun(FS, str(tmp_path)).save_blocking(progress("t", "n"))
    again = SavedRun(FS, str(tmp_path))
    assert again.load_blocking() == progress("t", "n")
    again.save_blocking(progress("u"))
    assert SavedRun(FS, str(tmp_path)).load_blocking() == progress("u")
    again.finish_blocking()
    assert SavedRun(FS, str(tmp_path)).load_blocking() is None
    assert os.listdir(tmp_path / ".fsck") == []


def test_the_last_that_started_owns_it(tmp_path: Path) -> None:
    first, second = SavedRun(FS, str(tmp_path)), SavedRun(FS, str(tmp_path))
    first.save_blocking(progress("a"))
    second.forget_blocking()
    second.save_blocking(progress("b"))
    os.utime(tmp_path / ".fsck" / "state", (1, 1))  # some clocks tick slower than this test
    with pytest.raises(StorageUnavailable, match="another check's"):
        first.save_blocking(progress("c"))
    first.finish_blocking()
    assert SavedRun(FS, str(tmp_path)).load_blocking() == progress("b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": 2}',
        json.dumps(
            {
                "version": 1,
                "mark": ["a"] * 9,
                "repairs": True,
                "took_s": 1,
                "tally": Tally().to_json(),
            }
        ),
        json.dumps(
            {"version": 1, "mark": [1], "repairs": True, "took_s": 1, "tally": Tally().to_json()}
        ),
        json.dumps({"version": 1, "mark": [], "repairs": True, "took_s": 1, "tally": {}}),
        json.dumps(
            {"version": 1, "mark": [], "repairs": True, "took_s": "1", "tally": Tally().to_json()}
        ),
        "\udcff",
    ],
)
def test_a_damaged_state_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / ".fsck").mkdir()
    (tmp_path / ".fsck" / "state").write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(InvalidRequest, match=r"\.fsck/state is damaged .* without --resume"):
        SavedRun(FS, str(tmp_path)).load_blocking()


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    """Each call of the file system in turn; the next save works."""
    for fails_at in range(1, 50):
        fs = FaultyFileSystem()
        saved = SavedRun(FS, str(tmp_path))
        saved.forget_blocking()
        saved.save_blocking(progress("before"))
        faulty = SavedRun(fs, str(tmp_path))
        assert faulty.load_blocking() == progress("before")
        fs.calls.clear()
        fs.fails_at = fails_at
        try:
            faulty.save_blocking(progress("after"))
        except StorageError:
            assert SavedRun(FS, str(tmp_path)).load_blocking() == progress("before")
            faulty.save_blocking(progress("again"))
            assert SavedRun(FS, str(tmp_path)).load_blocking() == progress("again")
        if not fs.has_failed:
            assert fails_at > 5
            return
    raise AssertionError("it did not end")
