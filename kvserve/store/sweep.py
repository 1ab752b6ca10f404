"""A walk over the whole tree, in the background: removes temporary files whose writer is dead (what
a killed server leaves behind), and counts what is stored.

One directory at a time, in order; readers and writers never wait for it. A live server's files are
never touched (see `owners.py`), nor is anything whose name is not that of a temporary file. What
cannot be removed is counted and left for the next round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import temp_owner
from kvserve.store.tree_count import TreeCount


@dataclass(slots=True)
class SweepResult:
    """Counts of one round; `directory`: the one that was looked at last."""

    directories: int = 0
    removed: int = 0
    failed: int = 0
    directory: str = ""


def sweep_blocking(
    fs: FileSystem, root: str, owner: Owner, count: TreeCount | None = None
) -> Iterator[SweepResult]:
    """One round; yields the running counts after each directory, so that the caller sets the pace.

    Raises:
        StorageError: the tree cannot be listed at all.
    """
    owner.beat_blocking()  # ages are counted from this moment
    dead = owner.dead_blocking()
    result = SweepResult()
    for directory in _directories(fs, root):
        result.directories += 1
        result.directory = directory
        try:
            if count is not None:
                count.enter(directory)
            names = fs.list_dir(directory)
            if count is not None:
                count.add_blocking(directory, names)
        except StorageError:
            result.failed += 1
            continue
        for name in names:
            tag = temp_owner(name)
            if tag is None:
                continue
            try:
                if owner.lives_blocking(tag):
                    continue
                result.removed += fs.unlink(f"{directory}/{name}")
            except StorageError:
                result.failed += 1
        yield result
    if not result.failed:
        owner.forget_blocking(dead)
    yield result


def _directories(fs: FileSystem, root: str) -> Iterator[str]:
    """Every directory that may hold temporary files: the root, namespaces, fans."""
    yield root
    for tenant in visible_dirs(fs, root):
        for namespace in visible_dirs(fs, tenant):
            yield namespace
            for shard in visible_dirs(fs, namespace):
                yield from visible_dirs(fs, shard)


def visible_dirs(fs: FileSystem, directory: str) -> list[str]:
    """What a directory holds but dot names, in order; empty if it cannot be listed."""
    try:
        names = fs.list_dir(directory)
    except StorageError:
        return []  # a file, or a directory that is broken: its own listing is counted above
    return [f"{directory}/{name}" for name in sorted(names) if not name.startswith(".")]
