"""What every plane must hold, beside what the other files of this directory run over each."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from kvclient import (
    AsyncClient,
    ChunkStatus,
    DeadlineExceeded,
    Descriptor,
    HandleState,
    Layout,
    ModelIdentity,
    Paged,
    chunk_hashes,
    opaque,
)
from kvclient.channel import Channel
from kvclient.planes.tcp import DataConnections
from kvserve import nixl_agent
from kvserve.format.messages import descriptor_to_pb
from kvserve.rpc.server import Server
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import memory, payload_for, small_descriptor, store_all


@pytest.fixture(params=["grpc", "tcp", "shm", "nixl"])
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed (the extra nixl)")
    return name


@pytest.fixture
def start_server(
    start_server: Callable[..., Awaitable[Server]], plane: str
) -> Callable[..., Awaitable[Server]]:
    """Servers have the nixl plane only where it is tested: making an agent takes a while."""

    async def start(*args: object, **sections: dict[str, object]) -> Server:
        server = {"nixl": plane == "nixl", **sections.pop("server", {})}
        return await start_server(*args, server=server, **sections)

    return start


async def until(is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for the other side to notice; fails if it does not."""
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.01)


async def until_quiet(server: Server) -> None:
    await until(lambda: repr(server.service).startswith("<Service 0 transfers"))


def large() -> Descriptor:
    """16 layers x 64 chunks of 32 KiB slices: 32 MiB."""
    return small_descriptor(kv_heads=4, head_dim=128, chunks=64, layers=16)


def flip_last_byte(root: Path, chunk_hash: bytes) -> None:
    (path,) = root.rglob(chunk_hash.hex())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_the_plane_that_was_asked_for_is_the_one(
    client: AsyncClient, server: Server, plane: str
) -> None:
    descriptor = small_descriptor()
    await store_all(client, descriptor, payload_for(descriptor))
    await client.fetch(descriptor, memory(plane, descriptor.payload_size_bytes)).wait()
    there = ("grpc", "tcp", "shm", "nixl") if plane == "nixl" else ("grpc", "tcp", "shm")
    assert (await client.server_info()).planes == there
    kept = 0 if plane == "grpc" else 1
    await until_quiet(server)
    assert f" {kept} connections, 0 expected, 0 refused" in repr(server.data_port)


@pytest.mark.parametrize("slice_bytes", [8192, 3 << 20], ids=["whole slices", "pieces"])
async def test_a_damaged_chunk_in_the_middle(
    client: AsyncClient, root: Path, slice_bytes: int, plane: str
) -> None:
    """Reported once, quarantined; every other byte is there, and the chunk's layers before it."""
    layout = Layout("uint8", 16, (opaque(slice_bytes),) * 3)
    descriptor = Descriptor(
        ModelIdentity("m", "r", layout), chunk_hashes(range(5 * 16), layout.chunk_tokens)
    )
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    flip_last_byte(root, descriptor.chunk_hashes[2])  # in the last layer's slice
    region = memory(plane, len(source))
    target = region.view
    handle = client.fetch(descriptor, region)
    missing = [event.missing async for event in handle.layers()]
    result = await handle.wait()
    assert missing == [(), (), (2,)]
    assert handle.state is HandleState.ERR
    assert handle.error is None
    assert result.verdicts[2].status is ChunkStatus.MISS_CORRUPT
    assert "checksum of layer 2" in result.verdicts[2].message
    assert [verdict.status for verdict in result.verdicts].count(ChunkStatus.HIT) == 4
    at = descriptor.payload_offsets[2] + 2 * slice_bytes
    assert target[:at] == source[:at]
    assert target[at + slice_bytes :] == source[at + slice_bytes :]
    assert (await client.lookup(descriptor)).prefix_chunks == 2
    assert list((root / ".quarantine").iterdir())
    await store_all(client, descriptor, source)
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert target == source


async def test_cancels_at_any_moment_leave_the_region_alone(
    client: AsyncClient, server: Server, plane: str
) -> None:
    """T6: once `cancel` has returned nothing is written any more."""
    random = Random(6)
    descriptor = large()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    region = memory(plane, len(source))
    target = region.view
    reused = b"\xaa" * len(target)
    for _ in range(25):
        handle = client.fetch(descriptor, region)
        if random.random() < 0.8:
            await asyncio.sleep(random.uniform(0, 0.03))
        await handle.cancel()
        target[:] = reused
        await asyncio.sleep(0.005)
        assert target == reused
    await until_quiet(server)
    assert target == reused
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert target == source


async def test_cancelled_stores_publish_nothing(
    client: AsyncClient, server: Server, root: Path, plane: str
) -> None:
    random = Random(7)
    descriptor = large()
    source = memory(plane, payload_for(descriptor))
    for _ in range(10):
        handle = client.store(descriptor, source)

        async def send_all(handle: object = handle) -> None:
            for layer_index in descriptor.layer_order:
                await handle.store_layer(layer_index)  # type: ignore[attr-defined]

        sending = asyncio.ensure_future(send_all())
        await asyncio.sleep(random.uniform(0, 0.05))
        await handle.cancel()
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()
    await until_quiet(server)
    assert not any((await client.lookup(descriptor)).hits)
    assert [path for path in root.rglob(".*") if path.is_file()] == []
    await store_all(client, descriptor, source)


async def test_a_caller_that_gives_up_inside_a_layer_ends_the_store(
    client: AsyncClient, plane: str
) -> None:
    """The layer may be half sent: nothing that came after it could be believed."""
    descriptor = large()
    handle = client.store(descriptor, memory(plane, payload_for(descriptor)))
    await handle.needed()
    sending = asyncio.create_task(handle.store_layer(0))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])
    if sending.cancelled():
        await handle.cancel()
    assert not any((await client.lookup(descriptor)).hits)


async def test_transfers_at_once(client: AsyncClient, server: Server, plane: str) -> None:
    descriptors = [
        small_descriptor(kv_heads=4, head_dim=128, chunks=16, first_token=1000 * number)
        for number in range(6)
    ]
    payloads = [payload_for(descriptor, seed) for seed, descriptor in enumerate(descriptors)]
    await asyncio.gather(
        *(store_all(client, *both) for both in zip(descriptors, payloads, strict=True))
    )
    targets = [memory(plane, len(payload)) for payload in payloads]
    another = small_descriptor(first_token=100_000)
    await asyncio.gather(
        store_all(client, another, payload_for(another)),
        *(client.fetch(*both).wait() for both in zip(descriptors, targets, strict=True)),
    )
    assert [target.view for target in targets] == payloads
    await until_quiet(server)


async def test_a_stalled_reader_is_ended_by_its_deadline(
    client: AsyncClient, server: Server, plane: str
) -> None:
    """The server holds some frames for it, no more, and serves others meanwhile."""
    descriptor = large()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    await until_quiet(server)
    before = repr(server.data_port)
    channel = Channel(server.address, 2.0)
    request = pb.FetchRequest(descriptor=descriptor_to_pb(descriptor), planes=[plane])
    call = (await channel.connected("Fetch")).fetch(request, timeout=1.0)
    message = await call.read()
    head = pb.FetchReply.FromString(message).head
    if plane != "grpc":
        connection = await DataConnections("127.0.0.1").open(head.data)
    await until(lambda: not repr(server.service).startswith("<Service 0 transfers"))
    other = small_descriptor(first_token=5000)
    await store_all(client, other, payload_for(other))
    assert not repr(server.service).startswith("<Service 0 transfers"), "it is still there"
    await until_quiet(server)
    await until(lambda: repr(server.data_port) == before)
    if plane != "grpc":
        connection.close()
    await channel.close()


async def test_many_small_blocks(client: AsyncClient, plane: str) -> None:
    """More blocks in a frame than one system call takes."""
    descriptor = small_descriptor(layers=2, chunks=8, kv_heads=8, head_dim=128)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    block = 128
    count = len(source) // 2 // block
    order = list(range(2 * count))
    Random(8).shuffle(order)
    blocks = memory(plane, len(source))
    pool = blocks.view
    addresses = [[at * block for at in order[:count]], [at * block for at in order[count:]]]
    paged = Paged(blocks, descriptor, addresses)
    assert (await client.fetch(descriptor, paged).wait()).is_whole
    for layer_index in range(2):
        start = descriptor.payload_offsets[layer_index]
        for number in range(count):
            at = addresses[layer_index][number]
            assert pool[at : at + block] == source[start + number * block :][:block]
    again = small_descriptor(layers=2, chunks=8, kv_heads=8, head_dim=128, tenant="other")
    await store_all(client, again, Paged(blocks, again, addresses))
    region = memory(plane, len(source))
    target = region.view
    assert (await client.fetch(again, region).wait()).is_whole
    assert target == source


async def test_a_fetch_may_end_while_the_server_drains(
    start_server: Callable[..., Awaitable[Server]], plane: str
) -> None:
    server = await start_server(server={"drain_timeout_s": 20})
    descriptor = large()
    source = payload_for(descriptor)
    async with AsyncClient(server.address, plane=plane) as client:
        await store_all(client, descriptor, source)
        region = memory(plane, len(source))
        target = region.view
        handle = client.fetch(descriptor, region)
        await handle.layer(0)
        stopping = asyncio.create_task(server.stop())
        result = await handle.wait()
        assert result.is_whole
        assert target == source
        await stopping


async def test_a_server_that_stops_hard_ends_the_fetch_with_an_error(
    start_server: Callable[..., Awaitable[Server]], plane: str
) -> None:
    """Nothing is left open on either side, and the client finds the next server."""
    server = await start_server(server={"drain_timeout_s": 0})
    descriptor = large()
    source = payload_for(descriptor)
    async with AsyncClient(server.address, plane=plane) as client:
        await store_all(client, descriptor, source)
        handle = client.fetch(descriptor, memory(plane, len(source)), timeout_s=10)
        await handle.layer(0)
        await server.stop()
        await handle.ended()
        if handle.error is not None:  # else it was faster
            assert not isinstance(handle.error, DeadlineExceeded), handle.error
            assert handle.error.retryable
        again = await start_server(server={"listen": server.address})
        region = memory(plane, len(source))
        target = region.view
        assert (await client.fetch(descriptor, region).wait()).is_whole
        assert target == source
        assert again.address == server.address
