"""Checks slices against their checksums as their bytes pass by, in order. Pure.

A slice that comes whole is checked at once; one that comes in pieces is hashed piece by piece.
Both ends use it: the client on what has landed, the server on what came from a disk.
"""

import xxhash

from kvserve.format.chunk_file import checksum
from kvserve.model import ChunkStatus, Verdict


def mismatch(layer_index: int) -> Verdict:
    """What a chunk is of which a slice has a wrong checksum."""
    return Verdict(ChunkStatus.MISS_CORRUPT, f"checksum of layer {layer_index} does not match")


class SliceVerifier:
    """Feed every byte of one layer's slices in frame order; see `check`."""

    def __init__(self) -> None:
        self._running: xxhash.xxh3_64 | None = None

    def check(self, *parts: memoryview, slice_offset: int, ends_slice: bool, expected: int) -> bool:
        """Takes one slice's bytes in this frame, in order; False if it ends here with a wrong
        checksum."""
        if slice_offset == 0 and ends_slice and len(parts) == 1:
            return checksum(parts[0]) == expected
        if slice_offset == 0 or self._running is None:
            self._running = xxhash.xxh3_64()
        for part in parts:
            self._running.update(part)
        return not ends_slice or self._running.intdigest() == expected
