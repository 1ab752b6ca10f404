"""What comes from page cache is verified where it lands; what does not match is told to the server.

T5 end to end: rot is a miss for its chunk only, the file is set aside, a put heals it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import kvserve.transfer.fetch_pump
from kvclient import AsyncClient, ChunkStatus, Descriptor, FetchResult, Region, SharedRegion
from kvserve.errors import Overloaded, StorageUnavailable
from kvserve.format.chunk_file import pack_checksums
from kvserve.model import Verdict
from kvserve.rpc.server import Server
from kvserve.service import Service
from kvserve.store.locations import ChunkLocations
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.payload import payload_for, small_descriptor, store_all

HIT, CORRUPT, ABSENT = ChunkStatus.HIT, ChunkStatus.MISS_CORRUPT, ChunkStatus.MISS_ABSENT
CHUNKS, BAD, BAD_LAYER = 5, 2, 1


@pytest.fixture(params=["grpc", "tcp", "shm"])
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(server: Server, plane: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout_s=20, plane=plane) as client:
        yield client


@pytest.fixture
async def descriptor(server: Server) -> Descriptor:
    descriptor = small_descriptor(chunks=CHUNKS)
    async with AsyncClient(server.address, timeout_s=20) as client:
        await store_all(client, descriptor, payload_for(descriptor))
    return descriptor


def rot(root: Path, descriptor: Descriptor, chunk: int = BAD) -> Path:
    """One bit of one slice in page cache, as it may come from a disk."""
    where = ChunkLocations(str(root), descriptor)
    path = Path(where.path(chunk))
    with path.open("r+b") as file:
        file.seek(where.geometry.slice_offsets[BAD_LAYER] + 3)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    return path


async def fetched(
    client: AsyncClient, descriptor: Descriptor, plane: str, layers: tuple[int, ...] = ()
) -> FetchResult:
    """The result; what counts as a hit is right."""
    source = payload_for(descriptor)
    region = SharedRegion(len(source)) if plane == "shm" else Region(bytearray(len(source)))
    result = await client.fetch(descriptor, region, layers=layers).wait()
    size = descriptor.layout.slice_sizes[0]
    for layer in layers or range(descriptor.layout.layer_count):
        start = descriptor.payload_offsets[layer]
        for chunk, verdict in enumerate(result.verdicts):
            if verdict.status is HIT:
                at = start + chunk * size
                assert region.view[at : at + size] == source[at : at + size], (layer, chunk)
    return result


def aside(root: Path) -> list[str]:
    found = root / ".quarantine"
    return sorted(it.name for it in found.iterdir()) if found.exists() else []


async def test_rot_in_page_cache_costs_its_chunk_and_is_set_aside(
    client: AsyncClient, descriptor: Descriptor, root: Path, plane: str
) -> None:
    assert (await fetched(client, descriptor, plane)).is_whole
    path = rot(root, descriptor)
    result = await fetched(client, descriptor, plane)
    assert [it.status for it in result.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT]
    assert result.prefix_chunks == BAD
    assert result.verdicts[BAD].message == (
        f"layer {BAD_LAYER} does not match its checksum on arrival; "
        f"on the server: checksum of layer {BAD_LAYER} does not match"
    )
    assert not path.exists()
    assert [it for it in aside(root) if it.endswith(path.name)] == aside(root) != []
    found = [it.status for it in (await client.lookup(descriptor)).verdicts]
    assert found == [HIT, HIT, ABSENT, HIT, HIT]
    await store_all(client, descriptor, payload_for(descriptor))
    assert (await fetched(client, descriptor, plane)).is_whole


async def test_a_layer_that_is_right_is_right_whatever_the_others_are(
    client: AsyncClient, descriptor: Descriptor, root: Path, plane: str
) -> None:
    assert (await fetched(client, descriptor, plane)).is_whole
    rot(root, descriptor)
    assert (await fetched(client, descriptor, plane, (0,))).is_whole
    result = await fetched(client, descriptor, plane, (BAD_LAYER, 0))
    assert [it.status for it in result.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT]
    after = await fetched(client, descriptor, plane, (0,))
    assert after.verdicts[BAD].status is ABSENT


async def test_damage_on_the_way_leaves_the_file_where_it_is(
    client: AsyncClient,
    descriptor: Descriptor,
    root: Path,
    plane: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server sends one checksum that is wrong, as if the bytes were."""
    assert (await fetched(client, descriptor, plane)).is_whole

    def damaged(values: list[int]) -> bytes:
        return pack_checksums([value ^ (number == BAD) for number, value in enumerate(values)])

    monkeypatch.setattr(kvserve.transfer.fetch_pump, "pack_checksums", damaged)
    result = await fetched(client, descriptor, plane)
    assert [it.status for it in result.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT]
    assert result.verdicts[BAD].message.endswith("on the server: the stored chunk is right")
    monkeypatch.undo()
    assert aside(root) == []
    assert (await fetched(client, descriptor, plane)).is_whole


async def test_a_report_that_fails_takes_nothing_from_the_result(
    client: AsyncClient,
    descriptor: Descriptor,
    root: Path,
    plane: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (await fetched(client, descriptor, plane)).is_whole
    rot(root, descriptor)

    async def fail(self: Service, where: ChunkLocations) -> list[Verdict]:
        raise StorageUnavailable("read 7: EIO")

    monkeypatch.setattr(Service, "verify", fail)
    with caplog.at_level(logging.WARNING):
        result = await fetched(client, descriptor, plane)
    assert [it.status for it in result.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT]
    assert "1 chunks did not match on arrival, not reported" in caplog.text
    assert "EIO" in caplog.text


async def test_a_report_without_an_answer_ends_before_the_fetch_is_late(
    server: Server,
    descriptor: Descriptor,
    root: Path,
    plane: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(self: Service, where: ChunkLocations) -> list[Verdict]:
        await asyncio.sleep(30)
        raise AssertionError("nobody waits so long")

    monkeypatch.setattr(Service, "verify", hang)
    async with AsyncClient(server.address, timeout_s=4, plane=plane) as client:
        assert (await fetched(client, descriptor, plane)).is_whole
        rot(root, descriptor)
        began = time.monotonic()
        result = await fetched(client, descriptor, plane)
        assert time.monotonic() - began < 4
    assert [it.status for it in result.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT]


class TestTheCall:
    @pytest.fixture
    def plane(self) -> str:
        return "grpc"

    async def test_it_reads_every_chunk_and_says_what_it_found(
        self, server: Server, client: AsyncClient, descriptor: Descriptor, root: Path
    ) -> None:
        found = await client.verify(descriptor)
        assert (found.prefix_chunks, found.misses) == (CHUNKS, {})
        path = rot(root, descriptor)
        beyond = small_descriptor(chunks=CHUNKS + 1)
        assert beyond.chunk_hashes[:CHUNKS] == descriptor.chunk_hashes
        found = await client.verify(beyond)
        assert [it.status for it in found.verdicts] == [HIT, HIT, CORRUPT, HIT, HIT, ABSENT]
        assert found.verdicts[BAD].message == f"checksum of layer {BAD_LAYER} does not match"
        assert not path.exists()
        assert (await client.verify(descriptor)).verdicts[BAD].status is ABSENT

    async def test_slices_larger_than_a_read(self, client: AsyncClient, root: Path) -> None:
        descriptor = small_descriptor(chunks=2, kv_heads=8, head_dim=2048, chunk_tokens=40)
        assert descriptor.layout.slice_sizes[0] > 2 << 20
        await store_all(client, descriptor, payload_for(descriptor))
        assert (await client.verify(descriptor)).prefix_chunks == 2
        rot(root, descriptor, 1)
        found = await client.verify(descriptor)
        assert [it.status for it in found.verdicts] == [HIT, CORRUPT]

    async def test_a_few_at_once_and_the_others_are_told_to_retry(
        self, server: Server, client: AsyncClient, descriptor: Descriptor
    ) -> None:
        """They must not take the threads, or the places, of transfers."""
        found = await asyncio.gather(
            *(client.verify(descriptor) for _ in range(40)), return_exceptions=True
        )
        refused = [it for it in found if isinstance(it, Overloaded)]
        good = [it for it in found if not isinstance(it, BaseException)]
        assert len(refused) + len(good) == 40
        assert refused
        assert all(it.prefix_chunks == CHUNKS for it in good)
        assert len(good) >= 4
        assert (await client.verify(descriptor)).prefix_chunks == CHUNKS

    async def test_one_that_hangs_condemns_no_chunk(
        self, descriptor: Descriptor, start_server: Callable[..., Awaitable[Server]]
    ) -> None:
        fs = FaultyFileSystem()
        server = await start_server(fs, store={"io_timeout_s": 0.3})
        async with AsyncClient(server.address, timeout_s=20) as client:
            fs.hang(descriptor.chunk_hashes[BAD].hex(), ["read_into"], for_s=1)
            found = await client.verify(descriptor)
            statuses = [it.status for it in found.verdicts]
            assert statuses == [HIT, HIT, ChunkStatus.MISS_TIMEOUT, HIT, HIT]
            assert (await client.lookup(descriptor)).prefix_chunks == CHUNKS
        fs.heal()
