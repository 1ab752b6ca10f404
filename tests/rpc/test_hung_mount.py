"""T7: a mount that hangs fails requests in time, leaves other keys served, and is left behind.

A real server over gRPC; only the file system below it can hang.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvserve.rpc.health
import kvserve.rpc.server
from kvclient import AsyncClient, ChunkStatus, Descriptor, StorageUnavailable
from kvserve.errors import DeadlineExceeded, InvalidRequest
from kvserve.format.messages import SERVICE
from kvserve.rpc.server import Server
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.descriptors import open_files
from tests.payload import payload_for, small_descriptor, store_all

TIMEOUT_S = 0.4
# T7 asks for twice the timeout; the rest is for a machine whose cores are busy.
SOON_S = 2 * TIMEOUT_S + 1.0
WRITING = ("create", "write_all", "close", "rename")
TIMEOUT, HIT = ChunkStatus.MISS_TIMEOUT, ChunkStatus.HIT


@pytest.fixture
def fs() -> Iterator[FaultyFileSystem]:
    fs = FaultyFileSystem()
    yield fs
    fs.heal()


@pytest.fixture
async def server(
    fs: FaultyFileSystem, start_server: Callable[..., Awaitable[Server]]
) -> AsyncIterator[Server]:
    server = await start_server(
        fs, store={"io_timeout_s": TIMEOUT_S, "io_threads": 4, "known_ttl_s": 0}
    )
    yield server
    fs.heal()


@pytest.fixture
async def healthy(start_server: Callable[..., Awaitable[Server]]) -> AsyncIterator[AsyncClient]:
    """A client of another server on the tree, whose file system never hangs."""
    server = await start_server()
    async with AsyncClient(server.address, timeout_s=20) as client:
        yield client


async def put(client: AsyncClient, *descriptors: Descriptor) -> None:
    for descriptor in descriptors:
        await store_all(client, descriptor, payload_for(descriptor))


async def connect(client: AsyncClient) -> None:
    """Its connections are there, that for data too; nothing is stored."""
    descriptor = small_descriptor(chunks=1, first_token=7000)
    await put(client, descriptor)
    await client.delete(descriptor)


async def settled_open_files() -> int:
    """Without what the server's upkeep has open just then: a claim, a directory."""
    found = []
    for _ in range(5):
        found.append(await asyncio.to_thread(open_files))
        await asyncio.sleep(0.02)
    return min(found)


def part_of(descriptor: Descriptor, chunk: int) -> str:
    """What names the files of one chunk, the temporary one too."""
    return descriptor.chunk_hashes[chunk].hex()


async def fetched(
    client: AsyncClient, descriptor: Descriptor, source: bytearray
) -> list[ChunkStatus]:
    """How each chunk of a fetch ended; what came is right."""
    target = bytearray(len(source))
    result = await client.fetch(descriptor, target).wait()
    size = descriptor.layout.slice_sizes[0]
    for layer, start in enumerate(descriptor.payload_offsets):
        for chunk, verdict in enumerate(result.verdicts):
            if verdict.status is HIT:
                at = start + chunk * size
                assert target[at : at + size] == source[at : at + size], (layer, chunk)
    return [verdict.status for verdict in result.verdicts]


async def statuses(client: AsyncClient, descriptor: Descriptor) -> list[ChunkStatus]:
    return [verdict.status for verdict in (await client.lookup(descriptor)).verdicts]


async def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.01)


def chunk_files(root: Path) -> list[str]:
    tenants = [it for it in root.iterdir() if not it.name.startswith(".")]
    found = [it for tenant in tenants for it in tenant.rglob("*") if it.is_file()]
    return sorted(it.name for it in found if it.name != "identity")


class Soon:
    """The block ends within `SOON_S`."""

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        took = time.monotonic() - self.began
        assert took < SOON_S, f"it took {took:.2f} s"


class TestReads:
    async def test_a_read_that_hangs_is_a_miss_and_other_keys_are_served(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        slow, other = small_descriptor(chunks=1), small_descriptor(chunks=8, first_token=5000)
        await put(healthy, slow, other)
        fs.hang(part_of(slow, 0), ["read_into"], for_s=30)

        async def fetch_slow() -> list[ChunkStatus]:
            with Soon():
                return await fetched(client, slow, payload_for(slow))

        waiting = asyncio.create_task(fetch_slow())
        served = 0
        while not waiting.done():
            assert await fetched(client, other, payload_for(other)) == [HIT] * 8
            served += 1
        assert await waiting == [TIMEOUT]
        assert served > 1

    async def test_a_slice_that_hangs_takes_only_its_chunk(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        """The file is open already; frames of one slice each."""
        descriptor = small_descriptor(chunks=6, kv_heads=8, head_dim=1024, chunk_tokens=32)
        assert descriptor.layout.slice_sizes[0] == 1 << 20
        source = payload_for(descriptor)
        await put(healthy, descriptor)
        assert await fetched(client, descriptor, source) == [HIT] * 6
        fs.hang(part_of(descriptor, 2), ["read_into"])
        with Soon():
            found = await fetched(client, descriptor, source)
        assert found == [HIT, HIT, TIMEOUT, HIT, HIT, HIT]
        # The header, and the first step: those after it wait for the same chunk's read.
        assert fs.attempts("read_into", part_of(descriptor, 2)) == 2
        assert await fetched(client, descriptor, source) == found
        assert fs.attempts("read_into", part_of(descriptor, 2)) == 2

    async def test_more_hung_reads_than_threads_leave_others_served(
        self,
        fs: FaultyFileSystem,
        start_server: Callable[..., Awaitable[Server]],
        healthy: AsyncClient,
        plane: str,
    ) -> None:
        """Twelve, four threads: the others' turn comes after three quarters of the timeout. What is
        left of it is for a machine whose cores are busy."""
        store = {"io_timeout_s": 4 * TIMEOUT_S, "io_threads": 4, "known_ttl_s": 0}
        server = await start_server(fs, store=store)
        client = AsyncClient(server.address, timeout_s=20, plane=plane)
        slow = [small_descriptor(chunks=1, first_token=100 * n) for n in range(12)]
        other = small_descriptor(chunks=8, first_token=5000)
        await put(healthy, *slow, other)
        for descriptor in slow:
            fs.hang(part_of(descriptor, 0), ["read_into"])
        waiting = [
            asyncio.create_task(fetched(client, descriptor, payload_for(descriptor)))
            for descriptor in slow
        ]
        with Soon():
            await until(lambda: fs.attempts("read_into", "") >= 4)
            assert await fetched(client, other, payload_for(other)) == [HIT] * 8
        with Soon():
            assert await asyncio.gather(*waiting) == [[TIMEOUT]] * 12
            assert await statuses(client, other) == [HIT] * 8
        await client.close()

    async def test_one_failed_read_one_attempt(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        """C3: it was a hit, its read failed, it is a miss; nobody tries in a circle."""
        descriptor = small_descriptor(chunks=3)
        source = payload_for(descriptor)
        await put(healthy, descriptor)
        fs.fail(part_of(descriptor, 0), ["read_into"])
        assert await statuses(client, descriptor) == [HIT] * 3
        for _ in range(3):
            found = await fetched(client, descriptor, source)
            assert found == [ChunkStatus.MISS_ERROR, HIT, HIT]
            assert await statuses(client, descriptor) == found
        result = await client.lookup(descriptor)
        assert result.prefix_chunks == 0
        assert result.verdicts[0].message.endswith(f"{part_of(descriptor, 0)}: EIO")
        assert fs.attempts("read_into", part_of(descriptor, 0)) == 1
        fs.heal()
        await put(client, descriptor)
        assert await fetched(client, descriptor, source) == [HIT] * 3, "stored anew"

    async def test_a_delete_clears_it_too(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        descriptor = small_descriptor(chunks=1)
        await put(healthy, descriptor)
        fs.fail(part_of(descriptor, 0), ["read_into"])
        await fetched(client, descriptor, payload_for(descriptor))
        await client.delete(descriptor)
        assert await statuses(client, descriptor) == [ChunkStatus.MISS_ABSENT]

    async def test_a_lookup_that_hangs(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        descriptor = small_descriptor(chunks=40)
        await put(healthy, descriptor)
        fs.hang(part_of(descriptor, 3), ["stat"])
        for _ in range(3):
            with Soon():
                found = await statuses(client, descriptor)
            assert found == [HIT] * 3 + [TIMEOUT] + [HIT] * 36
        assert fs.attempts("stat", part_of(descriptor, 3)) == 1

    async def test_a_mount_that_hangs_altogether(
        self,
        fs: FaultyFileSystem,
        server: Server,
        client: AsyncClient,
        healthy: AsyncClient,
        root: Path,
    ) -> None:
        descriptor = small_descriptor(chunks=200)
        await put(healthy, descriptor)
        fs.hang(str(root), ["stat", "open_read", "read_into"])
        with Soon():
            assert await statuses(client, descriptor) == [TIMEOUT] * 200
        with Soon():
            found = await fetched(client, descriptor, payload_for(descriptor))
            assert found == [TIMEOUT] * 200
        with Soon(), pytest.raises(StorageUnavailable, match="file call"):
            await store_all(
                client, small_descriptor(first_token=9000), payload_for(small_descriptor())
            )
        fs.hang(str(root), ["unlink"])
        with Soon(), pytest.raises(StorageUnavailable, match=r"store\.io_timeout_s"):
            await client.delete(descriptor)

    async def test_cancels_and_deadlines_clean_up_in_time(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        descriptor = small_descriptor(chunks=2)
        await put(healthy, descriptor)
        fs.hang(part_of(descriptor, 0), ["read_into"])
        with Soon():
            handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
            await until(lambda: fs.attempts("read_into", part_of(descriptor, 0)) == 1)
            await handle.cancel()
            await server.service.ended()
        fs.hang(part_of(descriptor, 1), ["read_into"])
        with Soon():
            handle = client.fetch(
                descriptor, bytearray(descriptor.payload_size_bytes), timeout_s=0.05
            )
            with pytest.raises(DeadlineExceeded):
                await handle.wait()
            await server.service.ended()

    async def test_descriptors_return_to_the_baseline(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        """What a hung read uses is neither closed nor reused before it comes back."""
        descriptor = small_descriptor(chunks=6, kv_heads=8, head_dim=1024, chunk_tokens=32)
        source = payload_for(descriptor)
        await put(healthy, descriptor)
        chunks = server._tree.store.open_chunks
        await connect(client)
        baseline = await settled_open_files()
        await fetched(client, descriptor, source)
        fs.hang(part_of(descriptor, 0), ["read_into"])
        assert (await fetched(client, descriptor, source))[0] is TIMEOUT
        await asyncio.to_thread(chunks.close_idle_blocking)
        assert chunks.taken == 1, "that of the reads that hang"
        assert server._threads.hung == 1, "for all steps"
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        await asyncio.to_thread(chunks.close_released_blocking)
        await asyncio.to_thread(chunks.close_idle_blocking)
        assert chunks.taken == 0
        await until(lambda: open_files() <= baseline)

    async def test_an_open_that_hangs_is_closed_when_it_comes_back(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, healthy: AsyncClient
    ) -> None:
        descriptor = small_descriptor(chunks=3)
        await put(healthy, descriptor)
        chunks = server._tree.store.open_chunks
        await connect(client)
        baseline = await settled_open_files()
        fs.hang(part_of(descriptor, 1), ["open_read"])
        with Soon():
            found = await fetched(client, descriptor, payload_for(descriptor))
        assert found == [HIT, TIMEOUT, HIT]
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        await asyncio.to_thread(chunks.close_idle_blocking)
        assert chunks.taken == 0
        await until(lambda: open_files() <= baseline)


class TestWrites:
    @pytest.mark.parametrize("verb", WRITING)
    async def test_a_write_that_hangs_costs_its_chunk(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, root: Path, verb: str
    ) -> None:
        """The others are stored; what is left of it goes away once the call comes back."""
        descriptor = small_descriptor(chunks=4)
        source = payload_for(descriptor)
        await connect(client)
        baseline = await settled_open_files()
        fs.hang(part_of(descriptor, 1), [verb])
        with Soon():
            handle = client.store(descriptor, source)
            for layer in range(4):
                await handle.store_layer(layer)
            result = await handle.finish()
        stored = ChunkStatus.STORED
        assert [it.status for it in result.verdicts] == [
            stored,
            ChunkStatus.STORE_ERROR,
            stored,
            stored,
        ]
        assert (
            f"did not end within {TIMEOUT_S} s (store.io_timeout_s)" in result.verdicts[1].message
        )
        await server.service.ended()
        visible = [name for name in await asyncio.to_thread(chunk_files, root) if name[0] != "."]
        assert visible == sorted(part_of(descriptor, index) for index in (0, 2, 3))
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        left = await asyncio.to_thread(chunk_files, root)
        if verb != "rename":  # a rename that hangs may still come to its end: the chunk is whole
            assert left == visible
        assert server._tree.store.open_chunks.taken == 0
        await store_all(client, descriptor, source)
        assert await fetched(client, descriptor, source) == [HIT] * 4
        await asyncio.to_thread(server._tree.store.open_chunks.close_idle_blocking)
        await until(lambda: open_files() <= baseline)

    async def test_all_writes_hang(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, root: Path
    ) -> None:
        descriptor = small_descriptor(chunks=64)
        first = small_descriptor(chunks=1, first_token=7000)
        await store_all(client, first, payload_for(first))  # the namespace is there
        fs.hang(str(root), WRITING)
        with Soon(), pytest.raises(StorageUnavailable, match=r"store\.io_timeout_s"):
            await store_all(client, descriptor, payload_for(descriptor))
        await server.service.ended()
        with Soon():
            assert await fetched(client, first, payload_for(first)) == [HIT], "reads go on"
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        assert await asyncio.to_thread(chunk_files, root) == [part_of(first, 0)]
        await store_all(client, descriptor, payload_for(descriptor))

    @pytest.mark.parametrize("plane", ["grpc"])  # nothing is sent when it is refused
    async def test_stores_leave_threads_to_the_reads(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, root: Path
    ) -> None:
        first = small_descriptor(chunks=1, first_token=7000)
        await put(client, first)
        fs.hang(str(root), ["write_all"])

        async def refusal(chunks: int, number: int) -> str:
            descriptor = small_descriptor(chunks=chunks, first_token=number)
            try:
                handle = client.store(descriptor, payload_for(descriptor))
                for layer in range(4):
                    await handle.store_layer(layer)
                assert not (await handle.finish()).is_whole
            except StorageUnavailable as error:
                return str(error)
            return ""

        for begun in range(0, 1000, 100):  # most of them at once: each takes the timeout
            numbers = range(begun, begun + min(14, 28 - server._threads.hung))
            await asyncio.gather(*(refusal(1, number) for number in numbers))
            if server._threads.hung >= 28:
                break
        found = [await refusal(8, number) for number in range(1000, 1020)]
        assert sum("nothing is stored until some come back" in text for text in found) > 5
        assert 32 <= server._threads.hung < 40
        assert await fetched(client, first, payload_for(first)) == [HIT]
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        await put(client, small_descriptor(chunks=8))

    async def test_a_cancelled_store(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, root: Path
    ) -> None:
        descriptor = small_descriptor(chunks=4)
        fs.hang(part_of(descriptor, 0), ["write_all"])
        with Soon():
            handle = client.store(descriptor, payload_for(descriptor))
            await handle.store_layer(0)
            await until(lambda: fs.attempts("write_all", part_of(descriptor, 0)) == 1)
            await handle.cancel()
            await server.service.ended()
        fs.heal()
        await until(lambda: server._threads.hung == 0)
        assert await asyncio.to_thread(chunk_files, root) == []


class TestTheServer:
    async def test_transfers_are_counted_out_in_time(
        self, fs: FaultyFileSystem, start_server: Callable[..., Awaitable[Server]]
    ) -> None:
        server = await start_server(
            fs, store={"io_timeout_s": TIMEOUT_S}, limits={"transfers_max": 1}
        )
        slow, other = small_descriptor(chunks=1), small_descriptor(chunks=1, first_token=500)
        async with AsyncClient(server.address, timeout_s=20) as client:
            for descriptor in (slow, other):
                await store_all(client, descriptor, payload_for(descriptor))
            fs.hang(part_of(slow, 0), ["read_into"])
            assert await fetched(client, slow, payload_for(slow)) == [TIMEOUT]
            assert await fetched(client, other, payload_for(other)) == [HIT]

    async def test_a_root_that_hangs_is_no_start(
        self,
        fs: FaultyFileSystem,
        start_server: Callable[..., Awaitable[Server]],
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(kvserve.rpc.server, "_START_TIMEOUT_S", 0.2)
        fs.hang(str(root), ["make_dirs"])
        with Soon(), pytest.raises(InvalidRequest, match=f"{root} gave no answer in 0.2 s"):
            await start_server(fs)

    async def test_it_stops_while_calls_hang(
        self, fs: FaultyFileSystem, start_server: Callable[..., Awaitable[Server]], root: Path
    ) -> None:
        server = await start_server(fs, store={"io_timeout_s": TIMEOUT_S / 2, "known_ttl_s": 0})
        descriptor = small_descriptor(chunks=4)
        async with AsyncClient(server.address, timeout_s=20) as client:
            await store_all(client, descriptor, payload_for(descriptor))
            await fetched(client, descriptor, payload_for(descriptor))
            fs.hang(str(root), ["read_into", "stat", "close", "unlink", "create"])
            await statuses(client, descriptor)
        began = time.monotonic()
        await server.stop()
        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("plane", ["grpc"])  # it looks up only
    async def test_health_turns_and_turns_back(
        self,
        fs: FaultyFileSystem,
        server: Server,
        client: AsyncClient,
        root: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Five failures in a row; one probe at a time, also one that hangs; then it is back."""
        server._health._probe_interval_s = 0.05
        other = small_descriptor(chunks=1, first_token=9000)
        await store_all(client, other, payload_for(other))
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def are(wanted: int) -> bool:
                return {
                    (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                    for name in ("", SERVICE)
                } == {wanted}

            serving = health_pb2.HealthCheckResponse.SERVING
            not_serving = health_pb2.HealthCheckResponse.NOT_SERVING

            async def missed(number: int) -> list[ChunkStatus]:
                return await statuses(client, small_descriptor(chunks=1, first_token=number))

            fs.fail(f"{root}/default", ["stat"])
            for number in range(4):
                assert await missed(number) == [ChunkStatus.MISS_ERROR]
                assert await are(serving)
            fs.heal()
            fs.hang(f"{root}/default", ["stat"])
            fs.hang("probe", ["create"])
            assert await missed(4) == [TIMEOUT]
            while not await are(not_serving):
                await asyncio.sleep(0.01)
            await until(lambda: fs.attempts("create", "probe") == 2)
            await asyncio.sleep(TIMEOUT_S + 0.2)
            assert fs.attempts("create", "probe") == 2, "the start's, and the one that hangs"
            assert await are(not_serving)
            fs.heal()
            while not await are(serving):
                await asyncio.sleep(0.01)
        told = [it.message for it in caplog.records if it.name == kvserve.rpc.health.__name__]
        assert [("NOT_SERVING" in text) for text in told] == [True, False]

    async def test_a_request_that_is_served_turns_health_back(
        self, fs: FaultyFileSystem, server: Server, client: AsyncClient, root: Path
    ) -> None:
        server._health._probe_interval_s = 3600
        descriptors = [small_descriptor(chunks=1, first_token=number) for number in range(6)]
        for descriptor in descriptors:
            await store_all(client, descriptor, payload_for(descriptor))
        fs.fail(str(root), ["open_read"])
        for descriptor in descriptors[:5]:
            await fetched(client, descriptor, payload_for(descriptor))
        assert not server._health._storage.is_good
        fs.heal()
        await fetched(client, descriptors[5], payload_for(descriptors[5]))
        assert server._health._storage.is_good
