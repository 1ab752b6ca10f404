"""Prefill stores layer by layer, decode fetches by one request: the whole way over real gRPC."""

import asyncio
import ctypes
import mmap
from random import Random

import numpy as np
import pytest

from kvclient import (
    AsyncClient,
    ChunkStatus,
    Descriptor,
    HandleState,
    InvalidRequest,
    LayerMajor,
    Layout,
    ModelIdentity,
    Paged,
    Shard,
    attention,
    chunk_hashes,
    latent,
    opaque,
)
from tests.payload import payload_for, small_descriptor, store_all


async def test_what_was_stored_is_fetched_byte_for_byte(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    target = bytearray(len(source))
    await store_all(client, descriptor, source)
    handle = client.fetch(descriptor, target)
    result = await handle.wait()
    assert handle.state is HandleState.DONE
    assert result.prefix_chunks == descriptor.chunk_count
    assert result.landed_bytes == len(source)
    assert target == source


async def test_fetch_makes_one_request_whatever_the_number_of_chunks(client: AsyncClient) -> None:
    for chunks in (1, 7, 64):
        descriptor = small_descriptor(chunks=chunks, first_token=chunks * 1000)
        source = payload_for(descriptor)
        await store_all(client, descriptor, source)
        before = client.requests["Fetch"]
        await client.fetch(descriptor, bytearray(len(source))).wait()
        assert client.requests["Fetch"] - before == 1


async def test_one_request_per_layer(client: AsyncClient) -> None:
    descriptor = small_descriptor(layers=4, chunks=64)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    for layer_index in range(4):
        handle = client.fetch(descriptor, target, layers=[layer_index])
        event = await handle.layer(layer_index)
        assert event.missing == ()
        start = descriptor.payload_offsets[layer_index]
        stop = start + descriptor.layout.slice_sizes[layer_index] * descriptor.chunk_count
        assert target[start:stop] == source[start:stop]
        await handle.wait()
    assert client.requests["Fetch"] == 4
    assert client.requests["Store"] == 1


async def test_layers_arrive_in_the_descriptor_s_order(client: AsyncClient) -> None:
    plain = small_descriptor()
    order = (2, 0, 3, 1)
    descriptor = Descriptor(plain.identity, plain.chunk_hashes, layer_order=order)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    handle = client.fetch(descriptor, target)
    assert [event.layer_index async for event in handle.layers()] == list(order)
    assert target == source
    some = client.fetch(descriptor, target, layers=[3, 1])
    assert [event.layer_index async for event in some.layers()] == [3, 1]


async def test_a_layer_is_usable_while_the_next_is_not_stored_yet(client: AsyncClient) -> None:
    """A store handle takes layer i as soon as prefill has it, and says when it is written."""
    descriptor = small_descriptor()
    source = bytearray(descriptor.payload_size_bytes)
    payload = payload_for(descriptor)
    handle = client.store(descriptor, source)
    size = descriptor.layout.slice_sizes[0] * descriptor.chunk_count
    for layer_index in range(4):
        start = descriptor.payload_offsets[layer_index]
        source[start : start + size] = payload[start : start + size]
        await handle.store_layer(layer_index)
        # On return the region's bytes are ours again: what is sent must not change.
        source[start : start + size] = bytes(size)
        await handle.layer(layer_index)
        assert (await client.lookup(descriptor)).prefix_chunks == 0, "visible before it is whole"
    await handle.finish()
    target = bytearray(len(payload))
    await client.fetch(descriptor, target).wait()
    assert target == payload


async def test_known_chunks_are_never_sent_again(client: AsyncClient) -> None:
    short = small_descriptor(chunks=4)
    long = small_descriptor(chunks=8)
    payload = payload_for(long)
    await store_all(client, long, payload)
    handle = client.store(short, payload_for(short))
    assert await handle.needed() == []
    for layer_index in range(4):
        await handle.store_layer(layer_index)
    result = await handle.finish()
    assert {verdict.status for verdict in result.verdicts} == {ChunkStatus.KNOWN}
    assert handle.state is HandleState.DONE

    longer = small_descriptor(chunks=12)
    handle = client.store(longer, payload_for(longer))
    assert await handle.needed() == [8, 9, 10, 11]
    await handle.cancel()


async def test_a_hole_in_the_middle_is_a_miss_for_that_chunk_only(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    hole = Descriptor(descriptor.identity, (descriptor.chunk_hashes[5],))
    assert await client.delete(hole) == [ChunkStatus.DELETED]
    assert await client.delete(hole) == [ChunkStatus.MISS_ABSENT]
    presence = await client.lookup(descriptor)
    assert presence.prefix_chunks == 5
    assert presence.hits == [True] * 5 + [False] + [True] * 2
    target = bytearray(b"\xaa") * len(source)
    handle = client.fetch(descriptor, target)
    events = [event async for event in handle.layers()]
    result = await handle.wait()
    assert {event.missing for event in events} == {(5,)}
    assert handle.state is HandleState.ERR, "DONE would claim bytes that are not there"
    assert handle.error is None
    assert result.prefix_chunks == 5
    size = descriptor.layout.slice_sizes[0]
    for layer_index, start in enumerate(descriptor.payload_offsets):
        for chunk in range(8):
            at = start + chunk * size
            expected = source[at : at + size] if chunk != 5 else b"\xaa" * size
            assert target[at : at + size] == expected, (layer_index, chunk)


async def test_nothing_stored_is_an_answer_not_an_error(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    assert (await client.lookup(descriptor)).prefix_chunks == 0
    target = bytearray(descriptor.payload_size_bytes)
    handle = client.fetch(descriptor, target)
    assert len([event async for event in handle.layers()]) == 4
    assert (await handle.wait()).prefix_chunks == 0
    assert target == bytes(len(target))


@pytest.mark.parametrize(
    "layers",
    [
        (latent(576),) * 3,
        (attention(2, 64), opaque(5000), attention(2, 128), latent(64), opaque(1)),
        (opaque(3 << 20), opaque((1 << 20) + 1)),
    ],
    ids=["mla", "layers of different sizes", "slices larger than a frame"],
)
async def test_layouts(client: AsyncClient, layers: tuple[object, ...]) -> None:
    layout = Layout("bfloat16", 16, layers)  # type: ignore[arg-type]
    identity = ModelIdentity("m", "r", layout)
    descriptor = Descriptor(identity, chunk_hashes(range(5 * 16), 16))
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    handle = client.fetch(descriptor, target)
    await handle.wait()
    assert handle.state is HandleState.DONE
    assert target == source


@pytest.mark.parametrize("size", [16, 20, 32, 64])
async def test_engines_own_hashes(client: AsyncClient, size: int) -> None:
    hashes = tuple(Random(index).randbytes(size) for index in range(3))
    descriptor = Descriptor(small_descriptor().identity, hashes)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    await client.fetch(descriptor, target).wait()
    assert target == source


async def test_shards_and_tenants_do_not_meet(client: AsyncClient) -> None:
    base = small_descriptor()
    others = [Descriptor(base.identity, base.chunk_hashes, shard=Shard(rank, 2)) for rank in (0, 1)]
    others.append(Descriptor(base.identity, base.chunk_hashes, tenant="other"))
    for seed, descriptor in enumerate([base, *others]):
        assert (await client.lookup(descriptor)).prefix_chunks == 0
        await store_all(client, descriptor, payload_for(descriptor, seed))
    for seed, descriptor in enumerate([base, *others]):
        target = bytearray(descriptor.payload_size_bytes)
        await client.fetch(descriptor, target).wait()
        assert target == payload_for(descriptor, seed)


async def test_another_layout_is_a_miss_that_names_the_field(client: AsyncClient) -> None:
    stored = small_descriptor()
    await store_all(client, stored, payload_for(stored))
    asked = small_descriptor(dtype="float16")
    presence = await client.lookup(asked)
    assert presence.prefix_chunks == 0
    assert {verdict.status for verdict in presence.verdicts} == {ChunkStatus.MISS_IDENTITY}
    assert presence.verdicts[0].message == (
        "stored under another identity, which differs in dtype (asked 'float16', stored 'bfloat16')"
    )
    handle = client.fetch(asked, bytearray(asked.payload_size_bytes))
    result = await handle.wait()
    assert result.verdicts[0].status is ChunkStatus.MISS_IDENTITY
    assert "dtype" in result.verdicts[0].message


@pytest.mark.parametrize("kind", ["bytearray", "numpy", "mmap", "memoryview", "ctypes"])
async def test_regions_over_any_buffer(client: AsyncClient, kind: str) -> None:
    descriptor = small_descriptor()
    size = descriptor.payload_size_bytes
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    buffers = {
        "bytearray": bytearray(size),
        "numpy": np.zeros((4, size // 8), np.uint16),
        "mmap": mmap.mmap(-1, size),
        "memoryview": memoryview(bytearray(size)).cast("H"),
        "ctypes": (ctypes.c_uint32 * (size // 4))(),
    }
    target = buffers[kind]
    region = client.register(target)
    await client.fetch(descriptor, region).wait()
    assert bytes(region.view) == source
    region.close()


async def test_torch_tensors_are_regions(client: AsyncClient) -> None:
    torch = pytest.importorskip("torch", reason="needs the llm extra")
    descriptor = small_descriptor()
    source = torch.randint(-30000, 30000, (descriptor.payload_size_bytes // 2,)).to(torch.bfloat16)
    target = torch.zeros_like(source)
    await store_all(client, descriptor, source)
    await client.fetch(descriptor, target).wait()
    assert torch.equal(source.view(torch.int16), target.view(torch.int16))


async def test_paged_blocks_scatter_and_gather(client: AsyncClient) -> None:
    """A paged engine: K and V blocks of 4 tokens anywhere in its pool, by (layer, block)."""
    descriptor = small_descriptor()
    slice_size = descriptor.layout.slice_sizes[0]
    blocks_a_chunk = 8  # 2 (K, V) x 4 blocks of 4 tokens
    block = slice_size // blocks_a_chunk
    count = descriptor.chunk_count * blocks_a_chunk
    pool_blocks = 3 * 4 * count

    def scattered(seed: int) -> list[list[int]]:
        free = list(range(pool_blocks))
        Random(seed).shuffle(free)
        return [[free.pop() * block for _ in range(count)] for _ in range(4)]

    payload = payload_for(descriptor)
    pool = bytearray(pool_blocks * block)
    addresses = scattered(1)
    for layer_index, of_layer in enumerate(addresses):
        for number, address in enumerate(of_layer):
            at = descriptor.payload_offsets[layer_index] + number * block
            pool[address : address + block] = payload[at : at + block]
    await store_all(client, descriptor, Paged(pool, descriptor, addresses))

    other = bytearray(b"\xee") * len(pool)
    targets = scattered(2)
    handle = client.fetch(descriptor, Paged(other, descriptor, targets))
    await handle.wait()
    assert handle.state is HandleState.DONE
    used: set[int] = set()
    for layer_index, of_layer in enumerate(targets):
        for number, address in enumerate(of_layer):
            at = descriptor.payload_offsets[layer_index] + number * block
            assert other[address : address + block] == payload[at : at + block]
            used.add(address)
    for address in set(range(0, len(other), block)) - used:
        assert other[address : address + block] == b"\xee" * block, "wrote outside its blocks"


async def test_a_region_for_one_layer(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    size = descriptor.layout.slice_sizes[2] * descriptor.chunk_count
    target = bytearray(size)
    placement = LayerMajor(target, descriptor, layers=[2])
    await client.fetch(descriptor, placement, layers=[2]).wait()
    start = descriptor.payload_offsets[2]
    assert target == source[start : start + size]
    handle = client.fetch(descriptor, placement, layers=[1])
    with pytest.raises(InvalidRequest, match="layer 1 has no place in this region"):
        await handle.wait()


async def test_ten_thousand_chunks_in_one_descriptor(client: AsyncClient) -> None:
    descriptor = small_descriptor(chunks=10_000, layers=2, kv_heads=1, head_dim=1)
    assert descriptor.chunk_count == 10_000
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    result = await client.fetch(descriptor, target).wait()
    assert result.prefix_chunks == 10_000
    assert target == source
    assert client.requests["Fetch"] == 1


async def test_many_transfers_at_once(client: AsyncClient) -> None:
    descriptors = [small_descriptor(first_token=1000 * n) for n in range(12)]
    payloads = [payload_for(descriptor, n) for n, descriptor in enumerate(descriptors)]
    await asyncio.gather(*map(store_all, [client] * 12, descriptors, payloads))
    targets = [bytearray(len(payload)) for payload in payloads]
    await asyncio.gather(
        *(client.fetch(d, t).wait() for d, t in zip(descriptors, targets, strict=True))
    )
    assert targets == payloads


async def test_two_stores_of_the_same_chunks_at_once_both_succeed(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    payload = payload_for(descriptor)
    await asyncio.gather(*(store_all(client, descriptor, payload) for _ in range(4)))
    target = bytearray(len(payload))
    await client.fetch(descriptor, target).wait()
    assert target == payload


async def test_server_info(client: AsyncClient) -> None:
    info = await client.server_info()
    assert "plane.grpc" in info.capabilities
    assert info.chunks_max >= 10_000
    assert info.chunk_file_version == 1
    assert info.file_system
