"""After a failed read nobody tries again for a while."""

from kvserve.model import ChunkStatus, Verdict
from kvserve.store.failing import FailingChunks

EIO = Verdict(ChunkStatus.MISS_ERROR, "read 7: EIO")
LATE = Verdict(ChunkStatus.MISS_TIMEOUT, "no answer")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_for_thirty_seconds() -> None:
    clock = Clock()
    failing = FailingChunks(clock=clock)
    assert failing.get("a") is None
    failing.add("a", EIO)
    clock.now += 29.9
    assert failing.get("a") == EIO
    assert failing.get("b") is None
    clock.now += 0.1
    assert failing.get("a") is None
    assert len(failing) == 0


def test_as_long_as_the_call_hangs() -> None:
    """Else each try would cost another thread."""
    clock = Clock()
    failing = FailingChunks(clock=clock)
    hangs = True
    failing.add("a", LATE, hangs=lambda: hangs)
    clock.now += 3600
    assert failing.get("a") == LATE
    hangs = False
    assert failing.get("a") is None


def test_as_long_as_any_of_several_calls_hangs() -> None:
    clock = Clock()
    failing = FailingChunks(clock=clock)
    hanging = {1, 2}
    failing.add("a", LATE, hangs=lambda: 1 in hanging)
    failing.add("a", LATE, hangs=lambda: 2 in hanging)
    failing.add("a", EIO)
    clock.now += 31
    for ended in (2, 1):
        assert failing.get("a") == EIO
        hanging.remove(ended)
    assert failing.get("a") is None


def test_a_store_or_delete_clears_it() -> None:
    failing = FailingChunks(clock=Clock())
    failing.add("a", EIO)
    failing.clear("a")
    failing.clear("a")
    assert failing.get("a") is None


def test_it_is_bounded_and_the_oldest_go_first() -> None:
    failing = FailingChunks(clock=Clock())
    failing.add("first", EIO)
    failing.add("second", EIO)
    failing.add("first", LATE)
    for number in range(4095):
        failing.add(str(number), EIO)
    assert len(failing) == 4096
    assert failing.get("second") is None
    assert failing.get("first") == LATE
