"""Counts the chunks on the tree while `sweep.py` walks it, to correct the ledger.

By name only: all chunks of a shard have one size (for hashes of one size), so a few `stat`s for
each shard are enough, and a walk over ten million chunks costs listings, not ten million `stat`s.
"""

from kvserve.fs import FileSystem
from kvserve.policy.quota import Amount
from kvserve.store.ledger import Ledger, UsageByTenant
from kvserve.store.paths import is_chunk_name

_LOOKS = 3
"""The largest of so many files is the size: one that was cut short must not mislead."""


class TreeCount:
    """One count; give it every directory in walking order, then `finish`."""

    def __init__(self, fs: FileSystem, root: str, ledger: Ledger) -> None:
        self._fs = fs
        self._root = root
        self._ledger = ledger
        self._counted: UsageByTenant = {}
        # By shard directory and length of the name.
        self._sizes: dict[tuple[str, int], list[int]] = {}
        ledger.start_count()

    def enter(self, directory: str) -> None:
        """The walk is about to list this directory."""
        self._ledger.pass_directory(directory)

    def add_blocking(self, directory: str, names: list[str]) -> None:
        """`names`: what was listed."""
        parts = directory[len(self._root) + 1 :].split("/")
        if len(parts) != 4:  # tenant, namespace, shard, fan
            return
        size_bytes = files = 0
        for name in filter(is_chunk_name, names):
            size_bytes += self._size(directory, name)
            files += 1
        self._counted[parts[0]] = self._counted.get(parts[0], Amount()) + Amount(size_bytes, files)

    def finish(self) -> tuple[UsageByTenant, UsageByTenant]:
        """See `Ledger.end_count`."""
        return self._ledger.end_count(self._counted)

    def _size(self, directory: str, name: str) -> int:
        sizes = self._sizes.setdefault((directory.rpartition("/")[0], len(name)), [])
        if len(sizes) < _LOOKS:
            found = self._fs.stat(f"{directory}/{name}")
            if found is not None:
                sizes.append(found.size_bytes)
        return max(sizes, default=0)
