"""Where a chunk's file is, relative to the root. Pure; nothing in it can leave the root.

```
<tenant>/<namespace>/<rank>of<count>/<fan>/<chunk hash in hex>
<tenant>/<namespace>/identity            the encoded identity, for people and for miss reasons
.quarantine/                             files that failed a check
```

`fan` is 3 hex digits of the hash's xxh3: 4,096 directories however an engine makes its hashes, so
10 million chunks of one shard are about 2,440 entries each. One level, since each new directory
costs a metadata operation. Tenants cannot start with a dot: dot names in the root are the server's.
"""

from random import Random
from typing import Final

import xxhash

from kvserve.model import ChunkKey

IDENTITY_NAME: Final = "identity"
QUARANTINE_DIR: Final = ".quarantine"
_FAN_BITS: Final = 12

_LOWER: Final = "abcdefghijklmnopqrstuvwxyz"
_DIGITS: Final = "0123456789"


def namespace_dir(key: ChunkKey) -> str:
    return f"{key.tenant}/{key.identity.namespace}"


def shard_dir(key: ChunkKey) -> str:
    return f"{namespace_dir(key)}/{key.shard.rank}of{key.shard.count}"


def chunk_path(shard_directory: str, chunk_hash: bytes) -> str:
    fan = xxhash.xxh3_64_intdigest(chunk_hash) >> (64 - _FAN_BITS)
    return f"{shard_directory}/{fan:03x}/{chunk_hash.hex()}"


def fan_dirs(shard_directory: str) -> list[str]:
    """All directories that chunks of one shard can be in."""
    return [f"{shard_directory}/{fan:03x}" for fan in range(1 << _FAN_BITS)]


def temp_path(path: str, random: Random) -> str:
    """A name beside `path` for its bytes until they are whole.

    `.NAME.XXXXXX` with a mixed suffix is the form that Lustre's crush directory hash places like
    NAME itself, so that the rename stays on one metadata target; docs/operations.md has more.
    """
    directory, _, name = path.rpartition("/")
    letters = [
        random.choice(_LOWER),
        random.choice(_LOWER).upper(),
        random.choice(_DIGITS),
        random.choice(_DIGITS),
        random.choice(_LOWER),
        random.choice(_LOWER).upper(),
    ]
    random.shuffle(letters)
    return f"{directory}/.{name}.{''.join(letters)}"
