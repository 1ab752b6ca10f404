"""Chunks whose file could not be read a moment ago, so that nobody waits for them again.

A failed read is followed by a miss, not by the next failed read: without this a lookup would go on
answering "hit" for a file whose bytes nobody gets. An entry lasts `_FAILING_S`, and as long as
a call on it hangs: a chunk costs no further thread then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from kvserve.model import Verdict

_FAILING_S: Final = 30.0
_FAILING_MAX: Final = 4096


def _never() -> bool:
    return False


def _any_hangs(one: Callable[[], bool], other: Callable[[], bool]) -> bool:
    return one() or other()


@dataclass(frozen=True, slots=True)
class _Entry:
    until: float
    verdict: Verdict
    hangs: Callable[[], bool]


class FailingChunks:
    """By path; bounded, the oldest go first. Safe from any thread."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_path: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._by_path)

    def add(self, path: str, verdict: Verdict, *, hangs: Callable[[], bool] = _never) -> None:
        """A read failed; `hangs` says whether its call is still inside the file system."""
        # Out and in again, so that the dict's order is the order of age.
        before = self._by_path.pop(path, None)
        if before is not None and before.hangs():
            hangs = partial(_any_hangs, before.hangs, hangs)
        self._by_path[path] = _Entry(self._clock() + _FAILING_S, verdict, hangs)
        excess = len(self._by_path) - _FAILING_MAX
        if excess > 0:
            for oldest in list(islice(self._by_path, excess)):
                self._by_path.pop(oldest, None)

    def get(self, path: str) -> Verdict | None:
        """Why reading it would be in vain; None if it is worth a try."""
        entry = self._by_path.get(path)
        if entry is None:
            return None
        if self._clock() >= entry.until and not entry.hangs():
            self._by_path.pop(path, None)
            return None
        return entry.verdict

    def clear(self, path: str) -> None:
        """The chunk was stored anew, or deleted."""
        self._by_path.pop(path, None)
