"""Requests from raw bytes to chunk locations, whatever their size, without holding the event loop.

A request per layer brings the same descriptor each time: the last ones are kept, by their exact
bytes, with the paths that were made for them.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import xxhash

from kvserve.errors import Overloaded
from kvserve.format.messages import descriptor_from_pb
from kvserve.model import Descriptor
from kvserve.names import HASH_SIZE_BYTES_MIN
from kvserve.service import Service
from kvserve.store.locations import ChunkLocations
from kvserve.transfer.long_steps import CHUNKS_IN_PLACE_MAX
from kvserve.v1 import kvserve_pb2 as pb

KEPT_CHUNKS_MAX: Final = 1 << 17
"""Of all kept descriptors; some 340 bytes each. A descriptor's layers count like chunks, and so do
`_KEPT_CHUNKS` for the rest of it."""
_KEPT_CHUNKS: Final = 32
WAITING_BYTES_MAX: Final = 128 << 20
"""Of encoded descriptors that wait to be decoded."""


@dataclass(slots=True)
class _Kept:
    encoded: bytes
    where: ChunkLocations


class KeptLocations:
    """The descriptors asked for last, within a bound on their chunks. Safe from any thread."""

    def __init__(self, chunks_max: int = KEPT_CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.chunk_count = 0

    def get(self, encoded: bytes) -> ChunkLocations | None:
        key = xxhash.xxh3_128_digest(encoded)
        with self._lock:
            kept = self._kept.get(key)
            # The digest only finds it: two descriptors with one digest are not one.
            if kept is None or kept.encoded != encoded:
                return None
            self._kept.move_to_end(key)
            return kept.where

    def put(self, encoded: bytes, where: ChunkLocations) -> None:
        key = xxhash.xxh3_128_digest(encoded)
        with self._lock:
            self._drop(key)
            self._kept[key] = _Kept(encoded, where)
            self.chunk_count += _chunks(where.descriptor)
            while self.chunk_count > self._chunks_max:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.chunk_count -= _chunks(kept.where.descriptor)


def _chunks(descriptor: Descriptor) -> int:
    return descriptor.chunk_count + descriptor.layout.layer_count + _KEPT_CHUNKS


class DescriptorReader:
    """One per server."""

    def __init__(self, service: Service, chunks_max: int) -> None:
        self._service = service
        self._chunks_max = chunks_max
        self._kept = KeptLocations()
        self._waiting_bytes = 0

    async def read(self, message: pb.Descriptor) -> ChunkLocations:
        """Raises `InvalidRequest`, or `Overloaded` if too much waits to be decoded."""
        size_bytes = len(message.chunk_hashes)
        encoded = message.SerializeToString()
        kept = self._kept.get(encoded)
        if kept is not None:
            return kept
        if size_bytes <= CHUNKS_IN_PLACE_MAX * HASH_SIZE_BYTES_MIN:
            where = self._decode(message)
            self._kept.put(encoded, where)
            return where
        if self._waiting_bytes and self._waiting_bytes + size_bytes > WAITING_BYTES_MAX:
            raise Overloaded(
                f"{self._waiting_bytes} bytes of descriptors wait to be decoded; retry",
                retry_after_s=0.1,
            )

        def decode() -> ChunkLocations:
            # A request before this one in the line may have brought the same.
            where = self._kept.get(encoded)
            if where is None:
                where = self._decode(message)
                self._kept.put(encoded, where)
            return where

        self._waiting_bytes += size_bytes
        try:
            return await self._service.long_steps.run(size_bytes // HASH_SIZE_BYTES_MIN, decode)
        finally:
            self._waiting_bytes -= size_bytes

    def _decode(self, message: pb.Descriptor) -> ChunkLocations:
        return self._service.locate(descriptor_from_pb(message, chunks_max=self._chunks_max))
