"""Where a chunk's file is, relative to the root. Pure; nothing in it can leave the root.

```
<tenant>/<namespace>/<rank>of<count>/<fan>/<chunk hash in hex>
<tenant>/<namespace>/identity            the encoded identity, for people and for miss reasons
.quarantine/                             files that failed a check
.servers/<tag>                           which servers live, see owners.py
.usage/ .leases/ .evicted/               what the servers tell one another, see exchange.py
.fsck/state                              how far an interrupted `kvserve fsck` has come
```

`fan` is 3 hex digits of the hash's xxh3: 4,096 directories however an engine makes its hashes, so
10 million chunks of one shard are about 2,440 entries each. One level, since each new directory
costs a metadata operation. Tenants cannot start with a dot: dot names in the root are the server's.
"""

import re
from random import Random
from typing import Final

import xxhash

from kvserve.model import ChunkKey

IDENTITY_NAME: Final = "identity"
QUARANTINE_DIR: Final = ".quarantine"
SERVERS_DIR: Final = ".servers"
USAGE_DIR: Final = ".usage"
LEASES_DIR: Final = ".leases"
EVICTED_DIR: Final = ".evicted"
FSCK_DIR: Final = ".fsck"
_FAN_BITS: Final = 12

# Formatting a number costs more than the rest of a path.
_FANS: Final = tuple(f"{fan:03x}" for fan in range(1 << _FAN_BITS))

_LOWER: Final = "abcdefghijklmnopqrstuvwxyz"
_DIGITS: Final = "0123456789"


def namespace_dir(key: ChunkKey) -> str:
    return f"{key.tenant}/{key.identity.namespace}"


def shard_dir(key: ChunkKey) -> str:
    return f"{namespace_dir(key)}/{key.shard.rank}of{key.shard.count}"


def chunk_path(shard_directory: str, chunk_hash: bytes) -> str:
    fan = xxhash.xxh3_64_intdigest(chunk_hash) >> (64 - _FAN_BITS)
    return f"{shard_directory}/{_FANS[fan]}/{chunk_hash.hex()}"


def fan_dirs(shard_directory: str) -> list[str]:
    """All directories that chunks of one shard can be in."""
    return [f"{shard_directory}/{fan}" for fan in _FANS]


def new_tag(random: Random) -> str:
    """A server's tag: a lower-case letter, an upper-case one and a digit, in any order."""
    return _mixed(random)


class TempNames:
    """Temporary names of one server. `.NAME.XXXXXX`: its tag, then three random letters.

    A mixed suffix of this form is what Lustre's crush directory hash places like NAME itself, so
    that the rename stays on one metadata target.
    """

    def __init__(self, tag: str, random: Random) -> None:
        self._tag = tag
        self._random = random
        self.left: set[str] = set()
        """Files under such names that could not be removed; see `temp_file.py`."""

    def beside(self, path: str) -> str:
        """A name in the directory of `path` for its bytes until they are whole."""
        directory, _, name = path.rpartition("/")
        return f"{directory}/.{name}.{self._tag}{_mixed(self._random)}"


def is_tag(name: str) -> bool:
    return len(name) == 3 and name.isascii() and _is_mixed(name)


def temp_owner(name: str) -> str | None:
    """The tag in a temporary file's name; None for any other name."""
    found = re.fullmatch(r"\.(?:[0-9a-f]{32,128}|identity|probe)\.(\w{3})(\w{3})", name, re.ASCII)
    if found is None or not all(map(_is_mixed, found.groups())):
        return None
    return found.group(1)


def _is_mixed(letters: str) -> bool:
    kinds = [str.islower, str.isupper, str.isdigit]
    return all(sum(map(kind, letters)) == 1 for kind in kinds)


def _mixed(random: Random) -> str:
    letters = [random.choice(_LOWER), random.choice(_LOWER).upper(), random.choice(_DIGITS)]
    random.shuffle(letters)
    return "".join(letters)
