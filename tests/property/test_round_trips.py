"""Whatever is valid comes back as it was; whatever is not is refused in our own words."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import InvalidRequest, MalformedMessage
from kvserve.format.chunk_file import ChunkGeometry, ChunkHeader, read_header
from kvserve.format.identity import decode_identity, differences, model_of
from kvserve.format.messages import descriptor_from_pb, descriptor_to_pb, parse
from kvserve.model import ChunkStatus, Descriptor, Verdict
from kvserve.v1 import kvserve_pb2 as pb
from tests.property.strategies import descriptors

CHUNKS_MAX = 65_536


@given(descriptors())
def test_a_descriptor_survives_the_wire(descriptor: Descriptor) -> None:
    packed = descriptor_to_pb(descriptor).SerializeToString()
    again = descriptor_from_pb(parse(pb.Descriptor, packed), chunks_max=CHUNKS_MAX)
    assert again == descriptor
    assert again.identity.encoded == descriptor.identity.encoded, "same directory on both sides"


@given(descriptors(), descriptors())
def test_two_identities_share_an_encoding_only_if_they_are_equal(
    one: Descriptor, other: Descriptor
) -> None:
    same = one.identity == other.identity
    assert (one.identity.encoded == other.identity.encoded) == same
    assert (differences(one.identity.encoded, other.identity.encoded) == []) == same
    assert model_of(one.identity.encoded) == one.identity.model


@given(descriptors(), st.data())
def test_a_chunk_file_header_survives_the_disk(descriptor: Descriptor, data: st.DataObject) -> None:
    key = descriptor.key(0)
    geometry = ChunkGeometry(key)
    count = descriptor.layout.layer_count
    sums = array(
        "Q", data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=count, max_size=count))
    )
    header = geometry.encode_header(key.chunk_hash, sums)
    read = header[: geometry.header_size_bytes]
    assert geometry.decode_header(key.chunk_hash, read) == sums
    for index in range(1, descriptor.chunk_count):
        other = geometry.decode_header(descriptor.chunk_hashes[index], read)
        assert isinstance(other, Verdict)
        assert other.status is ChunkStatus.MISS_IDENTITY


@given(descriptors())
def test_a_file_says_whose_chunk_it_is(descriptor: Descriptor) -> None:
    """With no expectation: what fsck reads is what was stored."""
    key = descriptor.key(descriptor.chunk_count - 1)
    sums = list(range(descriptor.layout.layer_count))
    header = read_header(ChunkGeometry(key).encode_header(key.chunk_hash, sums))
    assert isinstance(header, ChunkHeader), header
    assert header.key == key
    assert tuple(header.checksums) == tuple(sums)
    assert header.geometry.slice_offsets == ChunkGeometry(key).slice_offsets
    assert decode_identity(key.identity.encoded) == key.identity


@given(descriptors(), descriptors(), st.data())
def test_a_foreign_header_never_passes(
    one: Descriptor, other: Descriptor, data: st.DataObject
) -> None:
    """Of two different chunks neither reads the other's file."""
    if (one.key(0)) == other.key(0):
        return
    theirs = ChunkGeometry(other.key(0)).encode_header(
        other.chunk_hashes[0], [0] * other.layout.layer_count
    )
    geometry = ChunkGeometry(one.key(0))
    found = geometry.decode_header(one.chunk_hashes[0], theirs[: geometry.header_size_bytes])
    assert isinstance(found, Verdict)


@given(descriptors(), st.data())
def test_a_damaged_descriptor_is_another_one_or_refused(
    descriptor: Descriptor, data: st.DataObject
) -> None:
    """Never an exception of another kind, whatever a client sends."""
    packed = bytearray(descriptor_to_pb(descriptor).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = descriptor_from_pb(parse(pb.Descriptor, bytes(packed)), chunks_max=CHUNKS_MAX)
    except (InvalidRequest, MalformedMessage):
        return
    # Accepted: then it is valid in itself, and comes back as itself.
    message = descriptor_to_pb(again)
    assert descriptor_from_pb(message, chunks_max=CHUNKS_MAX) == again


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        descriptor_from_pb(parse(pb.Descriptor, noise), chunks_max=CHUNKS_MAX)
    except (InvalidRequest, MalformedMessage):
        return
    raise AssertionError("random bytes made a valid descriptor")
