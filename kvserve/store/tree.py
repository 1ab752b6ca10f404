"""Walks the tree, one directory at a time, in the order of the names.

```
<root>                                 level 0
<root>/<tenant>                        1
<root>/<tenant>/<namespace>            2
<root>/<tenant>/<namespace>/<shard>    3
.../<fan>                              4, where the chunks are
```

Only directories whose names are kvserve's are entered; the others are entries like any file. Dot
directories in the root are the servers' own and no part of the walk. A directory comes before what
is in it, so the order of `parts` (as tuples) is the order of the walk, and a walk can go on after
any directory. Memory: the names in one directory of each level above the fans; fans are streamed.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvserve.errors import InvalidRequest, KvserveError
from kvserve.fs import REFUSED, Entry, FileSystem
from kvserve.model import Shard
from kvserve.names import HASH_SIZE_BYTES_MAX, HASH_SIZE_BYTES_MIN, is_tenant

ROOT: Final = 0
TENANT: Final = 1
NAMESPACE: Final = 2
SHARD: Final = 3
FAN: Final = 4

_NAMESPACE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SHARD = re.compile(r"(0|[1-9][0-9]{0,4})of([1-9][0-9]{0,4})", re.ASCII)
_FAN = re.compile(r"[0-9a-f]{3}", re.ASCII)
_CHUNK = re.compile(r"[0-9a-f]+", re.ASCII)

Parts = tuple[str, ...]
"""The names from the root to a directory; empty for the root itself."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of the tree. Its level is the number of its parts."""

    fs: FileSystem
    root: str
    parts: Parts
    _listed: tuple[Entry, ...] = ()
    _fault: KvserveError | None = None

    @property
    def level(self) -> int:
        return len(self.parts)

    @property
    def path(self) -> str:
        return "/".join((self.root, *self.parts))

    def entries(self) -> Iterator[Entry]:
        """What is in it; the directories that the walk enters too.

        Raises:
            StorageError, Overloaded: it cannot be listed, or not to its end.
        """
        if self.level == FAN:
            yield from self.fs.scan(self.path)
            return
        if self._fault is not None:
            raise self._fault
        yield from self._listed


def walk_blocking(
    fs: FileSystem,
    root: str,
    *,
    after: Parts | None = None,
    wants: Callable[[Parts], bool] = lambda _: True,
) -> Iterator[Directory]:
    """Every directory from the root on, or only those that come after `after`.

    What `wants` refuses is not entered, nor anything below it. Errors are for whoever asks a
    directory for its entries; nothing is below a directory that cannot be listed.
    """
    yield from _walk(fs, root, (), after, wants)


def _walk(
    fs: FileSystem,
    root: str,
    parts: Parts,
    after: Parts | None,
    wants: Callable[[Parts], bool],
) -> Iterator[Directory]:
    is_due = after is None or parts > after
    if len(parts) == FAN:
        if is_due:
            yield Directory(fs, root, parts)
        return
    listed: list[Entry] = []
    fault: KvserveError | None = None
    try:
        listed = sorted(fs.scan("/".join((root, *parts))), key=lambda entry: entry.name)
    except REFUSED as error:
        listed, fault = [], error
    if is_due:
        yield Directory(fs, root, parts, tuple(listed), fault)
    for entry in listed:
        inner = (*parts, entry.name)
        if entry.kind != "directory" or not is_ours(inner):
            continue
        # All of it comes before `after`, unless `after` is in it.
        if after is not None and inner < after[: len(inner)]:
            continue
        if wants(inner):
            yield from _walk(fs, root, inner, after, wants)


def is_ours(parts: Parts) -> bool:
    """Whether the last of `parts` is a directory name that kvserve makes at its level."""
    name, level = parts[-1], len(parts)
    if level == TENANT:
        return is_tenant(name)
    if level == NAMESPACE:
        return _NAMESPACE.fullmatch(name) is not None
    if level == SHARD:
        return shard_of(name) is not None
    return level == FAN and _FAN.fullmatch(name) is not None


def shard_of(name: str) -> Shard | None:
    """The shard that a directory name such as `0of1` stands for; None for any other name."""
    found = _SHARD.fullmatch(name)
    if found is None:
        return None
    try:
        return Shard(int(found.group(1)), int(found.group(2)))
    except InvalidRequest:
        return None


def is_chunk_name(name: str) -> bool:
    """Whether a file of this name in a fan is a chunk: a hash in hex."""
    size, odd = divmod(len(name), 2)
    is_hash = not odd and HASH_SIZE_BYTES_MIN <= size <= HASH_SIZE_BYTES_MAX
    return is_hash and _CHUNK.fullmatch(name) is not None
