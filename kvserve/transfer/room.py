"""Which chunks of a store give way when the file system is full.

A prefix needs its first chunks, so where there is no space the last chunk that has taken some is
dropped and its file removed, not the chunk that happened to ask. And a chunk that has failed keeps
no space: its file is removed as soon as nobody writes to it.
"""

import logging
import threading
from collections.abc import Callable
from heapq import heappop, heappush

from kvserve.errors import KvserveError
from kvserve.model import Verdict
from kvserve.transfer.ports import SliceSink

log = logging.getLogger(__name__)


class Room:
    """Each write to a chunk is put between `begins` and `ended_blocking`. Safe from any thread.

    A chunk with an entry in `verdicts` has failed: nothing is written to it any more.
    """

    def __init__(self, writer: Callable[[int], SliceSink], verdicts: dict[int, Verdict]) -> None:
        """`writer` by chunk index; asked only for chunks that a write has begun for."""
        self._writer = writer
        self._verdicts = verdicts
        self._lock = threading.Lock()
        self._writing: dict[int, int] = {}
        self._begun: list[int] = []  # a heap of negative indexes: the last chunk first

    def begins(self, chunk_index: int) -> bool:
        """Counts a write in; False if the chunk has failed."""
        with self._lock:
            if chunk_index in self._verdicts:
                return False
            if chunk_index not in self._writing:
                self._writing[chunk_index] = 0
                heappush(self._begun, -chunk_index)
            self._writing[chunk_index] += 1
            return True

    def ended_blocking(self, chunk_index: int) -> None:
        """Counts a write out; the last one removes the file of a chunk that has failed."""
        with self._lock:
            self._writing[chunk_index] -= 1
            is_over = not self._writing[chunk_index] and chunk_index in self._verdicts
        if is_over:
            self._remove_blocking(chunk_index)

    def make_blocking(self, chunk_index: int, verdict: Verdict) -> bool:
        """Drops the last chunk that has taken space; False if that is the one that asks, or if the
        one that asks was dropped meanwhile: it must not take the others with it."""
        with self._lock:
            if chunk_index in self._verdicts:
                return False
            while -self._begun[0] in self._verdicts:
                heappop(self._begun)
            last = -self._begun[0]
            if last == chunk_index:
                return False
            self._verdicts[last] = verdict
            is_idle = not self._writing[last]
        if is_idle:
            self._remove_blocking(last)
        return True

    def _remove_blocking(self, chunk_index: int) -> None:
        try:
            self._writer(chunk_index).abandon_blocking()
        except KvserveError as error:
            log.warning("what was written of a failed chunk stays for now: %s", error)
