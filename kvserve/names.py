"""Names that callers choose, and what may be in them: tenants, requests, models, chunk hashes.

Pure. They become directories, labels of metrics and lines of logs: nothing in them may lead out of
the root, steer a terminal or collide. `check_*` raise `InvalidRequest`, which names the rule.
"""

import re
from collections.abc import Sequence
from typing import Final

from kvserve.errors import InvalidRequest

HASH_SIZE_BYTES_MIN: Final = 16
HASH_SIZE_BYTES_MAX: Final = 64
NAME_SIZE_BYTES_MAX: Final = 512


def check_name(name: str, value: str, *, may_be_empty: bool) -> None:
    if not value:
        if may_be_empty:
            return
        raise InvalidRequest(f"{name} must not be empty")
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > NAME_SIZE_BYTES_MAX:
        raise InvalidRequest(f"{name} is {size} bytes long; at most {NAME_SIZE_BYTES_MAX}")
    if not value.isprintable():
        raise InvalidRequest(f"{name} {value[:64]!r} has a NUL, control or other unprintable sign")
    if ".." in value.split("/") or value.startswith("/") or value.endswith("/"):
        raise InvalidRequest(f"{name} {value[:64]!r} must not hold '..' nor start or end with '/'")


def check_tenant(tenant: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", tenant):
        raise InvalidRequest(
            f"tenant {tenant[:80]!r} must be 1 to 64 of A-Z a-z 0-9 . _ - and not start with '.'"
        )


def is_tenant(name: str) -> bool:
    """Whether a name that was found somewhere is that of a tenant."""
    try:
        check_tenant(name)
    except InvalidRequest:
        return False
    return True


def check_lease_owner(owner: str) -> None:
    if not 1 <= len(owner) <= 128 or not owner.isprintable():
        raise InvalidRequest(
            f"lease_owner {owner[:80]!r} must be 1 to 128 printable characters, as a request id"
        )


def check_hashes(chunk_hashes: Sequence[bytes]) -> None:
    """One size for all, 16 to 64 bytes; no hash twice; at least one."""
    if not chunk_hashes:
        raise InvalidRequest(
            "chunk_hashes is empty: a descriptor names at least one chunk; a prompt shorter than "
            "chunk_tokens has none"
        )
    # `map`, `set`: without a step of Python for each of maybe 65,536 chunks.
    if not all(issubclass(kind, bytes) for kind in set(map(type, chunk_hashes))):
        raise InvalidRequest("chunk_hashes must be bytes; bytes.fromhex() makes them from hex text")
    size = len(chunk_hashes[0])
    if not HASH_SIZE_BYTES_MIN <= size <= HASH_SIZE_BYTES_MAX:
        raise InvalidRequest(
            f"a chunk hash of {size} bytes: must be {HASH_SIZE_BYTES_MIN} to {HASH_SIZE_BYTES_MAX} "
            "(short hashes collide and serve wrong KV)"
        )
    if set(map(len, chunk_hashes)) != {size}:
        raise InvalidRequest("chunk_hashes differ in size: one descriptor, one hash size")
    if len(set(chunk_hashes)) != len(chunk_hashes):
        seen: set[bytes] = set()
        for index, chunk_hash in enumerate(chunk_hashes):
            if chunk_hash in seen:
                raise InvalidRequest(
                    f"chunk_hashes[{index}] {chunk_hash.hex()} is in the descriptor twice"
                )
            seen.add(chunk_hash)
