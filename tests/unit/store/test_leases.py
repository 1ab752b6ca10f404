"""Leases: bounded, replaced by shard, released once, gone when their time has come."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import Overloaded
from kvserve.store.leases import Leases

R, S = ("t", "r"), ("t", "s")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def leases(clock: Clock | None = None, chunks_max: int = 10) -> Leases:
    return Leases(chunks_max=chunks_max, clock=clock or Clock())


def test_a_chunk_is_held_until_its_last_lease_is_released() -> None:
    some = leases()
    assert some.grant(R, "d", [1, 2], 5.0) == 105.0
    some.grant(S, "d", [2, 3], 5.0)
    assert some.chunks == 4
    assert some.release(R) == 2
    assert [some.holds(key) for key in (1, 2, 3)] == [False, True, True]
    assert some.release(R) == 0, "twice is harmless"
    assert some.release(S) == 2
    assert not some.holds(2)
    assert some.chunks == 0


def test_a_grant_replaces_what_was_held_of_that_shard_only() -> None:
    some = leases()
    some.grant(R, "d", [1, 2], 5.0)
    some.grant(R, "e", [3], 5.0)
    some.grant(R, "d", [2, 4], 5.0)
    assert [some.holds(key) for key in (1, 2, 3, 4)] == [False, True, True, True]
    some.grant(R, "d", [], 5.0)
    assert [some.holds(key) for key in (2, 3)] == [False, True]
    assert some.release(R) == 1


def test_tenants_do_not_share_requests() -> None:
    some = leases()
    some.grant(("t", "r"), "d", [1], 5.0)
    assert some.release(("u", "r")) == 0
    assert some.holds(1)


def test_expired_ones_are_dropped_when_asked_and_when_there_is_no_room() -> None:
    clock = Clock()
    some = leases(clock, chunks_max=3)
    some.grant(R, "d", [1, 2], 5.0)
    clock.now = 104.9
    some.drop_expired()
    assert some.holds(1)
    clock.now = 105.0
    some.grant(S, "d", [3, 4], 5.0)
    assert not some.holds(1)
    assert sorted(some.records()) == [(3, 110.0), (4, 110.0)]
    clock.now = 110.0
    some.drop_expired()
    assert some.records() == []


def test_beyond_the_bound_is_refused_and_what_was_held_still_is() -> None:
    some = leases(chunks_max=4)
    some.grant(R, "d", [1, 2], 5.0)
    some.grant(S, "d", [3], 5.0)
    with pytest.raises(Overloaded, match="leased_chunks_max") as refused:
        some.grant(R, "d", [1, 2, 5, 6], 5.0)
    assert refused.value.retry_after_s
    assert [some.holds(key) for key in (1, 2, 3, 5)] == [True, True, True, False]
    assert some.chunks == 3
    some.grant(R, "d", [1, 2, 5], 5.0)
    assert some.chunks == 4, "what is replaced makes room"


def test_a_grant_can_be_undone() -> None:
    some = leases()
    some.grant(R, "d", [1, 2], 5.0)
    held = some.held(R, "d")
    some.grant(R, "d", [2, 3], 9.0)
    some.put_back(R, "d", held)
    assert sorted(some.records()) == [(1, 105.0), (2, 105.0)]
    some.grant(S, "d", [7], 5.0)
    some.put_back(S, "d", None)
    assert not some.holds(7)
    assert some.chunks == 2


class Watched:
    """Instead of the lock: how many chunks came or went each time that it was held."""

    def __init__(self, some: Leases) -> None:
        self._some = some
        self.is_held = False
        self.changed: list[int] = []
        some._lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        self.is_held, self._before = True, self._some.chunks

    def __exit__(self, *error: object) -> None:
        self.is_held = False
        self.changed.append(abs(self._some.chunks - self._before))


def test_the_lock_is_held_for_one_lease_at_a_time() -> None:
    """Who grants, releases or narrows a small lease waits for no more than that."""
    clock = Clock()
    some = leases(clock, chunks_max=100)
    for shard in "abcde":
        some.grant(R, shard, list(range(10)), 5.0)
        some.grant(S, shard, list(range(10)), 5.0)
    lock = Watched(some)
    assert some.chunks_of(R) == 50
    assert some.release(R) == 50
    clock.now = 105.0
    some.drop_expired()
    assert some.chunks == 0
    assert max(lock.changed) == 10
    assert sum(lock.changed) == 100


def test_records_are_made_while_the_lock_is_free() -> None:
    some = leases()
    lock = Watched(some)

    class Keys(list[int]):
        def __iter__(self) -> Iterator[int]:
            assert not (is_listing and lock.is_held)
            return super().__iter__()

    is_listing = False
    some.grant(R, "d", Keys([1, 2]), 5.0)
    is_listing = True
    assert some.records() == [(1, 105.0), (2, 105.0)]


def test_what_was_granted_anew_meanwhile_is_not_dropped() -> None:
    clock = Clock()
    some = leases(clock)
    some.grant(R, "d", [1], 5.0)
    some.grant(R, "e", [2], 5.0)
    clock.now = 105.0
    drop_if, renewed = some._drop_if, []

    def renew_first(*args: Any) -> int:
        if not renewed:
            renewed.append(some.grant(R, "e", [2], 5.0))
        return drop_if(*args)

    some._drop_if = renew_first  # type: ignore[method-assign]
    some.drop_expired()
    assert some.records() == [(2, 110.0)]


grants = st.tuples(
    st.sampled_from([R, S]),
    st.sampled_from("de"),
    st.lists(st.integers(0, 5), unique=True, max_size=4),
)


@given(st.lists(grants | st.sampled_from([R, S]), max_size=30))
def test_against_a_dict(steps: list[tuple[tuple[str, str], str, list[int]]]) -> None:
    some = leases(chunks_max=1000)
    model: dict[tuple[tuple[str, str], str], list[int]] = {}
    for step in steps:
        if len(step) == 3:
            owner, shard, keys = step
            some.grant(owner, shard, keys, 5.0)
            model[owner, shard] = keys
        else:
            some.release(step)
            model = {at: keys for at, keys in model.items() if at[0] != step}
        wanted = sorted(key for keys in model.values() for key in keys)
        assert sorted(key for key, _ in some.records()) == wanted
        assert some.chunks == len(wanted)
        assert [some.holds(key) for key in range(6)] == [key in wanted for key in range(6)]


def test_narrowing_keeps_the_time_and_revives_nothing() -> None:
    clock = Clock()
    some = leases(clock)
    some.grant(R, "d", [1, 2], 5.0)
    clock.now += 3
    some.narrow(R, "d", [2])
    assert some.records() == [(2, 105.0)]
    some.release(R)
    some.narrow(R, "d", [2])
    assert not some.holds(2)
    some.grant(R, "d", [1], 5.0)
    some.narrow(R, "d", [])
    assert some.chunks == 0
    assert some.release(R) == 0
