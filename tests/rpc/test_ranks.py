"""T11: ranks of one group use the same prefix, and the number of requests is that of layers."""

from dataclasses import replace

import pytest

from kvclient import AsyncClient, ChunkStatus, Descriptor, InvalidRequest, Shard
from tests.payload import payload_for, small_descriptor, store_all

RANKS = 2
WHOLE = small_descriptor(chunks=8, layers=4)


def of_rank(rank: int) -> Descriptor:
    return replace(WHOLE, shard=Shard(rank, RANKS))


def chunk(descriptor: Descriptor, index: int) -> Descriptor:
    return replace(descriptor, chunk_hashes=(descriptor.chunk_hashes[index],))


@pytest.fixture
async def stored(client: AsyncClient) -> AsyncClient:
    for rank in range(RANKS):
        await store_all(client, of_rank(rank), payload_for(WHOLE, rank))
    return client


async def test_both_ranks_see_the_prefix_that_both_have(stored: AsyncClient) -> None:
    await stored.delete(chunk(of_rank(1), 5))
    for rank in range(RANKS):
        found = await stored.lookup(of_rank(rank), all_ranks=True)
        assert found.prefix_chunks == 5
        assert found.hits == [True] * 5 + [False] + [True] * 2, "with what is behind the hole"
        assert found.verdicts[5].message == "of rank 1"
    assert (await stored.lookup(of_rank(0))).prefix_chunks == 8, "by itself it sees its own"
    await stored.delete(chunk(of_rank(0), 0))
    found = await stored.lookup(of_rank(1), all_ranks=True)
    assert found.prefix_chunks == 0
    assert found.hits == [False] + [True] * 4 + [False] + [True] * 2


async def test_requests_are_layers_plus_one_lookup(stored: AsyncClient) -> None:
    before = dict(stored.requests)
    await stored.lookup(of_rank(0), all_ranks=True)
    for rank in range(RANKS):
        target = bytearray(WHOLE.payload_size_bytes)
        for layer_index in range(4):
            await stored.fetch(of_rank(rank), target, layers=[layer_index]).wait()
        assert target == payload_for(WHOLE, rank)
    assert stored.requests["Lookup"] - before.get("Lookup", 0) == 1
    assert stored.requests["Fetch"] - before.get("Fetch", 0) == 4 * RANKS


async def test_a_lease_for_all_ranks(stored: AsyncClient) -> None:
    await stored.delete(chunk(of_rank(1), 5))
    found = await stored.lookup(of_rank(0), all_ranks=True, lease_owner="r", lease_ttl_s=60)
    assert (found.prefix_chunks, found.leased_chunks) == (5, 15)
    assert await stored.release("r") == 15


async def test_one_rank_is_all_ranks(client: AsyncClient) -> None:
    await store_all(client, WHOLE, payload_for(WHOLE))
    assert (await client.lookup(WHOLE, all_ranks=True)).prefix_chunks == 8
    absent = small_descriptor(revision="r2")
    found = await client.lookup(absent, all_ranks=True)
    assert {verdict.status for verdict in found.verdicts} == {ChunkStatus.MISS_IDENTITY}


async def test_too_many_ranks_are_refused(client: AsyncClient) -> None:
    descriptor = replace(small_descriptor(chunks=9), shard=Shard(0, 65_536))
    with pytest.raises(InvalidRequest, match="chunks times ranks"):
        await client.lookup(descriptor, all_ranks=True)
