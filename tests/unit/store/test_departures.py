"""What is being evicted and what was, told by several evictors."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.store.departures import LEAVING_S_MAX, Departures
from kvserve.store.journal import Record, RecordKind


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def record(key: int, kind: RecordKind, at: float = 100.0) -> Record:
    return Record(key, kind, at)


LEAVING, GONE, STAYED = RecordKind.LEAVING, RecordKind.GONE, RecordKind.STAYED


def departures(clock: Clock | None = None, remembered_max: int = 10) -> Departures:
    return Departures(remembered_max=remembered_max, clock=clock or Clock())


def test_a_pick_is_open_until_its_end_is_told() -> None:
    told = departures()
    told.apply("a", [record(1, LEAVING), record(2, LEAVING)])
    assert told.is_leaving(1)
    assert not told.was_evicted(1)
    told.apply("a", [record(1, GONE), record(2, STAYED)])
    assert [told.is_leaving(1), told.is_leaving(2)] == [False, False]
    assert [told.was_evicted(1), told.was_evicted(2)] == [True, False]


def test_one_evictors_end_is_not_that_of_the_others_pick() -> None:
    """A steward and a tool pick the same chunk; it stays for one, and the other deletes it."""
    told = departures()
    told.apply("a", [record(1, LEAVING)])
    told.apply("b", [record(1, LEAVING), record(1, STAYED)])
    assert told.is_leaving(1)
    told.apply("a", [record(1, STAYED)])
    assert not told.is_leaving(1)


def test_picks_of_a_dead_evictor_end_by_themselves() -> None:
    clock = Clock()
    told = departures(clock)
    told.apply("a", [record(1, LEAVING)])
    clock.now = 100.0 + LEAVING_S_MAX
    assert told.is_leaving(1)
    clock.now += 0.1
    assert not told.is_leaving(1)
    told.apply("b", [record(1, LEAVING, clock.now)])
    assert told.is_leaving(1), "a later pick counts"


def test_the_oldest_are_forgotten_first() -> None:
    told = departures(remembered_max=3)
    told.apply("a", [record(key, GONE) for key in (1, 2, 3)])
    told.apply("a", [record(1, GONE), record(4, GONE)])
    assert [told.was_evicted(key) for key in (1, 2, 3, 4)] == [True, False, True, True]
    told.apply("a", [record(key, LEAVING) for key in (5, 6, 7, 8)])
    assert [told.is_leaving(key) for key in (5, 6, 7, 8)] == [False, True, True, True]
    assert repr(told) == "<Departures 3 leaving, 3 gone>"


def test_leases_are_no_departures() -> None:
    told = departures()
    told.apply("a", [record(1, RecordKind.LEASED, 500.0)])
    assert not told.is_leaving(1)
    assert not told.was_evicted(1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 3), st.sampled_from([LEAVING, GONE, STAYED])
        )
    )
)
def test_against_sets(steps: list[tuple[str, int, RecordKind]]) -> None:
    told = departures()
    leaving: set[tuple[str, int]] = set()
    gone: set[int] = set()
    for evictor, key, kind in steps:
        told.apply(evictor, [record(key, kind)])
        if kind is LEAVING:
            leaving.add((evictor, key))
        else:
            leaving.discard((evictor, key))
        gone |= {key} if kind is GONE else set()
    for key in range(4):
        assert told.is_leaving(key) == any(found == key for _, found in leaving)
        assert told.was_evicted(key) == (key in gone)
