"""A walk over the whole tree, in the background: removes temporary files whose writer is dead (what
a killed server leaves behind), and counts what is stored.

One directory at a time, in order; readers and writers never wait for it. A live server's files are
never touched (see `owners.py`), nor is anything whose name is not that of a temporary file. What
cannot be removed is counted and left for the next round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.errors import StorageError
from kvserve.fs import REFUSED, FileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import temp_owner
from kvserve.store.tree import FAN, walk_blocking
from kvserve.store.tree_count import TreeCount


@dataclass(slots=True)
class SweepResult:
    """Counts of one round; `directory`: the one that was looked at last, `is_fan` whether chunks
    are in it; `unlisted`: directories, among the failures, that could not be listed."""

    directories: int = 0
    removed: int = 0
    failed: int = 0
    unlisted: int = 0
    directory: str = ""
    is_fan: bool = False

    def __str__(self) -> str:
        text = f"{self.removed} files removed in {self.directories} directories"
        return f"{text}, {self.failed} failures" if self.failed else text


def sweep_blocking(
    fs: FileSystem, root: str, owner: Owner, count: TreeCount | None = None
) -> Iterator[SweepResult]:
    """One round; yields the running counts after each directory, so that the caller sets the pace.

    Raises:
        StorageError: this server cannot show that it lives. What cannot be listed is counted.
    """
    owner.beat_blocking()  # ages are counted from this moment
    dead = owner.dead_blocking()
    result = SweepResult()
    for directory in walk_blocking(fs, root):
        result.directories += 1
        result.directory, result.is_fan = directory.path, directory.level == FAN
        try:
            if count is not None:
                count.enter(directory)
            for entry in directory.entries():
                if count is not None:
                    count.add_blocking(directory, entry.name)
                tag = temp_owner(entry.name)
                if tag is not None:
                    _remove_if_dead(f"{directory.path}/{entry.name}", tag, owner, result, fs=fs)
        except REFUSED:
            result.failed += 1
            result.unlisted += 1
        yield result
    if not result.failed:
        owner.forget_blocking(dead)
    yield result


def _remove_if_dead(
    path: str, tag: str, owner: Owner, result: SweepResult, *, fs: FileSystem
) -> None:
    try:
        if not owner.lives_blocking(tag):
            result.removed += fs.unlink(path)
    except StorageError:
        result.failed += 1
