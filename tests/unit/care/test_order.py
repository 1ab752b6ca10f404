"""How far a check has come: never further than what is done, and never much to remember."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvserve.care.order import Batch, InOrder
from kvserve.care.tally import Finding, Kind, Tally

BAD = Finding("x", Kind.CORRUPT, "checksum")


def listed(seen: InOrder, name: str, *, files: int = 0) -> Batch:
    batch = seen.begin((name,))
    batch.files_in_work = files
    batch.is_listed = True
    seen.settle(batch)
    return batch


def done(seen: InOrder, batch: Batch, finding: Finding | None = None) -> bool:
    batch.files_in_work -= 1
    seen.count(batch, finding)
    return seen.settle(batch)


def test_the_mark_waits_for_the_first() -> None:
    seen = InOrder()
    first, second = listed(seen, "a", files=1), listed(seen, "b", files=2)
    assert not done(seen, second)
    assert not done(seen, second, BAD)
    assert (seen.mark, seen.settled.files) == (None, 0)
    assert (seen.files, seen.problems) == (2, 1), "what is shown is ahead of what is sure"
    assert done(seen, first)
    assert (seen.mark, seen.settled.files, seen.settled.problems) == (("b",), 3, 1)
    assert len(seen) == 0


def test_a_directory_that_is_still_listed_is_not_done() -> None:
    seen = InOrder()
    batch = seen.begin(("a",))
    batch.files_in_work = 1
    assert not done(seen, batch)
    assert seen.mark is None


def test_one_slow_file_does_not_make_the_rest_pile_up() -> None:
    seen = InOrder()
    slow = listed(seen, "0", files=1)
    for number in range(10_000):
        batch = listed(seen, f"d{number:05}", files=1)
        listed(seen, f"d{number:05}x")
        done(seen, batch)
    assert len(seen) == 1
    assert seen.mark is None
    assert done(seen, slow)
    assert seen.mark == ("d09999x",)
    assert (seen.settled.files, seen.settled.directories) == (10_001, 20_001)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_whatever_the_order_the_mark_has_exactly_what_lies_before_it(seed: int, many: int) -> None:
    random = Random(seed)
    seen = InOrder()
    sizes = [random.randrange(4) for _ in range(many)]
    in_work: list[tuple[int, Batch]] = []
    left = list(sizes)
    for number, files in enumerate(sizes):
        batch = listed(seen, f"{number:03}", files=files)
        in_work += [(number, batch)] * files
        while in_work and random.random() < 0.6:
            which, batch = in_work.pop(random.randrange(len(in_work)))
            left[which] -= 1
            done(seen, batch)
        check(seen, sizes, left, number)
    while in_work:
        which, batch = in_work.pop(random.randrange(len(in_work)))
        left[which] -= 1
        done(seen, batch)
        check(seen, sizes, left, many - 1)
    assert seen.mark == (f"{many - 1:03}",)
    assert len(seen) == 0


def check(seen: InOrder, sizes: list[int], left: list[int], last: int) -> None:
    undone = next((at for at in range(last + 1) if left[at]), last + 1)
    assert seen.mark == ((f"{undone - 1:03}",) if undone else None)
    assert seen.settled.files == sum(sizes[:undone])
    assert seen.settled.directories == undone


def test_it_goes_on_from_what_was_settled() -> None:
    before = Tally(directories=5)
    before.count(BAD)
    seen = InOrder(mark=("m",), settled=before)
    assert (seen.files, seen.problems, seen.mark) == (1, 1, ("m",))
    listed(seen, "n")
    assert (seen.mark, seen.settled.directories) == (("n",), 6)
