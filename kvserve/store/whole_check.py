"""Reads a stored chunk as a whole and compares every slice with its checksum.

For a client that got bytes which do not match: a fetch leaves what comes from page cache to be
verified by its receiver (`transfer/fetch_pump.py`), so it is asked for only if something is wrong.
"""

from typing import Final

from kvserve.format.verify import SliceVerifier, mismatch
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.chunk_store import HIT, ChunkStore
from kvserve.store.locations import ChunkLocations
from kvserve.store.open_chunks import OpenChunk

_READ_SIZE_BYTES: Final = 1 << 20


def check_whole_blocking(store: ChunkStore, where: ChunkLocations, chunk_index: int) -> Verdict:
    """HIT, or why the chunk is a miss; a damaged one is set aside."""
    chunk = store.open_blocking(where, chunk_index)
    if isinstance(chunk, Verdict):
        return chunk
    try:
        fault = _fault(store, chunk)
        if fault is None:
            return HIT
        if fault.status is ChunkStatus.MISS_CORRUPT:
            store.reject_blocking(chunk)
        return fault
    finally:
        store.release(chunk)


def _fault(store: ChunkStore, chunk: OpenChunk) -> Verdict | None:
    buffer = memoryview(bytearray(_READ_SIZE_BYTES))
    verifier = SliceVerifier()
    for layer_index, size in enumerate(chunk.geometry.layout.slice_sizes):
        for start in range(0, size, _READ_SIZE_BYTES):
            stop = min(start + _READ_SIZE_BYTES, size)
            part = buffer[: stop - start]
            if (fault := store.read_blocking(chunk, [(layer_index, start, part)])) is not None:
                return fault
            is_right = verifier.check(
                part,
                slice_offset=start,
                ends_slice=stop == size,
                expected=chunk.checksums[layer_index],
            )
            if not is_right:
                return mismatch(layer_index)
    return None
