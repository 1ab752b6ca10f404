"""Removes temporary files whose writer is dead: what a killed server leaves behind.

Walks the tree one directory at a time, in the background; readers and writers never wait for it.
A live server's files are never touched (see `owners.py`), nor is anything whose name is not that of
a temporary file. What cannot be removed is counted and left for the next round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.errors import StorageError
from kvserve.fs import FileSystem
from kvserve.store.owners import Owner
from kvserve.store.paths import temp_owner


@dataclass(slots=True)
class SweepResult:
    """Counts of one round."""

    directories: int = 0
    removed: int = 0
    failed: int = 0


def sweep_blocking(fs: FileSystem, root: str, owner: Owner) -> Iterator[SweepResult]:
    """One round; yields the running counts after each directory, so that the caller sets the pace.

    Raises:
        StorageError: the tree cannot be listed at all.
    """
    owner.beat_blocking()  # ages are counted from this moment
    dead = owner.dead_blocking()
    result = SweepResult()
    for directory in _directories(fs, root):
        result.directories += 1
        try:
            names = fs.list_dir(directory)
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
    for tenant in _visible(fs, root):
        for namespace in _visible(fs, tenant):
            yield namespace
            for shard in _visible(fs, namespace):
                yield from _visible(fs, shard)


def _visible(fs: FileSystem, directory: str) -> list[str]:
    try:
        names = fs.list_dir(directory)
    except StorageError:
        return []  # a file, or a directory that is broken: its own listing is counted above
    return [f"{directory}/{name}" for name in names if not name.startswith(".")]
