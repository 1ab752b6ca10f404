"""Directories are finished in any order; how far a check has come is told in the order of the walk.

Files are checked by several threads, so a later directory may be done before an earlier one. What
is *settled* is the run of directories from the start that are all done: its last one is the mark
that an interrupted check goes on after, and its tally is what is known for sure. Pure.

Bound: a directory that is done behind one that is not is folded into the one before it, so there
are never more batches than files in work, the first, and the one that is being listed.
"""

from collections import deque
from dataclasses import dataclass, field

from kvserve.care.tally import Finding, Tally
from kvserve.store.tree import Parts


@dataclass(slots=True, eq=False)
class Batch:
    """One directory, and those folded into it: `parts` is the last one's."""

    parts: Parts
    tally: Tally = field(default_factory=Tally)
    files_in_work: int = 0
    is_listed: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_listed and not self.files_in_work


class InOrder:
    """`begin` a directory, count into its batch, say that it `is_listed`; then `settle`."""

    def __init__(self, *, mark: Parts | None = None, settled: Tally | None = None) -> None:
        self.mark = mark
        self.settled = settled if settled is not None else Tally()
        self.problems = self.settled.problems
        self.files = self.settled.files
        self.size_bytes = self.settled.size_bytes
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def begin(self, parts: Parts) -> Batch:
        batch = Batch(parts)
        batch.tally.directories = 1
        self._batches.append(batch)
        return batch

    def count(self, batch: Batch, finding: Finding | None) -> None:
        """One more file; `finding` is None for a good one."""
        self.files += 1
        if finding is None:
            batch.tally.count_ok()
            return
        batch.tally.count(finding)
        self.problems += finding.kind.is_problem

    def count_bytes(self, batch: Batch, size_bytes: int, *, is_direct: bool) -> None:
        self.size_bytes += size_bytes
        batch.tally.size_bytes += size_bytes
        batch.tally.direct_files += is_direct

    def settle(self, batch: Batch) -> bool:
        """Call it whenever `batch` may have become done; True if the mark has moved."""
        if not batch.is_done:
            return False
        index = self._batches.index(batch)
        del self._batches[index]
        if index:
            before = self._batches[index - 1]
            before.parts = batch.parts
            before.tally.merge(batch.tally)
            return False
        self.settled.merge(batch.tally)
        self.mark = batch.parts
        return True
