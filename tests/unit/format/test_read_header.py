"""Whose chunk a file is, read from hostile bytes: the truth or a reason, never an error."""

import struct
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import MalformedMessage
from kvserve.format.chunk_file import ChunkGeometry, ChunkHeader, checksum, read_header
from kvserve.format.identity import decode_identity
from kvserve.model import ChunkStatus, Verdict
from tests.unit.samples import descriptor_of, identity_of

KEY = descriptor_of(1).key(0)
GEOMETRY = ChunkGeometry(KEY)
HEADER = GEOMETRY.encode_header(KEY.chunk_hash, [7, 8])
SIZE = GEOMETRY.header_size_bytes
META = bytes(HEADER[32 : 32 + struct.unpack_from("<I", HEADER, 24)[0]])
IDENTITY = msgpack.unpackb(KEY.identity.encoded)


def sealed(body: bytes) -> bytes:
    """With the right checksum: damage that was done on purpose."""
    return body + checksum(body).to_bytes(8, "little")


def with_meta(meta: bytes) -> bytes:
    """A header that is well-formed but for what `meta` says."""
    size = 32 + len(meta) + 48 + 8
    prologue = struct.pack("<8sHHIQII", HEADER[:8], 1, 0, size, 12288, len(meta), 2)
    return sealed(prologue + meta + HEADER[32 + len(META) : SIZE - 8])


def reason(start: bytes) -> str:
    found = read_header(start)
    assert isinstance(found, Verdict), found
    assert found.status is ChunkStatus.MISS_CORRUPT
    return found.message


def test_a_good_header() -> None:
    found = read_header(HEADER)
    assert isinstance(found, ChunkHeader)
    assert (found.key, list(found.checksums)) == (KEY, [7, 8])
    assert read_header(HEADER + bytes(100_000)) == found or isinstance(
        read_header(HEADER + bytes(100_000)), ChunkHeader
    )
    assert isinstance(read_header(memoryview(with_meta(META))), ChunkHeader)


def test_another_version_is_told_apart() -> None:
    found = read_header(HEADER[:8] + b"\x02" + HEADER[9:])
    assert found == Verdict(ChunkStatus.MISS_IDENTITY, "chunk file version 2, this program reads 1")


@pytest.mark.parametrize("size", [0, 1, 31, 32, 100, SIZE - 1])
def test_cut_short(size: int) -> None:
    assert reason(HEADER[:size]) == f"header cut short at {size} bytes"


def test_the_seal_is_checked_first() -> None:
    assert reason(HEADER[:60] + b"\xff" + HEADER[61:]) == "header checksum does not match"


SIZES = {
    "layers": (28, 0),
    "layers beyond the bound": (28, 4097),
    "many layers": (28, 2**32 - 1),
    "meta": (24, 2**32 - 1),
    "header": (12, 2**32 - 1),
    "header of nothing": (12, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_out_of_bounds(name: str) -> None:
    at, value = SIZES[name]
    changed = bytearray(HEADER)
    struct.pack_into("<I", changed, at, value)
    assert reason(bytes(changed)) == "the sizes in the header do not fit each other"


METAS = {
    "noise": b"\xc1",
    "no list": msgpack.packb({"a": 1}),
    "short list": msgpack.packb(["default"]),
    "a list said to be huge": b"\xdd\xff\xff\xff\xff",
    "text said to be huge": b"\x95\xdb\xff\xff\xff\xff",
    "deep": b"\x91" * 5000,
    "tenant of a wrong type": msgpack.packb([1, KEY.identity.encoded, 0, 1, KEY.chunk_hash]),
    "tenant that leaves the root": msgpack.packb(
        ["../../etc", KEY.identity.encoded, 0, 1, KEY.chunk_hash]
    ),
    "bool for a number": msgpack.packb(
        ["default", KEY.identity.encoded, False, True, KEY.chunk_hash]
    ),
    "shard": msgpack.packb(["default", KEY.identity.encoded, 3, 2, KEY.chunk_hash]),
    "negative rank": msgpack.packb(["default", KEY.identity.encoded, -1, 2, KEY.chunk_hash]),
    "hash too short": msgpack.packb(["default", KEY.identity.encoded, 0, 1, b"short"]),
    "hash of text": msgpack.packb(["default", KEY.identity.encoded, 0, 1, "x" * 32]),
    "identity": msgpack.packb(["default", b"no identity", 0, 1, KEY.chunk_hash]),
}


@pytest.mark.parametrize("name", METAS)
def test_meta_that_names_no_chunk(name: str) -> None:
    assert reason(with_meta(METAS[name])).startswith("the header names no chunk: ")


def test_an_encoding_that_is_not_the_smallest() -> None:
    """Equal values must be equal bytes, else one chunk had two headers."""
    long = META.replace(b"\xa7default", b"\xd9\x07default")
    assert reason(with_meta(long)) == "the header is not the one that its names have"


def test_a_table_that_the_layout_does_not_have() -> None:
    body = bytearray(HEADER[: SIZE - 8])
    struct.pack_into("<Q", body, 32 + len(META), 1 << 60)
    assert reason(sealed(bytes(body))) == "the header is not the one that its names have"


@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    read_header(noise)
    read_header(HEADER[:12] + noise)


@given(st.integers(8, SIZE - 9), st.integers(0, 255), st.booleans())
def test_any_changed_byte(at: int, value: int, seals: bool) -> None:
    """Sealed again it may be another chunk's honest header, or refused; this one's it is not."""
    body = bytearray(HEADER[:SIZE])
    is_same = body[at] == value
    body[at] = value
    found = read_header(sealed(bytes(body[:-8])) if seals else bytes(body))
    if isinstance(found, ChunkHeader):
        assert is_same or (seals and (found.key != KEY or found.checksums != (7, 8)))
    else:
        assert not is_same


def identity_with(position: int, value: object) -> bytes:
    changed = list(IDENTITY)
    changed[position] = value
    packed: bytes = msgpack.packb(changed)
    return packed


IDENTITIES = {
    "empty": (b"", "no list"),
    "a later encoding": (identity_with(0, 2), "encoding 2 is unknown"),
    "a bool": (identity_with(0, True), "encoding True is unknown"),
    "no text": (identity_with(1, 5), "wrong type"),
    "bytes for text": (identity_with(2, b"r1"), "wrong type"),
    "model with dots": (identity_with(1, "../x"), "identity.model"),
    "dtype": (identity_with(5, "float1"), "layout.dtype"),
    "no tokens": (identity_with(7, 0), "layout.chunk_tokens"),
    "layers of a wrong type": (identity_with(8, "many"), "no list of runs"),
    "no layers": (identity_with(8, []), "layout.layers"),
    "a run too short": (identity_with(8, [[1, 1]]), "no list of 5 numbers"),
    "a run of text": (identity_with(8, [["1", 1, 2, 8, 0]]), "no list of 5 numbers"),
    "a run of a billion": (identity_with(8, [[10**9, 1, 2, 8, 0]]), "a run of 1000000000"),
    "a run of less than nothing": (identity_with(8, [[-1, 1, 2, 8, 0]]), "a run of -1"),
    "many runs": (identity_with(8, [[1, 1, 2, 8, 0], [1, 1, 2, 9, 0]] * 2500), "no list of runs"),
    "runs that add up": (identity_with(8, [[4000, 1, 2, 8, 0], [97, 1, 2, 9, 0]]), "a run of 97"),
    "kind": (identity_with(8, [[1, 9, 2, 8, 0]]), "of kind 9"),
    "dimension": (identity_with(8, [[1, 1, 2, 2**63, 0]]), "layout.layers.head_dim"),
    "two runs for one": (identity_with(8, [[1, 1, 2, 8, 0], [1, 1, 2, 8, 0]]), "not the one"),
    "too large": (bytes(2 << 20), "no list"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_an_identity_that_is_refused(name: str) -> None:
    encoded, words = IDENTITIES[name]
    with pytest.raises(MalformedMessage, match=words):
        decode_identity(encoded)


def test_refusing_takes_no_time() -> None:
    """Numbers on a disk must not decide how long or how large the work is."""
    started = time.monotonic()
    for encoded, _ in IDENTITIES.values():
        with pytest.raises(MalformedMessage):
            decode_identity(encoded)
    assert time.monotonic() - started < 5


def test_an_identity_comes_back() -> None:
    identity = identity_of(adapter="lora", salt="secret")
    assert decode_identity(identity.encoded) == identity


@given(st.integers(0, len(KEY.identity.encoded) - 1), st.integers(0, 255))
def test_a_damaged_identity_is_another_or_none(at: int, value: int) -> None:
    damaged = bytearray(KEY.identity.encoded)
    damaged[at] = value
    try:
        assert decode_identity(bytes(damaged)).encoded == damaged
    except MalformedMessage:
        assert damaged != KEY.identity.encoded
