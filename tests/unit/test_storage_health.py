"""Five failed requests in a row of one kind are a storage that fails; one success is not."""

import pytest

from kvserve.model import ChunkStatus
from kvserve.storage_health import StorageHealth

HIT, ABSENT, LATE = ChunkStatus.HIT, ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_TIMEOUT
EIO, STORED, REFUSED = ChunkStatus.MISS_ERROR, ChunkStatus.STORED, ChunkStatus.STORE_ERROR


@pytest.fixture
def turns() -> list[bool]:
    return []


@pytest.fixture
def health(turns: list[bool]) -> StorageHealth:
    health = StorageHealth()
    health.changed = lambda: turns.append(health.is_good)
    return health


def test_it_turns_after_five_and_back_with_one(health: StorageHealth, turns: list[bool]) -> None:
    for _ in range(4):
        health.note_reading([LATE, EIO])
    assert health.is_good
    for _ in range(3):
        health.note_reading([EIO])
    assert turns == [False], "told once"
    health.note_reading([EIO, HIT])
    assert turns == [False, True]


@pytest.mark.parametrize("answer", [HIT, ABSENT, ChunkStatus.MISS_CORRUPT])
def test_a_miss_is_an_answer(health: StorageHealth, turns: list[bool], answer: ChunkStatus) -> None:
    for _ in range(4):
        health.note_reading([LATE])
    health.note_reading([answer, LATE])
    health.note_reading([LATE])
    assert turns == []


@pytest.mark.parametrize(
    "silent", [[], [ChunkStatus.NO_SPACE], [ChunkStatus.INCOMPLETE, ChunkStatus.NO_SPACE]]
)
def test_what_tells_nothing_changes_nothing(
    health: StorageHealth, turns: list[bool], silent: list[ChunkStatus]
) -> None:
    for _ in range(4):
        health.note_writing([REFUSED])
        health.note_writing(silent)
    assert turns == []
    health.note_writing([REFUSED, ChunkStatus.NO_SPACE])
    assert turns == [False]


def test_lookups_that_work_do_not_hide_stores_that_fail(
    health: StorageHealth, turns: list[bool]
) -> None:
    """D5: every store failed, and the tier was "healthy"."""
    for _ in range(5):
        health.note_writing([REFUSED])
        health.note_reading([ABSENT])
    assert turns == [False]
    health.note_writing([STORED, REFUSED])
    assert turns == [False, True]


def test_a_probe_speaks_for_both_kinds(health: StorageHealth, turns: list[bool]) -> None:
    for _ in range(5):
        health.note_writing([REFUSED])
        health.note_reading([LATE])
    health.works()
    assert turns == [False, True]
