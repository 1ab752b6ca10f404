"""Counts the chunks on the tree while `sweep.py` walks it, to correct the ledger.

By name only: all chunks of a shard have one size (for hashes of one size), so a few `stat`s for
each shard are enough, and a walk over ten million chunks costs listings, not ten million `stat`s.
"""

from contextlib import suppress
from statistics import median_high

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.policy.quota import Amount
from kvserve.store.counted_size import counted_size_blocking
from kvserve.store.ledger import Ledger, UsageByTenant
from kvserve.store.tree import FAN, Directory, Parts, is_chunk_name

_LOOKS = 3
"""The middle one of so many files is the size: one that was cut short or is far too long must not
mislead."""


class TreeCount:
    """One count; give it every directory in walking order, then `finish`."""

    def __init__(self, fs: FileSystem, ledger: Ledger) -> None:
        self._fs = fs
        self._ledger = ledger
        self._counted: UsageByTenant = {}
        # By shard directory and length of the name.
        self._sizes: dict[tuple[Parts, int], list[int]] = {}
        ledger.start_count()

    def enter(self, directory: Directory) -> None:
        """The walk is about to list this directory."""
        self._ledger.pass_directory(directory.path)

    def add_blocking(self, directory: Directory, name: str) -> None:
        """A name that was found there."""
        if directory.level == FAN and is_chunk_name(name):
            tenant = directory.parts[0]
            size_bytes = self._size(directory, name)
            self._counted[tenant] = self._counted.get(tenant, Amount()) + Amount(size_bytes, 1)

    def give_up(self) -> None:
        """The walk did not see everything: usage stays as it was."""
        self._ledger.drop_count()

    def finish(self) -> tuple[UsageByTenant, UsageByTenant]:
        """See `Ledger.end_count`."""
        return self._ledger.end_count(self._counted)

    def _size(self, directory: Directory, name: str) -> int:
        sizes = self._sizes.setdefault((directory.parts[:-1], len(name)), [])
        if len(sizes) < _LOOKS:
            with suppress(StorageError):  # the next one tells
                path = f"{directory.path}/{name}"
                found = self._fs.stat(path)
                if found is not None:
                    sizes.append(counted_size_blocking(self._fs, path, found.size_bytes))
        return median_high(sizes) if sizes else 0
