"""Times of last use reach the files, not more often than asked, and within a bound."""

import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.fs import PosixFileSystem
from kvserve.policy.eviction import use_stamp
from kvserve.store import recency as recency_module
from kvserve.store.open_chunks import OpenChunk
from kvserve.store.recency import Recency
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.unit.samples import descriptor_of

NOW = 1_000_000.0


def chunk(path: Path, used_at: float = 0.0) -> OpenChunk:
    path.touch()
    geometry = ChunkGeometry(descriptor_of(1).key(0))
    return OpenChunk(str(path), None, array("Q"), geometry, b"", used_at)


def recency(fs: Any = None) -> Recency:
    return Recency(fs or PosixFileSystem(), interval_s=60.0)


def used_at(path: Path) -> float:
    return path.stat().st_mtime


def test_a_prefix_is_stamped_from_its_head_down(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    notes = recency()
    notes.fetched([chunk(paths[0]), None, chunk(paths[2])], NOW)
    notes.stored([str(path) for path in paths], [1], NOW)
    paths[1].touch()
    assert notes.flush_blocking() == 0
    assert [used_at(path) for path in paths] == [use_stamp(NOW, index) for index in range(3)]


def test_at_most_once_in_the_interval(tmp_path: Path) -> None:
    notes = recency()
    used = chunk(tmp_path / "a")
    notes.fetched([used], NOW)
    notes.fetched([used], NOW + 59.9)
    assert notes.flush_blocking() == 0
    assert used_at(tmp_path / "a") == NOW
    notes.fetched([used], NOW + 59.9)
    assert len(notes) == 0
    notes.fetched([used], NOW + 60.0)
    notes.flush_blocking()
    assert used_at(tmp_path / "a") == NOW + 60.0


def test_a_pinned_chunk_needs_no_stamp(tmp_path: Path) -> None:
    notes = recency()
    notes.fetched([chunk(tmp_path / "a", float("inf"))], NOW)
    assert len(notes) == 0


def test_notes_are_bounded_and_written_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recency_module, "_NOTES_MAX", 5)
    monkeypatch.setattr(recency_module, "_NOTES_A_ROUND", 2)
    notes = recency()
    chunks = [chunk(tmp_path / str(number)) for number in range(8)]
    notes.fetched(chunks, NOW)
    notes.stored(["x"], [0], NOW)
    assert len(notes) == 5
    assert [it.used_at for it in chunks[5:]] == [0.0] * 3, "due again at the next use"
    assert [notes.flush_blocking() for _ in range(3)] == [3, 1, 0]
    assert sum(used_at(tmp_path / str(number)) < NOW + 1 for number in range(8)) == 5


def test_a_file_that_is_gone_or_cannot_be_stamped_keeps_none_from_it(tmp_path: Path) -> None:
    fs = FaultyFileSystem(2, verbs=frozenset(["touch"]))
    notes = recency(fs)
    notes.fetched([chunk(tmp_path / name) for name in "abcd"], NOW)
    os.unlink(tmp_path / "c")
    with pytest.raises(StorageUnavailable):
        notes.flush_blocking()
    assert used_at(tmp_path / "a") == NOW
    assert used_at(tmp_path / "d") == use_stamp(NOW, 3)
    assert notes.flush_blocking() == 0
