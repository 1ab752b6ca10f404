"""Chunk file, version 1. Normative text with a worked example: docs/disk_format.md.

A chunk file is written once: the slices land at offsets that the layout alone decides, the header
goes in last, then the file gets its name. So `ChunkGeometry` (pure, one per identity) tells every
offset before a byte is known, and a header is read by comparing bytes, not by trusting numbers.

DO NOT CHANGE the constants or the order of fields: they are on disks. A new shape is a new version.
"""

import math
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgpack
import xxhash

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.format.identity import decode_identity
from kvserve.model import (
    LAYERS_MAX,
    ChunkKey,
    ChunkStatus,
    Layout,
    Shard,
    Verdict,
)
from kvserve.names import check_hashes, check_tenant

MAGIC: Final = b"\x89KVC\r\n\x1a\n"
VERSION: Final = 1
ALIGNMENT_BYTES: Final = 4096
FIRST_ALIGNMENT_BYTES_MAX: Final = 65_536
HEADER_SIZE_BYTES_MAX: Final = 1 << 20
"""More than any header that the model's rules allow."""
_PROLOGUE: Final = struct.Struct("<8sHHIQII")
"""magic, version, flags, header size, file size, meta size, layer count."""


PROLOGUE_SIZE_BYTES: Final = _PROLOGUE.size


def stated_size_bytes(head: bytes) -> int | None:
    """How long the file says it is, by its first `PROLOGUE_SIZE_BYTES`; None if that is no chunk
    file of this version. Not verified by anything: good for estimates only."""
    if len(head) < _PROLOGUE.size:
        return None
    magic, version, _, _, size_bytes, _, _ = _PROLOGUE.unpack_from(head)
    return size_bytes if magic == MAGIC and version == VERSION else None


def checksum(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64, seed 0: finds rot and torn writes, is never an identity."""
    return xxhash.xxh3_64_intdigest(data)


def checksums_from(packed: bytes) -> "array[int]":
    """Slice checksums as they are on disk and on the wire, little-endian, 8 bytes each."""
    found = array("Q", packed)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def pack_checksums(values: Sequence[int]) -> bytes:
    """The other way round."""
    return struct.pack(f"<{len(values)}Q", *values)


def _aligned(size: int, to: int = ALIGNMENT_BYTES) -> int:
    return -(-size // to) * to


def _first_alignment(slice_sizes: Sequence[int]) -> int:
    """Where the first slice may start: the largest power of two up to 64 KiB that divides every
    slice size, at least 4096. Then all slices are aligned like the first and cost no padding, and
    the page cache holds each in large pages (ext4, 64 KiB slices: writes 1.5 times as fast)."""
    common = math.gcd(FIRST_ALIGNMENT_BYTES_MAX, *slice_sizes)
    return max(common, ALIGNMENT_BYTES)


class ChunkGeometry:
    """Where everything is in a chunk file of one identity, for hashes of one size.

    Attributes:
        slice_offsets: file offset of each layer's slice; multiples of 4096, ascending.
        header_size_bytes: the header without its padding.
        file_size_bytes: size of the whole file; a multiple of 4096.
    """

    def __init__(self, key: ChunkKey) -> None:
        self.layout: Layout = key.identity.layout
        self._identity = [
            key.tenant,
            key.identity.encoded,
            key.shard.rank,
            key.shard.count,
        ]
        sizes = self.layout.slice_sizes
        count = len(sizes)
        meta_size = len(self._meta(key.chunk_hash))
        self.header_size_bytes = _PROLOGUE.size + meta_size + 3 * 8 * count + 8
        offsets, at = [], _aligned(self.header_size_bytes, _first_alignment(sizes))
        for size in sizes:
            offsets.append(at)
            at += _aligned(size)
        self.slice_offsets: tuple[int, ...] = tuple(offsets)
        self.file_size_bytes = at
        self._checksums = struct.Struct(f"<{count}Q")
        self._prologue = _PROLOGUE.pack(
            MAGIC, VERSION, 0, self.header_size_bytes, at, meta_size, count
        )
        self._table = struct.pack(f"<{2 * count}Q", *offsets, *sizes)

    def encode_header(self, chunk_hash: bytes, slice_checksums: Sequence[int]) -> bytes:
        """The header, padded to 4096; to be written at offset 0, last of all.

        Up to the first slice there may be a hole.
        """
        body = b"".join(
            (
                self._prologue,
                self._meta(chunk_hash),
                self._table,
                self._checksums.pack(*slice_checksums),
            )
        )
        header = body + checksum(body).to_bytes(8, "little")
        return header.ljust(_aligned(self.header_size_bytes), b"\0")

    def decode_header(self, chunk_hash: bytes, header: bytes) -> "array[int] | Verdict":
        """The slice checksums, by layer, if `header` belongs to exactly this chunk.

        `header` is what a read of `header_size_bytes` at offset 0 returned; it may be short.
        """
        size = self.header_size_bytes
        meta_start = len(self._prologue)
        table_start = meta_start + len(self._meta(chunk_hash))
        checksums_start = table_start + len(self._table)
        expected = self._prologue + self._meta(chunk_hash) + self._table
        whole = (
            len(header) == size
            and checksum(memoryview(header)[: size - 8]).to_bytes(8, "little") == header[size - 8 :]
        )
        if whole and header[:checksums_start] == expected:
            return checksums_from(header[checksums_start : size - 8])
        return diagnose(expected, header)

    def _meta(self, chunk_hash: bytes) -> bytes:
        packed: bytes = msgpack.packb([*self._identity, chunk_hash])
        return packed


def diagnose(expected: bytes, header: bytes) -> Verdict:
    """Names what is wrong with a header that is not the expected one (the slow path).

    Cases, in order: 1. not a chunk file or cut short; 2. another version; 3. its own checksum
    fails: rot; 4. a whole header of another chunk: identity; 5. same identity, other table: rot.
    """
    corrupt = ChunkStatus.MISS_CORRUPT
    if len(header) < _PROLOGUE.size:
        return Verdict(corrupt, f"header cut short at {len(header)} bytes")
    magic, version, _, size, _, meta_size, _ = _PROLOGUE.unpack_from(header)
    if magic != MAGIC:
        return Verdict(corrupt, f"not a chunk file: it starts with {magic.hex()}")
    if version != VERSION:
        return Verdict(
            ChunkStatus.MISS_IDENTITY, f"chunk file version {version}, this server reads {VERSION}"
        )
    _, _, _, size_expected, _, meta_expected, _ = _PROLOGUE.unpack_from(expected)
    if len(header) < min(size, size_expected):
        return Verdict(corrupt, f"header cut short at {len(header)} bytes")
    # A foreign header may be longer than what was read; its meta is still comparable.
    if size <= len(header):
        stored = int.from_bytes(header[size - 8 : size], "little")
        if checksum(header[: size - 8]) != stored:
            return Verdict(corrupt, "header checksum does not match")
    meta = header[_PROLOGUE.size : _PROLOGUE.size + meta_size]
    if meta != expected[_PROLOGUE.size : _PROLOGUE.size + meta_expected]:
        return Verdict(ChunkStatus.MISS_IDENTITY, "the file holds another chunk's identity")
    return Verdict(corrupt, "layer table does not match the layout")


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk file says of itself. `checksums` is by layer index."""

    key: ChunkKey
    geometry: ChunkGeometry
    checksums: "array[int]"


def read_header(start: bytes | memoryview) -> ChunkHeader | Verdict:
    """Whose chunk a file is, from its first bytes alone: at least `HEADER_SIZE_BYTES_MAX` of them,
    or the whole file.

    For the care of a tree; readers of a known chunk use `ChunkGeometry.decode_header`. Numbers in
    the file only say where to look, in bounds: from the names in it the header is made again, and
    must be equal byte for byte. MISS_IDENTITY is a file of another version.
    """
    corrupt = ChunkStatus.MISS_CORRUPT
    if len(start) < _PROLOGUE.size:
        return Verdict(corrupt, f"header cut short at {len(start)} bytes")
    magic, version, _, size, _, meta_size, layer_count = _PROLOGUE.unpack_from(start)
    if magic != MAGIC:
        return Verdict(corrupt, f"not a chunk file: it starts with {magic.hex()}")
    if version != VERSION:
        return Verdict(
            ChunkStatus.MISS_IDENTITY, f"chunk file version {version}, this program reads {VERSION}"
        )
    if (
        not 1 <= layer_count <= LAYERS_MAX
        or size != _PROLOGUE.size + meta_size + 3 * 8 * layer_count + 8
        or size > HEADER_SIZE_BYTES_MAX
    ):
        return Verdict(corrupt, "the sizes in the header do not fit each other")
    if len(start) < size:
        return Verdict(corrupt, f"header cut short at {len(start)} bytes")
    header = bytes(start[:size])
    if checksum(memoryview(header)[:-8]).to_bytes(8, "little") != header[-8:]:
        return Verdict(corrupt, "header checksum does not match")
    try:
        key, geometry = _named(header[_PROLOGUE.size : _PROLOGUE.size + meta_size])
    except (InvalidRequest, MalformedMessage) as error:
        return Verdict(corrupt, f"the header names no chunk: {error}")
    checksums = geometry.decode_header(key.chunk_hash, header)
    if isinstance(checksums, Verdict):
        return Verdict(corrupt, "the header is not the one that its names have")
    return ChunkHeader(key, geometry, checksums)


def _named(meta: bytes) -> tuple[ChunkKey, ChunkGeometry]:
    try:
        values = msgpack.unpackb(meta)
    except ValueError as error:
        raise MalformedMessage("no msgpack") from error
    if not isinstance(values, list) or len(values) != 5:
        raise MalformedMessage("no list of 5")
    tenant, identity, rank, count, chunk_hash = values
    if (
        not (isinstance(tenant, str) and isinstance(identity, bytes))
        or not (type(rank) is int and type(count) is int)
        or not isinstance(chunk_hash, bytes)
    ):
        raise MalformedMessage("a field has the wrong type")
    check_hashes([chunk_hash])
    geometry, first = _geometry(tenant, identity, rank, count, len(chunk_hash))
    return ChunkKey(first.tenant, first.identity, first.shard, chunk_hash), geometry


@lru_cache(maxsize=16)
def _geometry(
    tenant: str, identity: bytes, rank: int, count: int, hash_size: int
) -> tuple[ChunkGeometry, ChunkKey]:
    """All files of a shard share one; `hash_size` only tells headers of other sizes apart."""
    check_tenant(tenant)
    key = ChunkKey(tenant, decode_identity(identity), Shard(rank, count), bytes(hash_size))
    return ChunkGeometry(key), key
