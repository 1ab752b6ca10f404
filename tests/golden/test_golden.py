"""Old chunks open for ever: version 1 as bytes, read by the code and by the text of the format."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
import xxhash

from kvserve.format.chunk_file import ChunkGeometry, checksum
from kvserve.model import ChunkStatus, Verdict
from kvserve.store.open_chunks import OpenChunk
from tests.golden.chunks import ALL, GoldenChunk
from tests.golden.make_golden import main, written_today
from tests.trees import tree_on

each = pytest.mark.parametrize("golden", ALL, ids=lambda golden: golden.name)


@each
def test_the_header_is_read_as_what_it_is(golden: GoldenChunk) -> None:
    geometry = ChunkGeometry(golden.descriptor.key(0))
    data = golden.file.read_bytes()
    assert len(data) == geometry.file_size_bytes
    found = geometry.decode_header(
        golden.descriptor.chunk_hashes[0], data[: geometry.header_size_bytes]
    )
    assert not isinstance(found, Verdict), found
    assert list(found) == [checksum(payload) for payload in golden.payloads()]


@each
def test_the_store_serves_it(golden: GoldenChunk, tmp_path: Path) -> None:
    """From its place in a tree of that time: names and directories are part of the format."""
    place = tmp_path / golden.path
    place.parent.mkdir(parents=True)
    place.write_bytes(golden.file.read_bytes())
    store = tree_on(tmp_path).store
    where = store.locate(golden.descriptor)
    assert where.path(0) == str(place)
    assert store.status_blocking(where, 0) == Verdict(ChunkStatus.HIT)
    chunk = store.open_blocking(where, 0)
    assert isinstance(chunk, OpenChunk)
    for layer_index, payload in enumerate(golden.payloads()):
        buffer = bytearray(len(payload))
        assert store.read_blocking(chunk, [(layer_index, 0, memoryview(buffer))]) is None
        assert buffer == payload
        assert checksum(buffer) == chunk.checksums[layer_index]
    store.open_chunks.release(chunk)
    store.open_chunks.close_idle_blocking()


@each
def test_the_same_chunk_written_today_is_the_same_file(golden: GoldenChunk, tmp_path: Path) -> None:
    file = written_today(golden, tmp_path)
    assert str(file.relative_to(tmp_path)) == golden.path
    assert file.read_bytes() == golden.file.read_bytes()


def test_the_script_keeps_what_is_there() -> None:
    before = {golden.name: golden.file.stat().st_mtime_ns for golden in ALL}
    assert main() == 0
    assert before == {golden.name: golden.file.stat().st_mtime_ns for golden in ALL}


@dataclass
class ByTheText:
    """A chunk file as docs/disk_format.md describes it; uses nothing of kvserve."""

    tenant: str
    identity: list[object]
    rank: int
    count: int
    chunk_hash: bytes
    payloads: list[bytes]

    @classmethod
    def read(cls, data: bytes) -> "ByTheText":
        magic, version, flags, header_size, file_size, meta_size, layers = struct.unpack_from(
            "<8sHHIQII", data
        )
        assert (magic, version, flags) == (b"\x89KVC\r\n\x1a\n", 1, 0)
        assert file_size == len(data)
        assert file_size % 4096 == 0
        assert header_size == 32 + meta_size + 24 * layers + 8
        header = data[:header_size]
        seal = struct.unpack("<Q", header[-8:])[0]
        assert seal == xxhash.xxh3_64_intdigest(header[:-8], seed=0)
        tenant, encoded, rank, count, chunk_hash = msgpack.unpackb(header[32 : 32 + meta_size])
        columns = struct.unpack_from(f"<{3 * layers}Q", header, 32 + meta_size)
        offsets, sizes, sums = (columns[at * layers :][:layers] for at in range(3))
        end = header_size
        payloads = []
        for offset, size, wanted in zip(offsets, sizes, sums, strict=True):
            assert offset == -(-end // 4096) * 4096
            assert not any(data[end:offset]), "padding is written as zeros"
            end = offset + size
            payloads.append(data[offset:end])
            assert xxhash.xxh3_64_intdigest(payloads[-1], seed=0) == wanted
        assert file_size == -(-end // 4096) * 4096
        assert not any(data[end:])
        return cls(tenant, msgpack.unpackb(encoded), rank, count, chunk_hash, payloads)


@each
def test_a_reader_made_from_the_text_agrees(golden: GoldenChunk) -> None:
    found = ByTheText.read(golden.file.read_bytes())
    descriptor, identity = golden.descriptor, golden.descriptor.identity
    layout = identity.layout
    runs: list[list[int]] = []
    for spec in layout.layers:
        shape = [int(spec.kind), spec.kv_heads, spec.head_dim, spec.opaque_bytes]
        if runs and runs[-1][1:] == shape:
            runs[-1][0] += 1
        else:
            runs.append([1, *shape])
    assert found.tenant == descriptor.tenant
    assert (found.rank, found.count) == (descriptor.shard.rank, descriptor.shard.count)
    assert found.chunk_hash == descriptor.chunk_hashes[0]
    assert found.identity == [
        1,
        identity.model,
        identity.revision,
        identity.adapter,
        identity.salt,
        layout.dtype,
        layout.axes,
        layout.chunk_tokens,
        runs,
    ]
    assert found.payloads == golden.payloads()


@each
def test_the_place_follows_from_the_text(golden: GoldenChunk) -> None:
    found = ByTheText.read(golden.file.read_bytes())
    packed = msgpack.packb(found.identity)
    namespace = hashlib.sha256(packed).hexdigest()[:32]
    fan = f"{xxhash.xxh3_64_intdigest(found.chunk_hash, seed=0) >> 52:03x}"
    name = found.chunk_hash.hex()
    assert golden.path == f"{found.tenant}/{namespace}/{found.rank}of{found.count}/{fan}/{name}"
