"""Where everything is in a chunk file, and that a damaged or foreign header never passes."""

import struct
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.format.chunk_file import (
    ALIGNMENT_BYTES,
    FIRST_ALIGNMENT_BYTES_MAX,
    MAGIC,
    VERSION,
    ChunkGeometry,
    checksum,
)
from kvserve.model import ChunkStatus, Descriptor, Layout, Shard, Verdict, attention, latent, opaque
from tests.unit.samples import HYBRID, SMALL, descriptor_of, hash_of, identity_of

DESCRIPTOR = descriptor_of(layout=HYBRID)
KEY = DESCRIPTOR.key(0)
GEOMETRY = ChunkGeometry(KEY)
CHECKSUMS = (1, 2**64 - 1, 0x0123456789ABCDEF)
HEADER = GEOMETRY.encode_header(KEY.chunk_hash, CHECKSUMS)[: GEOMETRY.header_size_bytes]
PROLOGUE_SIZE_BYTES = 32
META_SIZE_AT = 24
VERSION_BITS = range(8 * len(MAGIC), 8 * (len(MAGIC) + 2))


def verdict_of(header: bytes, geometry: ChunkGeometry = GEOMETRY) -> Verdict:
    """What the reader says to `header`, of which it reads no more than it expects."""
    found = geometry.decode_header(KEY.chunk_hash, header[: geometry.header_size_bytes])
    assert isinstance(found, Verdict), "a bad header passed"
    return found


def resealed(header: bytes) -> bytes:
    """`header` with a right checksum again: not rot, somebody wrote it like this."""
    body = header[:-8]
    return body + checksum(body).to_bytes(8, "little")


layouts = st.lists(
    st.builds(attention, st.integers(1, 64), st.integers(1, 256))
    | st.builds(latent, st.integers(1, 5000)),
    min_size=1,
    max_size=40,
).map(lambda layers: Layout("bfloat16", 16, tuple(layers)))


class TestGeometry:
    @given(layouts)
    def test_slices_are_aligned_ascending_and_apart(self, layout: Layout) -> None:
        """Each slice can be read alone by direct I/O, and nothing overlaps."""
        geometry = ChunkGeometry(descriptor_of(layout=layout).key(0))
        end, first = geometry.header_size_bytes, geometry.slice_offsets[0]
        for offset, size in zip(geometry.slice_offsets, layout.slice_sizes, strict=True):
            assert offset % ALIGNMENT_BYTES == 0
            alignment = FIRST_ALIGNMENT_BYTES_MAX if offset == first else ALIGNMENT_BYTES
            assert end <= offset < end + alignment, "no more padding than alignment needs"
            end = offset + size
        assert geometry.file_size_bytes % ALIGNMENT_BYTES == 0
        assert end <= geometry.file_size_bytes < end + ALIGNMENT_BYTES

    def test_slices_are_aligned_as_far_as_their_sizes_allow_without_padding(self) -> None:
        def first_and_size(*sizes: int) -> tuple[int, int]:
            layout = Layout("int8", 1, tuple(opaque(size) for size in sizes))
            geometry = ChunkGeometry(descriptor_of(layout=layout).key(0))
            return geometry.slice_offsets[0], geometry.file_size_bytes

        assert first_and_size(65536, 131072) == (65536, 65536 + 3 * 65536)
        assert first_and_size(1 << 20) == (65536, 65536 + (1 << 20))
        assert first_and_size(65536, 16384) == (16384, 16384 + 65536 + 16384)
        assert first_and_size(18432, 18432) == (4096, 4096 + 2 * 20480)
        assert first_and_size(1) == (4096, 8192)

    def test_llama_chunk_file_has_slices_on_64_kib(self) -> None:
        layout = Layout("bfloat16", 16, (attention(8, 128),) * 32)
        geometry = ChunkGeometry(descriptor_of(layout=layout).key(0))
        assert geometry.slice_offsets == tuple(65536 * (1 + layer) for layer in range(32))
        assert geometry.file_size_bytes == 65536 + layout.chunk_size_bytes

    def test_the_largest_layout_has_a_geometry(self) -> None:
        layout = Layout("int8", 1, (latent(1), latent(2)) * 2048)
        geometry = ChunkGeometry(descriptor_of(layout=layout).key(0))
        header = geometry.encode_header(KEY.chunk_hash, range(4096))
        assert len(header) == geometry.slice_offsets[0]
        assert geometry.decode_header(
            KEY.chunk_hash, header[: geometry.header_size_bytes]
        ) == array("Q", range(4096))

    def test_all_chunks_of_a_descriptor_share_one_geometry(self) -> None:
        one, other = (ChunkGeometry(DESCRIPTOR.key(index)) for index in (0, 2))
        assert one.slice_offsets == other.slice_offsets
        assert one.header_size_bytes == other.header_size_bytes
        assert one.file_size_bytes == other.file_size_bytes


class TestHeader:
    @given(st.tuples(*[st.integers(0, 2**64 - 1)] * 3))
    def test_round_trip_of_the_checksums(self, checksums: tuple[int, ...]) -> None:
        header = GEOMETRY.encode_header(KEY.chunk_hash, checksums)
        found = GEOMETRY.decode_header(KEY.chunk_hash, header[: GEOMETRY.header_size_bytes])
        assert found == array("Q", checksums)

    def test_header_is_zero_padded_to_the_first_slice(self) -> None:
        header = GEOMETRY.encode_header(KEY.chunk_hash, CHECKSUMS)
        assert len(header) == GEOMETRY.slice_offsets[0]
        assert not any(header[GEOMETRY.header_size_bytes :])

    def test_header_ends_with_the_checksum_of_all_before_it(self) -> None:
        assert int.from_bytes(HEADER[-8:], "little") == checksum(HEADER[:-8])

    def test_magic_shows_damage_by_text_tools(self) -> None:
        """As PNG's: a high bit, and both kinds of line end."""
        assert MAGIC[0] >= 0x80
        assert b"\r\n" in MAGIC
        assert MAGIC.endswith(b"\n")
        assert len(MAGIC) == 8


class TestDamage:
    def test_the_undamaged_header_passes(self) -> None:
        """Else nothing below could fail for the right reason."""
        assert GEOMETRY.decode_header(KEY.chunk_hash, HEADER) == array("Q", CHECKSUMS)

    def test_truncation_at_every_length_is_corrupt(self) -> None:
        for length in range(len(HEADER)):
            found = verdict_of(HEADER[:length])
            assert found.status is ChunkStatus.MISS_CORRUPT, length
            assert found.message == f"header cut short at {length} bytes"

    def test_every_single_flipped_bit_is_caught(self) -> None:
        """Rot is MISS_CORRUPT; only in the version field it looks like another version."""
        for bit in range(8 * len(HEADER)):
            damaged = bytearray(HEADER)
            damaged[bit // 8] ^= 1 << bit % 8
            found = verdict_of(bytes(damaged))
            in_version = bit in VERSION_BITS
            wanted = ChunkStatus.MISS_IDENTITY if in_version else ChunkStatus.MISS_CORRUPT
            assert found.status is wanted, (bit, found)
            assert found.message

    @pytest.mark.parametrize("fill", [b"\0", b"\xff"])
    def test_a_header_never_written_is_corrupt(self, fill: bytes) -> None:
        """Slices are written first: a file without its header is no chunk."""
        found = verdict_of(fill * len(HEADER))
        assert found.status is ChunkStatus.MISS_CORRUPT
        assert found.message == f"not a chunk file: it starts with {(fill * 8).hex()}"

    @given(st.binary(max_size=len(HEADER)))
    def test_no_bytes_pass_nor_raise(self, noise: bytes) -> None:
        assert verdict_of(noise).status is ChunkStatus.MISS_CORRUPT
        verdict_of(HEADER[:PROLOGUE_SIZE_BYTES] + noise)
        verdict_of(HEADER[:8] + noise)

    @given(st.data())
    def test_no_mixture_of_damage_passes_nor_raises(self, data: st.DataObject) -> None:
        damaged = bytearray(HEADER)
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(HEADER) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
        if damaged != HEADER:
            verdict_of(bytes(damaged[: data.draw(st.integers(0, len(HEADER)))]))

    def test_a_table_that_is_not_the_layouts_is_corrupt_even_if_sealed(self) -> None:
        at = PROLOGUE_SIZE_BYTES + struct.unpack_from("<I", HEADER, META_SIZE_AT)[0]
        offset = struct.unpack_from("<Q", HEADER, at)[0]
        assert offset == GEOMETRY.slice_offsets[0], "this is where the table starts"
        damaged = bytearray(HEADER)
        struct.pack_into("<Q", damaged, at, offset + ALIGNMENT_BYTES)
        found = verdict_of(resealed(bytes(damaged)))
        assert found == Verdict(ChunkStatus.MISS_CORRUPT, "layer table does not match the layout")


OTHERS = {
    "tenant": descriptor_of(layout=HYBRID, tenant="other").key(0),
    "shard rank": descriptor_of(layout=HYBRID, shard=Shard(1, 2)).key(0),
    "shard count": descriptor_of(layout=HYBRID, shard=Shard(0, 2)).key(0),
    "revision": Descriptor(identity_of(HYBRID, revision="r2"), (hash_of(0),)).key(0),
    "salt": Descriptor(identity_of(HYBRID, salt="s"), (hash_of(0),)).key(0),
    "longer names": Descriptor(
        identity_of(HYBRID, model="m" * 512, adapter="a" * 512), (hash_of(0),)
    ).key(0),
    "dtype": Descriptor(identity_of(replace(HYBRID, dtype="float16")), (hash_of(0),)).key(0),
    "fewer layers": Descriptor(identity_of(SMALL), (hash_of(0),)).key(0),
    "header of many pages": Descriptor(
        identity_of(Layout("int8", 1, (latent(1), latent(2)) * 2048)), (hash_of(0),)
    ).key(0),
    "hash": DESCRIPTOR.key(1),
    "hash size": Descriptor(identity_of(HYBRID), (hash_of(0, 16),)).key(0),
}


class TestForeign:
    @pytest.mark.parametrize("name", OTHERS)
    def test_a_whole_header_of_another_chunk_is_an_identity_miss(self, name: str) -> None:
        """T1, T5: the full identity is in the file; a file in the wrong place is never used."""
        other = OTHERS[name]
        geometry = ChunkGeometry(other)
        checksums = [7] * other.identity.layout.layer_count
        found = verdict_of(geometry.encode_header(other.chunk_hash, checksums))
        assert found == Verdict(
            ChunkStatus.MISS_IDENTITY, "the file holds another chunk's identity"
        )

    @pytest.mark.parametrize("name", OTHERS)
    def test_and_the_other_way_round(self, name: str) -> None:
        other = OTHERS[name]
        geometry = ChunkGeometry(other)
        whole = GEOMETRY.encode_header(KEY.chunk_hash, CHECKSUMS).ljust(1 << 20, b"\0")
        found = geometry.decode_header(other.chunk_hash, whole[: geometry.header_size_bytes])
        assert isinstance(found, Verdict)
        assert found.status is ChunkStatus.MISS_IDENTITY

    @pytest.mark.parametrize("version", [0, VERSION + 1, 0xFFFF])
    def test_another_version_is_an_identity_miss_that_names_both(self, version: int) -> None:
        other = bytearray(HEADER)
        struct.pack_into("<H", other, len(MAGIC), version)
        for header in (bytes(other), resealed(bytes(other))):
            found = verdict_of(header)
            assert found.status is ChunkStatus.MISS_IDENTITY
            assert found.message == f"chunk file version {version}, this server reads {VERSION}"
