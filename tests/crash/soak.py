"""What the soak does: mixed operations on a few prefixes, many of them cut off at a random point.

Every slice that a fetch calls good is compared with what its chunk's hash says it must be.
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from kvclient import (
    AsyncClient,
    Descriptor,
    FetchHandle,
    Layout,
    ModelIdentity,
    ServerUnavailable,
    chunk_hashes,
    opaque,
)
from kvserve.model import ChunkStatus

PREFIXES, CHUNKS, LAYERS, SLICE_BYTES = 60, 8, 3, 2048
CUT_SHARE = float(os.environ.get("KVSERVE_SOAK_CUT_SHARE", "0.3"))
"""Of the operations; 0 leaves the connections whole, too."""
_CHUNK_TOKENS = 16
_PINNED_PREFIXES = 3
_SIZE = CHUNKS * LAYERS * SLICE_BYTES
_GONE = {ChunkStatus.MISS_ABSENT, ChunkStatus.MISS_EVICTED}

_IDENTITY = ModelIdentity(
    "org/soak",
    "1",
    Layout.uniform(
        layer_count=LAYERS, spec=opaque(SLICE_BYTES), dtype="uint8", chunk_tokens=_CHUNK_TOKENS
    ),
)


def prefix(number: int) -> Descriptor:
    tokens = range(number * 10_000, number * 10_000 + CHUNKS * _CHUNK_TOKENS)
    return Descriptor(_IDENTITY, chunk_hashes(tokens, _CHUNK_TOKENS))


def payload_of(descriptor: Descriptor) -> bytes:
    """Laid out [layer][chunk]; each slice follows from its chunk's hash and its layer."""
    return b"".join(
        hashlib.shake_256(chunk_hash + bytes([layer])).digest(SLICE_BYTES)
        for layer in range(LAYERS)
        for chunk_hash in descriptor.chunk_hashes
    )


class Soak:
    """Workers that share prefixes and clients; `done` counts operations, `ends` how they ended."""

    def __init__(
        self, clients: list[AsyncClient], flaky: AsyncClient, *, operations: int, seed: int
    ) -> None:
        """`flaky` is the one client whose connection may break."""
        self._clients = [*clients, flaky]
        self._flaky = flaky
        self._operations = operations
        self._seed = seed
        self.prefixes = [prefix(number) for number in range(PREFIXES)]
        self._payloads = [payload_of(descriptor) for descriptor in self.prefixes]
        self._absent = [prefix(PREFIXES + number) for number in range(4)]
        self._pinned: list[int] = []
        self._started = 0
        self._owners = 0
        self.done = 0
        self.compared_bytes = 0
        self.ends: Counter[str] = Counter()

    async def run(self, workers: int, progress: Callable[[int], None]) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in range(workers):
                client = self._clients[worker % len(self._clients)]
                group.create_task(self._work(client, Random(f"{self._seed}/{worker}"), progress))

    async def _work(
        self, client: AsyncClient, random: Random, progress: Callable[[int], None]
    ) -> None:
        kinds = [
            *((self._lookup, 20), (self._lease, 15), (self._store, 27), (self._fetch, 15)),
            *((self._fetch_by_layer, 10), (self._delete, 4), (self._pin, 4), (self._miss, 5)),
        ]
        works, weights = zip(*kinds, strict=True)
        while self._started < self._operations:
            self._started += 1
            work = random.choices(works, weights)[0]
            is_cut = random.random() < CUT_SHARE
            name = work.__name__.strip("_")
            try:
                await work(client, random, is_cut)
                self.ends[f"{name} {'cut' if is_cut else 'whole'}"] += 1
            except ServerUnavailable:
                if client is not self._flaky:
                    raise
                self.ends[f"{name} lost its connection"] += 1
            self.done += 1
            progress(self.done)

    async def _lookup(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        presence = await _call(client.lookup(random.choice(self.prefixes)), random, is_cut)
        assert presence is None or set(presence.misses) <= _GONE, presence

    async def _lease(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        """Half of the leases are released, the others expire, as those of dead engines do."""
        self._owners += 1
        owner, ttl_s = f"request-{self._owners}", random.uniform(0.05, 0.5)
        number = random.randrange(PREFIXES)
        asked = client.lookup(self.prefixes[number], lease_owner=owner, lease_ttl_s=ttl_s)
        presence = await _call(asked, random, is_cut)
        if presence is not None and random.random() < 0.5:
            target = bytearray(_SIZE)
            await self._compare(client.fetch(self.prefixes[number], target), number, target)
            await client.release(owner)

    async def _store(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        number = random.randrange(PREFIXES)
        handle = client.store(self.prefixes[number], self._payloads[number])
        cut = random.randrange(LAYERS) if is_cut else LAYERS
        try:
            for layer_index in range(cut):
                await handle.store_layer(layer_index)
            if is_cut:
                await asyncio.sleep(random.uniform(0, 0.003))
                return
            result = await handle.finish()
        finally:
            await handle.cancel()
        allowed = {ChunkStatus.STORED, ChunkStatus.KNOWN, ChunkStatus.NO_SPACE}
        assert {verdict.status for verdict in result.verdicts} <= allowed, result

    async def _fetch(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        number = random.randrange(PREFIXES)
        target = bytearray(_SIZE)
        handle = client.fetch(self.prefixes[number], target)
        if not is_cut:
            await self._compare(handle, number, target)
            return
        try:
            if random.random() < 0.5:
                await handle.layer(random.randrange(LAYERS))
            else:
                await asyncio.sleep(random.uniform(0, 0.003))
        finally:
            await handle.cancel()
        quiet = bytes(target)
        await asyncio.sleep(0)
        assert quiet == target, "the region changed after the cancel"

    async def _fetch_by_layer(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        """A request for each layer, all into one region."""
        number = random.randrange(PREFIXES)
        target = bytearray(_SIZE)
        for layer_index in range(LAYERS):
            handle = client.fetch(self.prefixes[number], target, layers=[layer_index])
            if is_cut and layer_index == 1:
                await asyncio.sleep(random.uniform(0, 0.002))
                await handle.cancel()
                return
            await self._compare(handle, number, target, [layer_index])

    async def _delete(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        await _call(client.delete(random.choice(self.prefixes)), random, is_cut)

    async def _pin(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        """So few that eviction always finds something else."""
        number = random.randrange(PREFIXES)
        self._pinned.append(number)
        await _call(client.pin(self.prefixes[number]), random, is_cut)
        if len(self._pinned) > _PINNED_PREFIXES:
            await client.unpin(self.prefixes[self._pinned.pop(0)])

    async def _miss(self, client: AsyncClient, random: Random, is_cut: bool) -> None:
        """Nobody has ever stored these."""
        descriptor = random.choice(self._absent)
        handle = client.fetch(descriptor, bytearray(_SIZE))
        if is_cut:
            await asyncio.sleep(random.uniform(0, 0.002))
            await handle.cancel()
            return
        result = await handle.wait()
        assert result.misses == {ChunkStatus.MISS_ABSENT: CHUNKS}, result

    async def _compare(
        self,
        handle: FetchHandle,
        number: int,
        target: bytearray,
        layers: Sequence[int] = range(LAYERS),
    ) -> None:
        """Waits for a fetch; its hits must be the right bytes, its misses honest."""
        try:
            result = await handle.wait()
        finally:
            await handle.cancel()
        expected = self._payloads[number]
        for chunk_index, verdict in enumerate(result.verdicts):
            if verdict.status is not ChunkStatus.HIT:
                assert verdict.status in _GONE, verdict
                continue
            for layer_index in layers:
                at = (layer_index * CHUNKS + chunk_index) * SLICE_BYTES
                end = at + SLICE_BYTES
                assert target[at:end] == expected[at:end], f"wrong bytes, seed {self._seed}"
                self.compared_bytes += SLICE_BYTES


async def _call(call: Coroutine[Any, Any, Any], random: Random, is_cut: bool) -> Any:
    """The answer, or None if it was cut off by cancelling the caller's task."""
    if not is_cut:
        return await call
    task = asyncio.ensure_future(call)
    await asyncio.sleep(random.uniform(0, 0.002))
    task.cancel()
    with suppress(asyncio.CancelledError):
        return await task
    return None


async def open_transfers(client: AsyncClient, count: int) -> None:
    """Has `count` stores open at once: none is refused only if no other transfer is open."""
    handles = [
        client.store(descriptor, bytearray(_SIZE))
        for descriptor in (prefix(PREFIXES + 100 + number) for number in range(count))
    ]
    try:
        await asyncio.gather(*(handle.needed() for handle in handles))
    finally:
        await asyncio.gather(*(handle.cancel() for handle in handles))


async def until(is_true: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Raises TimeoutError if it does not become true in time."""
    async with asyncio.timeout(timeout_s):
        while not await is_true():
            await asyncio.sleep(0.05)
