"""Which go first: never more than asked, the oldest, and the pool stays bounded."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvserve.policy.eviction import POOL_MAX, Candidate, choose, use_stamp
from kvserve.policy.quota import Amount


def candidate(number: int, size_bytes: int, used_at: float) -> Candidate:
    return Candidate("t", f"d{number}", "n", size_bytes, used_at)


candidates = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 20)), max_size=30, unique_by=id
).map(lambda rows: [candidate(n, size, at) for n, (size, at) in enumerate(rows)])
amounts = st.builds(Amount, st.integers(0, 1000), st.integers(0, 20))


@given(candidates, amounts, st.integers(0, 40))
def test_just_enough_of_the_oldest(pool: list[Candidate], excess: Amount, chunks_max: int) -> None:
    chosen, left = choose(pool, excess, chunks_max=chunks_max)
    assert len(chosen) <= chunks_max
    assert sorted(chosen + left, key=repr) == sorted(pool, key=repr), "none lost, none doubled"
    if chosen and left:
        assert chosen[-1].used_at <= left[0].used_at
    ages = [it.used_at for it in chosen]
    assert ages == sorted(ages)
    freed = [sum(it.size_bytes for it in chosen[:count]) for count in range(len(chosen) + 1)]
    is_enough = freed[-1] >= excess.size_bytes and len(chosen) >= excess.files
    assert is_enough or len(chosen) in (chunks_max, len(pool))
    if chosen:
        assert freed[-2] < excess.size_bytes or len(chosen) - 1 < excess.files, "one too many"


def test_the_pool_keeps_the_oldest_of_the_rest() -> None:
    pool = [candidate(number, 1, number) for number in range(POOL_MAX + 100)]
    Random(1).shuffle(pool)
    chosen, left = choose(pool, Amount(0, 10), chunks_max=256)
    assert [it.used_at for it in chosen] == list(range(10))
    assert [it.used_at for it in left] == list(range(10, 10 + POOL_MAX))


def test_a_prefix_goes_from_its_tail() -> None:
    stamps = [use_stamp(1000.0, index) for index in range(5)]
    assert stamps == sorted(stamps, reverse=True)
    assert stamps[0] == 1000.0
    assert len(set(stamps)) == 5
