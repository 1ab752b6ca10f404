"""Whether the storage works, judged by how requests end. Pure; used on the event loop.

A request counts as failed if it asked the file system and every answer was an error or none in
time. A miss is an answer, and so is "no space": other requests are served. What memory or page
cache answered says nothing about the storage and is not noted.

Reading (lookups, fetches) and writing (stores) are judged apart: a tree that answers every lookup
and refuses every store is not healthy.
"""

from collections.abc import Callable, Collection
from typing import Final

from kvserve.errors import StorageUnavailable
from kvserve.model import ChunkStatus

_FAILURES_MAX: Final = 5
# Half of the threads that may be without a place (`fs/threads.py`).
_HUNG_FOR_STORES_MAX: Final = 32
_FAILED: Final = frozenset(
    (ChunkStatus.MISS_ERROR, ChunkStatus.MISS_TIMEOUT, ChunkStatus.STORE_ERROR)
)
# These tell nothing: there need not have been a file call that was answered.
_SILENT: Final = frozenset((ChunkStatus.INCOMPLETE, ChunkStatus.NO_SPACE))


def _nobody() -> None:
    pass


def _none() -> int:
    return 0


class StorageHealth:
    """Turns bad after `_FAILURES_MAX` failed requests of a kind in a row, good with a success.

    `changed` is called each time it turns. `hung` counts file calls that hang.
    """

    def __init__(self, hung: Callable[[], int] = _none) -> None:
        self._hung = hung
        self.is_good = True
        self.changed: Callable[[], None] = _nobody
        self._failures = {"reading": 0, "writing": 0}

    def __repr__(self) -> str:
        return f"<StorageHealth {'good' if self.is_good else 'bad'}, failures {self._failures}>"

    def check_may_store(self) -> None:
        """Stores leave the last threads to the reads: each try of one may cost some.

        Raises:
            StorageUnavailable: too many file calls hang already.
        """
        if self._hung() >= _HUNG_FOR_STORES_MAX:
            raise StorageUnavailable(
                f"the file system does not answer: {self._hung()} file calls hang; nothing is "
                "stored until some come back"
            )

    def note_reading(self, statuses: Collection[ChunkStatus]) -> None:
        """How a lookup or fetch ended, for the chunks that the file system was asked for."""
        self._note("reading", statuses)

    def note_writing(self, statuses: Collection[ChunkStatus]) -> None:
        """How a store ended, for the chunks that it needed."""
        self._note("writing", statuses)

    def works(self) -> None:
        """A probe, which reads and writes, has succeeded."""
        for kind in self._failures:
            self._failures[kind] = 0
        self._turn()

    def _note(self, kind: str, statuses: Collection[ChunkStatus]) -> None:
        told = set(statuses) - _SILENT
        if told:
            self._failures[kind] = self._failures[kind] + 1 if told <= _FAILED else 0
            self._turn()

    def _turn(self) -> None:
        is_good = max(self._failures.values()) < _FAILURES_MAX
        if is_good is not self.is_good:
            self.is_good = is_good
            self.changed()
