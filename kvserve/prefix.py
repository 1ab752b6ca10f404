"""Chunk hashes of a prompt: SHA-256, chained, so that each names the whole prefix up to it.

H_i = SHA256(domain || len(H_{i-1}) || H_{i-1} || tokens_i as little-endian u32), H_{-1} empty
(ObjectCache's rule, arXiv 2605.22850). Nothing in it depends on the process: Python's `hash()`
does, and has cost others every hit after a restart. Engines that have their own hashes (16 to 64
bytes) use those instead.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable

from kvserve.errors import InvalidRequest

_DOMAIN = b"kvserve chunk hash 1\0"


def chunk_hashes(
    token_ids: Iterable[int],
    chunk_tokens: int,
    *,
    parent: bytes = b"",
    include_partial: bool = False,
) -> tuple[bytes, ...]:
    """The 32-byte hashes of the chunks of `token_ids`, in order.

    The partial last chunk has no hash unless `include_partial`: it is rarely reused, and its slices
    are padded by the caller. `parent` continues the chain of an earlier call that ended on a chunk
    boundary.

    Raises:
        InvalidRequest: a token id outside 0 to 2**32 - 1, or `chunk_tokens` below 1.
    """
    if chunk_tokens < 1:
        raise InvalidRequest(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    try:
        tokens = array("I", iter(token_ids))
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token_ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    raw = memoryview(tokens).cast("B")
    step = chunk_tokens * tokens.itemsize
    stop = len(raw) if include_partial else len(raw) - len(raw) % step
    hashes: list[bytes] = []
    for start in range(0, stop, step):
        digest = hashlib.sha256(_DOMAIN)
        digest.update(len(parent).to_bytes(2, "little") + parent)
        digest.update(raw[start : start + step])
        parent = digest.digest()
        hashes.append(parent)
    return tuple(hashes)
