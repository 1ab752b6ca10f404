"""Keeps each chunk's time of last use with its file, a while after the use and off its path.

A fetch or store notes the chunks; a background round stamps the files (`policy/eviction.py` says
with what). A chunk is stamped at most once in `interval_s`: that is how coarse ages are. The stamp
is on the tree, so it survives restarts and every server sees it.
"""

import threading
from collections.abc import Sequence

from kvserve.errors import KvserveError
from kvserve.fs import FileSystem
from kvserve.policy.eviction import use_stamp
from kvserve.store.open_chunks import OpenChunk

_NOTES_MAX = 1 << 16
_NOTES_A_ROUND = 4096


class Recency:
    """Bounded: notes beyond the bound are dropped, since ages are hints. Safe from any thread."""

    def __init__(self, fs: FileSystem, *, interval_s: float) -> None:
        self._fs = fs
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._notes: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def fetched(self, chunks: Sequence[OpenChunk | None], now: float) -> None:
        """Chunks of a prefix in order (None: a miss) were used at `now`, wall time."""
        due = [
            (index, chunk)
            for index, chunk in enumerate(chunks)
            if chunk is not None and now - chunk.used_at >= self._interval_s
        ]
        with self._lock:
            for index, chunk in due:
                if len(self._notes) >= _NOTES_MAX:
                    return
                chunk.used_at = use_stamp(now, index)
                self._notes[chunk.path] = chunk.used_at

    def stored(self, paths: Sequence[str], indexes: Sequence[int], now: float) -> None:
        """The chunks at these places of a prefix were stored; `paths` has all of the prefix."""
        with self._lock:
            for index in indexes:
                if len(self._notes) >= _NOTES_MAX:
                    return
                self._notes[paths[index]] = use_stamp(now, index)

    def flush_blocking(self) -> int:
        """Stamps some of the noted files; returns how many are left.

        Raises:
            KvserveError: a file could not be stamped; the others were.
        """
        with self._lock:
            paths = list(self._notes)[:_NOTES_A_ROUND]
            notes = [(path, self._notes.pop(path)) for path in paths]
        failed: KvserveError | None = None
        for path, used_at in notes:
            try:
                self._fs.touch(path, used_at)
            except KvserveError as error:
                failed = error
        if failed is not None:
            raise failed
        return len(self._notes)
