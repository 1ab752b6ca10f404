"""Who gives way on a full file system."""

import pytest

from kvserve.model import ChunkStatus, Verdict
from kvserve.transfer.room import Room

FULL = Verdict(ChunkStatus.NO_SPACE, "full")


class Sink:
    def __init__(self) -> None:
        self.abandoned = 0

    def abandon_blocking(self) -> None:
        self.abandoned += 1


@pytest.fixture
def sinks() -> list[Sink]:
    return [Sink() for _ in range(3)]


@pytest.fixture
def verdicts() -> dict[int, Verdict]:
    return {}


@pytest.fixture
def room(sinks: list[Sink], verdicts: dict[int, Verdict]) -> Room:
    return Room(sinks.__getitem__, verdicts)  # type: ignore[arg-type]


def test_the_last_gives_way(room: Room, sinks: list[Sink], verdicts: dict[int, Verdict]) -> None:
    for index in (0, 2, 1):
        assert room.begins(index)
    room.ended_blocking(2)
    assert room.make_blocking(0, FULL)
    assert verdicts == {2: FULL}
    assert [sink.abandoned for sink in sinks] == [0, 0, 1]
    assert room.make_blocking(0, FULL)
    assert verdicts == {1: FULL, 2: FULL}
    assert sinks[1].abandoned == 0, "a write runs yet"
    room.ended_blocking(1)
    assert sinks[1].abandoned == 1
    assert not room.begins(1)
    assert not room.make_blocking(0, FULL), "only the one that asks is left"


def test_one_that_was_dropped_takes_nobody_with_it(
    room: Room, verdicts: dict[int, Verdict]
) -> None:
    """Two threads find the file system full at once."""
    assert room.begins(0)
    assert room.begins(1)
    assert room.make_blocking(0, FULL)
    assert not room.make_blocking(1, FULL)
    assert verdicts == {1: FULL}
    assert not room.make_blocking(0, FULL)
    assert verdicts == {1: FULL}
