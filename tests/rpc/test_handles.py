"""Handles end: by completion, error, cancel or deadline; the region is quiet afterwards (T6)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from kvclient import (
    AsyncClient,
    ChunkStatus,
    DeadlineExceeded,
    HandleClosed,
    HandleState,
    InvalidRequest,
    Overloaded,
    ServerFault,
    ServerUnavailable,
    StoreHandle,
    TransferCancelled,
)
from kvserve.format.frames import FrameHeader, encode_prefix
from kvserve.format.messages import SERVICE
from kvserve.rpc.server import Server
from kvserve.v1 import kvserve_pb2 as pb
from tests.descriptors import open_files
from tests.payload import payload_for, small_descriptor, store_all


def temp_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


async def until(is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for the other side to notice; fails if it does not."""
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_life_cycle(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    store = client.prepare_store(descriptor, source)
    assert store.state is HandleState.PREPARED
    with pytest.raises(HandleClosed, match="not posted"):
        await store.finish()
    store.post()
    assert store.state is HandleState.PROC
    with pytest.raises(HandleClosed, match="post on a handle in state PROC"):
        store.post()
    for layer_index in range(4):
        await store.store_layer(layer_index)
    await store.finish()
    assert store.state is HandleState.DONE
    with pytest.raises(HandleClosed):
        store.post()

    fetch = client.prepare_fetch(descriptor, bytearray(len(source)))
    with pytest.raises(HandleClosed, match="not posted"):
        await fetch.wait()
    fetch.post()
    await fetch.wait()
    assert fetch.state is HandleState.DONE
    await fetch.cancel()
    assert fetch.state is HandleState.DONE, "cancel after the end changes nothing"


async def test_layers_of_unknown_index_raise_at_once(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes), layers=[0])
    with pytest.raises(InvalidRequest, match="layer 1 is not among the layers"):
        await handle.layer(1)
    await handle.wait()


async def test_a_region_is_held_while_a_handle_is_open(client: AsyncClient) -> None:
    descriptor = small_descriptor()
    region = client.register(payload_for(descriptor))
    handle = client.store(descriptor, region)
    with pytest.raises(HandleClosed, match="in use by 1 open handles"):
        region.close()
    await handle.cancel()
    region.close()
    region.close()
    with pytest.raises(HandleClosed, match="the region is closed"):
        client.fetch(descriptor, region)


async def test_a_cancelled_store_leaves_nothing_and_can_be_repeated(
    client: AsyncClient, root: Path
) -> None:
    descriptor = small_descriptor()
    handle = client.store(descriptor, payload_for(descriptor))
    await handle.store_layer(0)
    await handle.layer(0)
    assert len(temp_files(root)) == 8
    await handle.cancel()
    assert handle.state is HandleState.ERR
    assert isinstance(handle.error, TransferCancelled)
    for call in (handle.finish, lambda: handle.store_layer(1)):
        with pytest.raises((TransferCancelled, HandleClosed)):
            await call()
    await until(lambda: temp_files(root) == [])
    assert (await client.lookup(descriptor)).hits == [False] * 8
    await store_all(client, descriptor, payload_for(descriptor))


async def test_ending_early_is_incomplete_for_every_chunk(client: AsyncClient, root: Path) -> None:
    descriptor = small_descriptor()
    handle = client.store(descriptor, payload_for(descriptor))
    await handle.store_layer(2)
    result = await handle.finish()
    assert {verdict.status for verdict in result.verdicts} == {ChunkStatus.INCOMPLETE}
    assert "1 of 4 layers" in result.verdicts[0].message
    assert handle.state is HandleState.ERR
    assert temp_files(root) == []


async def test_closing_a_client_mid_store(server: Server, root: Path, plane: str) -> None:
    """Its handles are cancelled; files and descriptors on the server return to baseline."""
    descriptor = small_descriptor()
    async with AsyncClient(server.address, plane=plane) as client:
        await client.server_info()
        before = open_files()
        handle = client.store(descriptor, payload_for(descriptor))
        await handle.store_layer(0)
        await handle.layer(0)
    await until(lambda: temp_files(root) == [])
    await until(lambda: open_files() <= before)
    with pytest.raises(TransferCancelled):
        await handle.finish()


async def test_closing_a_client_mid_fetch(server: Server, plane: str) -> None:
    descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
    service = repr(server.service)
    async with AsyncClient(server.address, plane=plane) as client:
        await store_all(client, descriptor, payload_for(descriptor))
        handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
        await handle.layer(0)
    await until(lambda: repr(server.service).startswith("<Service 0 transfers"))
    assert service.startswith("<Service 0 transfers")
    assert handle.state is HandleState.ERR


async def test_many_cancels_leave_descriptors_and_handles_at_baseline(
    client: AsyncClient, server: Server
) -> None:
    descriptor = small_descriptor(kv_heads=8, head_dim=128)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    target = bytearray(len(source))
    await client.fetch(descriptor, target).wait()
    before = open_files()
    for number in range(100):
        handle = client.fetch(descriptor, target)
        if number % 3 == 0:
            await handle.layer(number % 4)
        await handle.cancel()
    await until(lambda: repr(server.service).startswith("<Service 0 transfers"))
    assert open_files() <= before
    assert (await client.fetch(descriptor, target).wait()).is_whole


async def test_a_deadline_after_the_last_layer_publishes_nothing(
    client: AsyncClient, root: Path
) -> None:
    descriptor = small_descriptor()
    handle = client.store(descriptor, payload_for(descriptor), timeout_s=0.3)
    for layer_index in range(4):
        await handle.store_layer(layer_index)
        await handle.layer(layer_index)
    await until(lambda: handle.state is not HandleState.PROC)
    await until(lambda: temp_files(root) == [])
    assert (await client.lookup(descriptor)).hits == [False] * 8


async def test_a_cancel_from_elsewhere_is_our_error_for_who_is_sending(
    client: AsyncClient,
) -> None:
    """grpc.aio raises `CancelledError` in every waiter of a call that this side ends."""
    descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
    for _ in range(10):
        handle = client.store(descriptor, payload_for(descriptor))

        async def send_all(handle: StoreHandle = handle) -> None:
            for layer_index in range(16):
                await handle.store_layer(layer_index)

        sending = asyncio.ensure_future(send_all())
        await handle.needed()
        await asyncio.sleep(0.005)
        await handle.cancel()
        with pytest.raises((TransferCancelled, HandleClosed)):
            await sending


async def test_deadline_of_a_store_that_stalls(client: AsyncClient, root: Path) -> None:
    descriptor = small_descriptor()
    handle = client.store(descriptor, payload_for(descriptor), timeout_s=0.2)
    await handle.store_layer(0)
    await handle.layer(0)
    await until(lambda: handle.state is not HandleState.PROC)
    with pytest.raises(DeadlineExceeded):
        await handle.finish()
    assert handle.state is HandleState.ERR
    await until(lambda: temp_files(root) == [])


async def test_nobody_listens() -> None:
    """A server that is down costs `connect_timeout_s`, or the deadline if that is shorter."""
    descriptor = small_descriptor()
    target = bytearray(descriptor.payload_size_bytes)
    async with AsyncClient("127.0.0.1:9", timeout_s=20, connect_timeout_s=0.2) as client:
        with pytest.raises(ServerUnavailable, match="no server answers"):
            await client.lookup(descriptor)
        with pytest.raises(DeadlineExceeded, match="Lookup was not done"):
            await client.lookup(descriptor, timeout_s=0.1)
        handle = client.fetch(descriptor, target)
        with pytest.raises(ServerUnavailable, match="no server answers"):
            await handle.wait()
        assert handle.state is HandleState.ERR
        store = client.store(descriptor, target)
        with pytest.raises(ServerUnavailable, match="no server answers"):
            await store.store_layer(0)


async def test_too_many_transfers_are_refused_and_say_when_to_retry(
    start_server: Callable[..., Awaitable[Server]], plane: str
) -> None:
    server = await start_server(limits={"transfers_max": 1})
    descriptor = small_descriptor()
    async with AsyncClient(server.address, plane=plane) as client:
        first = client.store(descriptor, payload_for(descriptor))
        await first.needed()
        second = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
        with pytest.raises(Overloaded, match="transfers are open") as caught:
            await second.wait()
        assert caught.value.retryable
        assert caught.value.retry_after_s == 0.1
        await first.cancel()
        await until(lambda: repr(server.service).startswith("<Service 0 transfers"))
        third = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
        await third.wait()


class StubServer:
    """A server that sends what a test tells it to, when it tells it to."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.address = ""
        self._server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler(
            SERVICE, {"Fetch": grpc.unary_stream_rpc_method_handler(self._fetch)}
        )
        self._server.add_generic_rpc_handlers((handler,))

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _fetch(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        while (reply := await self.replies.get()) is not None:
            await context.write(reply)


@pytest.fixture
async def stub() -> AsyncIterator[StubServer]:
    stub = StubServer()
    await stub.start()
    yield stub
    await stub.stop()


def hits(count: int) -> bytes:
    return pb.FetchReply(head=pb.FetchHead(chunk_statuses=bytes([1] * count))).SerializeToString()


def frame(payload: bytes, layer: int, chunk: int, sum_of: bytes | None = None) -> bytes:
    from kvserve.format.chunk_file import checksum

    checksums = checksum(payload if sum_of is None else sum_of).to_bytes(8, "little")
    return encode_prefix(FrameHeader(layer, chunk, 0, checksums), len(payload)) + payload


async def test_no_late_write_after_cancel(stub: StubServer) -> None:
    """T6: frame 1 lands, the server stalls, cancel returns, the reused buffer stays intact."""
    descriptor = small_descriptor()
    size = descriptor.layout.slice_sizes[0]
    async with AsyncClient(stub.address) as client:
        target = bytearray(descriptor.payload_size_bytes)
        region = client.register(target)
        handle = client.fetch(descriptor, region)
        await stub.replies.put(hits(8))
        await stub.replies.put(frame(b"\x11" * size, 0, 0))
        await until(lambda: target[:size] == b"\x11" * size)
        await handle.cancel()
        region.close()
        target[:] = b"\xaa" * len(target)
        for chunk in range(1, 8):
            await stub.replies.put(frame(b"\x22" * size, 0, chunk))
        await asyncio.sleep(0.1)
        assert target == b"\xaa" * len(target)


async def test_cancel_while_frames_pour_in(client: AsyncClient) -> None:
    descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
    await store_all(client, descriptor, payload_for(descriptor))
    target = bytearray(descriptor.payload_size_bytes)
    for layers in range(0, 16, 3):
        handle = client.fetch(descriptor, target)
        await handle.layer(layers)
        await handle.cancel()
        target[:] = b"\xaa" * len(target)
        await asyncio.sleep(0.02)
        assert target == b"\xaa" * len(target)


async def test_bytes_that_changed_on_the_way_are_a_miss(stub: StubServer) -> None:
    descriptor = small_descriptor(layers=1, chunks=2)
    size = descriptor.layout.slice_sizes[0]
    async with AsyncClient(stub.address) as client:
        handle = client.fetch(descriptor, bytearray(2 * size))
        await stub.replies.put(hits(2))
        await stub.replies.put(frame(b"\x11" * size, 0, 0, sum_of=b"\x12" * size))
        await stub.replies.put(frame(b"\x22" * size, 0, 1))
        await stub.replies.put(None)
        event = await handle.layer(0)
        result = await handle.wait()
    assert event.missing == (0,)
    assert result.prefix_chunks == 0
    assert result.verdicts[0].status is ChunkStatus.MISS_CORRUPT
    assert handle.state is HandleState.ERR


BROKEN_SERVERS = {
    "another layer": ([hits(2), frame(b"x" * 8192, 1, 0)], "layer 1 came, layer 0 was next"),
    "no head": ([frame(b"x" * 8192, 0, 0)], "began with a reply of kind payload"),
    "an empty reply": ([b""], "began with a reply of kind None"),
    "two heads": ([hits(2), hits(2)], "two heads"),
    "head of wrong size": ([hits(3)], "3 chunk statuses came for 2 chunks"),
    "ends early": ([hits(2), frame(b"x" * 8192, 0, 0)], "ended the stream before the last layer"),
    "chunk twice": ([hits(2), frame(b"x" * 8192, 0, 0), frame(b"x" * 8192, 0, 0)], "was next"),
    "chunk out of range": ([hits(2), frame(b"x" * 8192, 0, 2)], "is not asked for"),
    "miss of a miss": (
        [
            pb.FetchReply(head=pb.FetchHead(chunk_statuses=b"\x01\x02")).SerializeToString(),
            pb.FetchReply(miss=pb.ChunkMiss(chunk_index=1, status=2)).SerializeToString(),
        ],
        "it was no hit",
    ),
    "unknown status": (
        [pb.FetchReply(head=pb.FetchHead(chunk_statuses=b"\x01\x63")).SerializeToString()],
        "status 99",
    ),
    "garbage": ([b"\xff\xff\xff"], "not well-formed"),
    "cut frame": ([hits(2), frame(b"x" * 8192, 0, 0)[:-1]], "does not end"),
}


@pytest.mark.parametrize("name", BROKEN_SERVERS)
async def test_a_broken_server_is_an_error_not_a_hang(stub: StubServer, name: str) -> None:
    replies, words = BROKEN_SERVERS[name]
    descriptor = small_descriptor(layers=2, chunks=2)
    async with AsyncClient(stub.address) as client:
        handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes), timeout_s=5)
        for reply in replies:
            await stub.replies.put(reply)
        await stub.replies.put(None)
        with pytest.raises(ServerFault, match=words):
            await handle.wait()
        assert handle.state is HandleState.ERR
