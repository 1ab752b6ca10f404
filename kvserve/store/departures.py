"""Which chunks are being evicted or were lately, so that a lease is never granted on one that goes
and a miss can say why.

Told by this server's evictor and by the journals of the others (`exchange.py`).
"""

import threading
from collections.abc import Callable, Iterable
from itertools import islice

from kvserve.store.journal import Record, RecordKind

_LEAVING_S_MAX = 60.0
"""An evictor that died leaves its picks open: after so long they count as staying."""


class Departures:
    """Bounded; safe from any thread. `clock`: wall time, as in the records."""

    def __init__(self, *, remembered_max: int, clock: Callable[[], float]) -> None:
        self._remembered_max = remembered_max
        self._clock = clock
        self._lock = threading.Lock()
        self._leaving: dict[int, float] = {}
        self._gone: dict[int, None] = {}

    def __repr__(self) -> str:
        return f"<Departures {len(self._leaving)} leaving, {len(self._gone)} gone>"

    def apply(self, records: Iterable[Record]) -> None:
        """In the order in which their evictor wrote them."""
        with self._lock:
            for record in records:
                if record.kind is RecordKind.LEAVING:
                    self._leaving[record.key] = record.at
                    continue
                self._leaving.pop(record.key, None)
                if record.kind is RecordKind.GONE:
                    self._gone.pop(record.key, None)
                    self._gone[record.key] = None
            for remembered in (self._leaving, self._gone):
                excess = len(remembered) - self._remembered_max
                for oldest in list(islice(remembered, max(0, excess))):
                    del remembered[oldest]

    def is_leaving(self, key: int) -> bool:
        """An evictor has picked the chunk and not said yet how that ended."""
        picked_at = self._leaving.get(key)
        return picked_at is not None and self._clock() - picked_at <= _LEAVING_S_MAX

    def was_evicted(self, key: int) -> bool:
        """Among the last that were evicted. It may have been stored anew since."""
        return key in self._gone
