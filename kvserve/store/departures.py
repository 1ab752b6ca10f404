"""Which chunks are being evicted or were lately, so that a lease is never granted on one that goes
and a miss can say why.

Told by this server's evictor and by the journals of the others (`exchange.py`).
"""

import threading
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from kvserve.store.journal import Record, RecordKind

_T = TypeVar("_T")

LEAVING_S_MAX = 60.0
"""An evictor that died leaves its picks open: after so long they count as staying."""


class Departures:
    """Bounded; safe from any thread. `clock`: wall time, as in the records."""

    def __init__(self, *, remembered_max: int, clock: Callable[[], float]) -> None:
        self._remembered_max = remembered_max
        self._clock = clock
        self._lock = threading.Lock()
        # By evictor: two may pick the same chunk, and one's "stayed" is not the other's.
        self._leaving: dict[str, dict[int, float]] = {}
        self._gone: dict[int, None] = {}

    def __repr__(self) -> str:
        leaving = sum(map(len, self._leaving.values()))
        return f"<Departures {leaving} leaving, {len(self._gone)} gone>"

    def apply(self, evictor: str, records: Iterable[Record]) -> None:
        """What one evictor has written, in that order."""
        with self._lock:
            # A copy takes its place: `is_leaving` takes no lock.
            leaving = dict(self._leaving.get(evictor, {}))
            for record in records:
                if record.kind is RecordKind.LEAVING:
                    leaving.pop(record.key, None)
                    leaving[record.key] = record.at
                    continue
                leaving.pop(record.key, None)
                if record.kind is RecordKind.GONE:
                    self._gone.pop(record.key, None)
                    self._gone[record.key] = None
            _keep_last(leaving, self._remembered_max)
            _keep_last(self._gone, self._remembered_max)
            others = {name: it for name, it in self._leaving.items() if name != evictor}
            self._leaving = {**others, evictor: leaving} if leaving else others

    def is_leaving(self, key: int) -> bool:
        """An evictor has picked the chunk and not said yet how that ended."""
        picks = [it[key] for it in self._leaving.values() if key in it]
        now = self._clock()
        # One from the future (a clock that was set back) must not bar the chunk for ever.
        return any(abs(now - picked_at) <= LEAVING_S_MAX for picked_at in picks)

    def was_evicted(self, key: int) -> bool:
        """Among the last that were evicted. It may have been stored anew since."""
        return key in self._gone


def _keep_last(remembered: dict[int, _T], count_max: int) -> None:
    excess = len(remembered) - count_max
    for oldest in list(islice(remembered, max(0, excess))):
        del remembered[oldest]
