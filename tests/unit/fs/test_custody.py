"""Exactly one of the request and the thread cleans up."""

import threading

import pytest

from kvserve.fs.custody import Custody


def test_as_long_as_nobody_gives_up_all_is_the_request_s() -> None:
    custody = Custody()
    for done in range(3):
        assert custody.done == done
        assert custody.begin()
        assert custody.hangs()
        assert custody.end()
    assert not custody.hangs()
    assert not custody.give_up(lambda: pytest.fail("nothing hangs"))
    assert custody.done == 3


def test_a_step_that_hangs_becomes_the_thread_s() -> None:
    custody = Custody()
    handed_over: list[int] = []
    custody.begin()
    custody.end()
    custody.begin()
    assert custody.give_up(lambda: handed_over.append(custody.done))
    assert handed_over == [1], "the number of the step that hangs"
    assert custody.hangs()
    assert not custody.end()
    assert not custody.hangs()
    assert custody.done == 1
    assert not custody.begin()


def test_a_step_whose_start_fails_has_not_begun() -> None:
    custody = Custody()

    def refuse() -> None:
        raise IndexError

    with pytest.raises(IndexError):
        custody.begin(refuse)
    assert not custody.give_up()
    assert not custody.begin(lambda: pytest.fail("given up"))


def test_they_race() -> None:
    """Whatever the interleaving, each step belongs to one side."""
    for _ in range(300):
        custody = Custody()
        mine: list[int] = []
        handed_over: list[int] = []

        def work(custody: Custody = custody, mine: list[int] = mine) -> None:
            for step in range(100_000):
                if not custody.begin():
                    return
                if not custody.end():
                    mine.append(step)
                    return

        thread = threading.Thread(target=work)
        thread.start()
        hangs = custody.give_up(lambda c=custody, h=handed_over: h.append(c.done))  # type: ignore[misc]
        thread.join()
        assert mine == handed_over
        assert hangs == bool(mine)
