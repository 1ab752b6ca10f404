"""Capacity over real gRPC: caps and quotas (T13), eviction in the background, leases and pins (T9),
expiry, two servers on one tree, and the counters that say why a chunk was missed."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvclient import (
    AsyncClient,
    ChunkStatus,
    Client,
    Descriptor,
    InvalidRequest,
    Overloaded,
)
from kvserve.format.chunk_file import ChunkGeometry
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from tests.payload import payload_for, small_descriptor, store_all

FILE_SIZE = ChunkGeometry(small_descriptor().key(0)).file_size_bytes
StartServer = Callable[..., Awaitable[Server]]
# Eviction starts above 8 chunks and stops at 6.
EIGHT = {
    "size_bytes_max": 10 * FILE_SIZE,
    "high_watermark": 0.8,
    "low_watermark": 0.6,
    "exchange_interval_s": 0.05,
}


def prefix(number: int, chunks: int = 2, tenant: str = "default") -> Descriptor:
    return small_descriptor(first_token=1_000_000 * number, chunks=chunks, tenant=tenant)


def tree_size_bytes(root: Path) -> int:
    """As du would count it: whole chunks and those being written."""
    total = 0
    for path in root.glob("*/*/*/*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # evicted meanwhile
            continue
    return total


def usage_bytes(server: Server) -> int:
    """Stored and let in."""
    return sum(amount.size_bytes for amount in server._tree.ledger.usage().values())


def stored_bytes(server: Server) -> int:
    return tree_size_bytes(Path(server._tree.store.root))


def leased_chunks(server: Server) -> int:
    return server._tree.exchange.leases.chunks


async def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


async def store_until_stored(client: AsyncClient, descriptor: Descriptor) -> None:
    """As an engine does that is told NO_SPACE: again, a little later."""
    for _ in range(200):
        handle = client.store(descriptor, payload_for(descriptor, 1))
        for layer_index in descriptor.layer_order:
            await handle.store_layer(layer_index)
        result = await handle.finish()
        if result.is_whole:
            return
        assert {it.status for it in result.verdicts} <= {
            ChunkStatus.NO_SPACE,
            ChunkStatus.STORED,
            ChunkStatus.KNOWN,
        }
        await asyncio.sleep(0.02)
    raise AssertionError("never let in")


async def hits(client: AsyncClient, descriptor: Descriptor) -> int:
    return sum((await client.lookup(descriptor)).hits)


@pytest.fixture
async def two_clients(start_server: StartServer) -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """Of two servers on one tree."""
    servers = [await start_server(capacity=EIGHT) for _ in range(2)]
    async with AsyncClient(servers[0].address) as one, AsyncClient(servers[1].address) as other:
        yield one, other


class TestCap:
    async def test_usage_never_exceeds_the_cap_and_new_prefixes_get_in(
        self, start_server: StartServer, root: Path
    ) -> None:
        server = await start_server(capacity=EIGHT)
        async with AsyncClient(server.address) as client:
            for number in range(32):
                await store_until_stored(client, prefix(number))
                assert tree_size_bytes(root) <= 10 * FILE_SIZE
            assert await hits(client, prefix(31)) == 2, "the last one stored is there"
            verdicts = (await client.lookup(prefix(0))).verdicts
        assert {it.status for it in verdicts} == {ChunkStatus.MISS_EVICTED}

    async def test_a_store_beyond_the_cap_keeps_its_head(self, start_server: StartServer) -> None:
        server = await start_server(capacity=EIGHT)
        descriptor = prefix(0, chunks=64)
        async with AsyncClient(server.address) as client:
            handle = client.store(descriptor, payload_for(descriptor))
            assert await handle.needed() == list(range(10))
            for layer_index in descriptor.layer_order:
                await handle.store_layer(layer_index)
            verdicts = (await handle.finish()).verdicts
        statuses = [it.status for it in verdicts]
        assert statuses == [ChunkStatus.STORED] * 10 + [ChunkStatus.NO_SPACE] * 54
        limit = f"the tree may hold {10 * FILE_SIZE} bytes (capacity.size_bytes_max)"
        assert verdicts[10].message == f"no room: {limit}; retry when eviction has made some"

    async def test_what_is_being_written_counts(self, start_server: StartServer) -> None:
        server = await start_server(capacity={"files_max": 3})
        async with AsyncClient(server.address) as client:
            first = client.store(prefix(0, chunks=2), payload_for(prefix(0)))
            assert await first.needed() == [0, 1]
            second = client.store(prefix(1, chunks=2), payload_for(prefix(1)))
            assert await second.needed() == [0]
            await first.cancel()
            await second.cancel()
            await until(lambda: usage_bytes(server) == stored_bytes(server))
            third = client.store(prefix(2, chunks=3), payload_for(prefix(2, chunks=3)))
            assert await third.needed() == [0, 1, 2]
            await third.cancel()

    async def test_two_stores_of_one_prefix_are_counted_once(
        self, start_server: StartServer, root: Path
    ) -> None:
        server = await start_server(capacity={"files_max": 100})
        descriptor = prefix(0, chunks=4)
        async with AsyncClient(server.address) as client:
            handles = [client.store(descriptor, payload_for(descriptor)) for _ in range(3)]
            for handle in handles:
                assert len(await handle.needed()) == 4
            for layer_index in descriptor.layer_order:
                for handle in handles:
                    await handle.store_layer(layer_index)
            for handle in handles:
                assert (await handle.finish()).is_whole
            await until(lambda: usage_bytes(server) == stored_bytes(server))
            assert usage_bytes(server) == tree_size_bytes(root) == 4 * FILE_SIZE
            await client.delete(descriptor)
            assert usage_bytes(server) == 0

    async def test_the_tail_goes_before_the_head(self, start_server: StartServer) -> None:
        server = await start_server(capacity={**EIGHT, "touch_interval_s": 1})
        async with AsyncClient(server.address) as client:
            await store_all(client, prefix(0, chunks=8), payload_for(prefix(0, chunks=8)))
            await asyncio.sleep(0.05)
            await server._upkeep._stamp()  # ages are written a few seconds after the use
            await store_until_stored(client, prefix(1, chunks=2))
            await until(lambda: usage_bytes(server) <= 8 * FILE_SIZE)
            found = (await client.lookup(prefix(0, chunks=8))).hits
        assert 0 < sum(found) < 8
        assert found == sorted(found, reverse=True), "what is left is a prefix"


class TestQuotas:
    async def test_a_ceiling_holds_one_tenant_only(self, start_server: StartServer) -> None:
        server = await start_server(tenants={"small": {"files_max": 2}})
        async with AsyncClient(server.address) as client:
            for tenant, let_in in (("small", 2), ("other", 6)):
                descriptor = prefix(0, chunks=6, tenant=tenant)
                handle = client.store(descriptor, payload_for(descriptor))
                assert len(await handle.needed()) == let_in
                await handle.cancel()

    async def test_a_floor_is_not_evicted_for_others(self, start_server: StartServer) -> None:
        server = await start_server(
            capacity=EIGHT, tenants={"kept": {"size_bytes_floor": 3 * FILE_SIZE}}
        )
        kept = prefix(0, chunks=3, tenant="kept")
        async with AsyncClient(server.address) as client:
            await store_all(client, kept, payload_for(kept))
            for number in range(1, 12):
                await store_until_stored(client, prefix(number))
            assert await hits(client, kept) == 3


class TestPressure:
    async def test_a_tenant_full_of_pins_does_not_keep_the_others_from_giving(
        self, start_server: StartServer
    ) -> None:
        server = await start_server(
            capacity={"files_max": 20, "exchange_interval_s": 0.05},
            tenants={"a": {"files_max": 10}},
        )
        pinned = prefix(0, chunks=10, tenant="a")
        async with AsyncClient(server.address) as client:
            await store_all(client, pinned, payload_for(pinned))
            await client.pin(pinned)
            for number in range(10):
                await store_until_stored(client, prefix(number, tenant="b"))
            assert await hits(client, pinned) == 10


class TestRestart:
    @pytest.mark.parametrize("is_killed", [False, True])
    def test_usage_survives_and_eviction_goes_on(self, root: Path, is_killed: bool) -> None:
        """T13. After a kill the count of the tree, in the background, tells."""
        settings = (
            f"capacity.size_bytes_max={10 * FILE_SIZE}",
            "capacity.high_watermark=0.8",
            "capacity.low_watermark=0.6",
            "capacity.exchange_interval_s=0.05",
            "store.owner_lease_s=1",
            "store.sweep_interval_s=1",
            "server.metrics_listen=127.0.0.1:0",
        )
        process = ServerProcess(root, settings=settings).start()
        with Client(process.address) as client:
            for number in range(4):
                put(client, prefix(number))
        process.kill() if is_killed else process.stop()
        with ServerProcess(root, settings=settings) as again, Client(again.address) as client:
            assert sum(map(sum, (client.lookup(prefix(it)).hits for it in range(4)))) == 8
            deadline = time.monotonic() + 10
            while metric(again, "kvserve_stored_bytes", "default") != 8 * FILE_SIZE:
                assert time.monotonic() < deadline, again.log()
                time.sleep(0.05)
            for number in range(4, 12):
                put(client, prefix(number))
                assert tree_size_bytes(root) <= 10 * FILE_SIZE
            assert all(client.lookup(prefix(11)).hits)
            assert metric(again, "kvserve_evicted_chunks_total") >= 12


class TestLeases:
    async def test_leased_chunks_stay_until_they_are_released(
        self, start_server: StartServer
    ) -> None:
        server = await start_server(capacity=EIGHT)
        leased = prefix(0)
        async with AsyncClient(server.address) as client:
            await store_all(client, leased, payload_for(leased))
            presence = await client.lookup(leased, lease_owner="request-1", lease_ttl_s=60)
            assert presence.leased_chunks == 2
            for number in range(1, 16):
                await store_until_stored(client, prefix(number))
            assert await hits(client, leased) == 2
            assert await client.release("request-1") == 2
            assert await client.release("request-1") == 0, "idempotent"
            for number in range(16, 32):
                await store_until_stored(client, prefix(number))
            assert await hits(client, leased) == 0

    async def test_a_lease_expires(self, start_server: StartServer) -> None:
        server = await start_server(capacity=EIGHT)
        leased = prefix(0)
        async with AsyncClient(server.address) as client:
            await store_all(client, leased, payload_for(leased))
            await client.lookup(leased, lease_owner="forgotten", lease_ttl_s=0.2)
            await until(lambda: leased_chunks(server) == 0)
            for number in range(1, 16):
                await store_until_stored(client, prefix(number))
            assert await hits(client, leased) == 0

    async def test_only_hits_are_leased_and_a_shard_does_not_replace_another(
        self, start_server: StartServer
    ) -> None:
        server = await start_server()
        one, other = prefix(0), small_descriptor(revision="r2")
        async with AsyncClient(server.address) as client:
            await store_all(client, one, payload_for(one))
            await store_all(client, other, payload_for(other))
            longer = prefix(0, chunks=5)
            found = await client.lookup(longer, lease_owner="r", lease_ttl_s=60)
            assert (found.prefix_chunks, found.leased_chunks) == (2, 2)
            assert (await client.lookup(other, lease_owner="r", lease_ttl_s=60)).leased_chunks == 8
            await client.lookup(one, lease_owner="r", lease_ttl_s=60)
            assert leased_chunks(server) == 10, "the same again is no second lease"
            assert await client.release("r", tenant="elsewhere") == 0
            assert await client.release("r") == 10

    @pytest.mark.parametrize(
        ("owner", "ttl_s", "words"),
        [
            ("", 5.0, "lease_owner"),
            ("x" * 129, 5.0, "lease_owner"),
            ("a\nb", 5.0, "lease_owner"),
            ("r", 0.0, "lease_ttl_s"),
            ("r", -1.0, "lease_ttl_s"),
            ("r", float("nan"), "lease_ttl_s"),
            ("r", 1e9, "lease_ttl_s_max"),
        ],
    )
    async def test_bad_leases_are_refused(
        self, client: AsyncClient, owner: str, ttl_s: float, words: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=words):
            await client.lookup(prefix(0), lease_owner=owner, lease_ttl_s=ttl_s)

    async def test_the_number_of_leases_is_bounded(self, start_server: StartServer) -> None:
        server = await start_server(capacity={"leased_chunks_max": 3})
        descriptor = prefix(0)
        async with AsyncClient(server.address) as client:
            await store_all(client, descriptor, payload_for(descriptor))
            await client.lookup(descriptor, lease_owner="one", lease_ttl_s=60)
            with pytest.raises(Overloaded, match="leased_chunks_max"):
                await client.lookup(descriptor, lease_owner="two", lease_ttl_s=60)
            await client.release("one")
            await client.lookup(descriptor, lease_owner="two", lease_ttl_s=60)


class TestPins:
    async def test_pinned_chunks_stay_for_every_server_and_after_a_restart(
        self, start_server: StartServer
    ) -> None:
        first = await start_server(capacity=EIGHT)
        pinned = prefix(0)
        async with AsyncClient(first.address) as client:
            await store_all(client, pinned, payload_for(pinned))
            assert await client.pin(prefix(0, chunks=3)) == [
                ChunkStatus.PINNED,
                ChunkStatus.PINNED,
                ChunkStatus.MISS_ABSENT,
            ]
        await first.stop()
        second = await start_server(capacity=EIGHT)
        async with AsyncClient(second.address) as client:
            for number in range(1, 16):
                await store_until_stored(client, prefix(number))
            assert await hits(client, pinned) == 2
            assert await client.unpin(pinned) == [ChunkStatus.UNPINNED] * 2
            for number in range(16, 32):
                await store_until_stored(client, prefix(number))
            assert await hits(client, pinned) == 0


async def test_a_chunk_that_nobody_uses_expires(start_server: StartServer, root: Path) -> None:
    server = await start_server(capacity={"ttl_s": 2, "touch_interval_s": 1})
    used, unused, pinned = prefix(0), prefix(1), prefix(2)
    async with AsyncClient(server.address) as client:
        for descriptor in (used, unused, pinned):
            await store_all(client, descriptor, payload_for(descriptor))
        await client.pin(pinned)
        seen: set[ChunkStatus] = set()
        deadline = time.monotonic() + 20
        while tree_size_bytes(root) > 4 * FILE_SIZE:
            assert time.monotonic() < deadline
            await client.fetch(used, bytearray(used.payload_size_bytes)).wait()
            await server._upkeep._stamp()
            seen |= set((await client.lookup(unused)).misses)
            await asyncio.sleep(0.1)
        assert seen <= {ChunkStatus.MISS_EXPIRED, ChunkStatus.MISS_EVICTED}
        result = await client.fetch(unused, bytearray(unused.payload_size_bytes)).wait()
        assert result.misses == {ChunkStatus.MISS_EVICTED: 2}
        assert await hits(client, used) == 2
        assert await hits(client, pinned) == 2


class TestTwoServers:
    async def test_one_evicts_for_both_and_both_know(
        self, two_clients: tuple[AsyncClient, AsyncClient], root: Path
    ) -> None:
        for number in range(24):
            await store_until_stored(two_clients[number % 2], prefix(number))
            # What the other has let in since the last exchange may come on top.
            assert tree_size_bytes(root) <= 20 * FILE_SIZE
        for client in two_clients:
            assert await hits(client, prefix(23)) == 2

    async def test_a_lease_of_one_holds_the_other(
        self, two_clients: tuple[AsyncClient, AsyncClient]
    ) -> None:
        one, other = two_clients
        leased = [prefix(100), prefix(101)]
        for client, descriptor in zip(two_clients, leased, strict=True):
            await store_all(client, descriptor, payload_for(descriptor))
            found = await client.lookup(descriptor, lease_owner="r", lease_ttl_s=60)
            assert found.leased_chunks == 2
        for number in range(16):
            await store_until_stored(one, prefix(number))
        for descriptor in leased:
            assert await hits(other, descriptor) == 2

    def test_the_next_one_evicts_when_the_first_is_killed(self, root: Path) -> None:
        settings = (
            f"capacity.size_bytes_max={10 * FILE_SIZE}",
            "capacity.high_watermark=0.8",
            "capacity.low_watermark=0.6",
            "capacity.exchange_interval_s=0.05",
            "store.owner_lease_s=1",
            "store.sweep_interval_s=1",
        )
        second_root = root.with_name("second")
        root.mkdir()
        second_root.symlink_to(root)
        first = ServerProcess(root, settings=settings).start()
        with ServerProcess(second_root, settings=settings) as second:
            processes = {"first": first, "second": second}
            tags = sorted(path.name for path in (root / ".servers").iterdir())
            assert len(tags) == 2
            steward = next(
                process
                for process in processes.values()
                if f'"pid": {process.pid}' in (root / ".servers" / tags[0]).read_text()
            )
            other = first if steward is second else second
            with Client(other.address) as client:
                for number in range(6):
                    put(client, prefix(number))
                steward.kill()
                for number in range(6, 20):
                    put(client, prefix(number), timeout_s=20)
                assert all(client.lookup(prefix(19)).hits)
        first.kill()


@pytest.fixture
def measured(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(root, settings=("server.metrics_listen=127.0.0.1:0",)) as process:
        yield process


def test_a_counter_for_each_reason_of_a_miss(measured: ServerProcess) -> None:
    descriptor = prefix(0)
    with Client(measured.address) as client:
        put(client, descriptor)
        client.lookup(prefix(0, chunks=5))
        file = next(measured.root.glob("default/*/*/*/*"))
        file.write_bytes(b"\0" * file.stat().st_size)
        with client.fetch(prefix(0, chunks=4), bytearray(4 * 4 * 8192)) as handle:
            result = handle.wait()
    assert result.misses == {ChunkStatus.MISS_ABSENT: 2, ChunkStatus.MISS_CORRUPT: 1}
    for call, status, count in (
        ("lookup", "HIT", 2),
        ("lookup", "MISS_ABSENT", 3),
        ("fetch", "MISS_ABSENT", 2),
        ("fetch", "MISS_CORRUPT", 1),
        ("store", "STORED", 2),
    ):
        assert metric(measured, "kvserve_chunks_total", call, status) == count
    assert metric(measured, "kvserve_quarantined_chunks") == 1


def test_a_metrics_address_that_is_taken_is_said(root: Path, measured: ServerProcess) -> None:
    taken = metrics_address(measured)
    process = ServerProcess(root.with_name("other"), settings=(f"server.metrics_listen={taken}",))
    with pytest.raises(Exception, match=r"server\.metrics_listen"):
        process.start()
    assert list((root.with_name("other") / ".servers").iterdir()) == []


def put(client: Client, descriptor: Descriptor, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with client.store(descriptor, payload_for(descriptor, 1)) as handle:
            for layer_index in descriptor.layer_order:
                handle.store_layer(layer_index)
            if handle.finish().is_whole:
                return
        assert time.monotonic() < deadline, "never let in"
        time.sleep(0.02)


def metrics_address(process: ServerProcess) -> str:
    # The last one: the log of a server that starts again goes on in the same file.
    line = [it for it in process.log().splitlines() if "metrics on http" in it][-1]
    return line.split("http://")[1].split("/")[0]


def metric(process: ServerProcess, name: str, *labels: str) -> float:
    """The value of the sample that has all these label values; 0 if there is none."""
    url = f"http://{metrics_address(process)}/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        text = reply.read().decode()
    for line in text.splitlines():
        if line.startswith(name) and all(f'"{label}"' in line for label in labels):
            return float(line.rpartition(" ")[2])
    return 0.0
