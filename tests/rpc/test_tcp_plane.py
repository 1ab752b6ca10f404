"""The tcp plane alone: who may connect, what is told to whom, and what a broken side can do."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kvclient import (
    AsyncClient,
    ChunkStatus,
    HandleState,
    InvalidRequest,
    ServerFault,
    ServerUnavailable,
    TransferCancelled,
)
from kvclient.channel import Rpcs
from kvserve.data_socket import DataSocket
from kvserve.format.chunk_file import checksum
from kvserve.format.frames import FrameHeader
from kvserve.format.messages import SERVICE, descriptor_to_pb
from kvserve.format.records import (
    HELLO_MAGIC,
    HELLO_SIZE_BYTES,
    encode_finish,
    encode_frame,
    encode_miss,
)
from kvserve.model import Verdict
from kvserve.rpc.server import Server
from kvserve.transfer.planes import data_port
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfer.staging import Staging
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import payload_for, small_descriptor, store_all
from tests.rpc.test_plane_contract import connected, is_closed, offered
from tests.rpc.test_planes import large, until, until_quiet

StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
def plane() -> str:
    return "tcp"


class TestSecrets:
    """A connection without a good secret is closed, counted and logged; the secret never is."""

    @pytest.fixture(autouse=True)
    async def stored(self, client: AsyncClient) -> None:
        descriptor = small_descriptor()
        await store_all(client, descriptor, payload_for(descriptor))

    async def test_one_of_a_fetch_that_has_ended(self, server: Server, rpcs: Rpcs) -> None:
        call, offer = await offered(rpcs, "tcp", "fetch")
        call.cancel()
        await until_quiet(server)
        assert server.data_port is not None
        # A cancel may overtake the hello: that is nobody's fault. Twice is no accident.
        for refused in (0, 1):
            late = await connected(offer.address)
            await late.send((HELLO_MAGIC, offer.secret))
            assert await is_closed(late)
            assert server.data_port.refused == refused
        assert " 0 expected" in repr(server.data_port)

    async def test_one_that_is_never_shown(
        self, server: Server, rpcs: Rpcs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data_port, "SECRET_TTL_S", 0.1)
        call, _ = await offered(rpcs, "tcp", "fetch")
        with pytest.raises(grpc.aio.AioRpcError, match=r"no data connection came within 0\.1 s"):
            await call.read()
        assert " 0 expected" in repr(server.data_port)

    async def test_another_protocol(self, server: Server) -> None:
        assert server.data_port is not None
        stranger = await connected(server.data_port.address)
        await stranger.send((b"GET / HTTP/1.1\r\nHost: kvserve\r\n\r\n" + bytes(100),))
        assert await is_closed(stranger)
        assert server.data_port.refused == 1

    async def test_silence(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data_port, "_FIRST_HELLO_S", 0.1)
        assert server.data_port is not None
        silent = await connected(server.data_port.address)
        await silent.send((HELLO_MAGIC[:4],))
        assert await is_closed(silent)

    async def test_no_log_has_it(
        self, server: Server, rpcs: Rpcs, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        call, offer = await offered(rpcs, "tcp", "fetch")
        for secret in (offer.secret, offer.secret, os.urandom(32)):
            connection = await connected(offer.address)
            await connection.send((HELLO_MAGIC, secret))
            await asyncio.sleep(0.05)
            connection.close()
        call.cancel()
        await until_quiet(server)
        assert "refused a data connection" in caplog.text
        text = caplog.text + repr(server.data_port)
        for form in (repr(offer.secret)[2:-1], offer.secret.hex(), repr(offer.secret[:6])[2:-1]):
            assert form not in text
        assert len(offer.secret) == 32


class TestConnections:
    async def test_layer_by_layer_uses_one(self, client: AsyncClient, server: Server) -> None:
        descriptor = small_descriptor(layers=8)
        source = payload_for(descriptor)
        await store_all(client, descriptor, source)
        target = bytearray(len(source))
        ports = set()
        for layer_index in range(8):
            handle = client.fetch(descriptor, target, layers=[layer_index])
            await handle.wait()
            await until_quiet(server)
            assert server.data_port is not None
            ports |= {connection.peer for connection in server.data_port._connections}
        assert len(ports) == 1
        assert target == source

    async def test_a_fetch_that_was_cancelled_leaves_none(
        self, client: AsyncClient, server: Server
    ) -> None:
        descriptor = large()
        await store_all(client, descriptor, payload_for(descriptor))
        handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes))
        await handle.layer(0)
        await handle.cancel()
        await until_quiet(server)
        await until(lambda: " 0 connections" in repr(server.data_port))

    async def test_nothing_to_move_needs_none(self, client: AsyncClient, server: Server) -> None:
        descriptor = small_descriptor()
        result = await client.fetch(descriptor, bytearray(descriptor.payload_size_bytes)).wait()
        assert result.prefix_chunks == 0
        assert " 0 connections" in repr(server.data_port)
        await store_all(client, descriptor, payload_for(descriptor))
        before = repr(server.data_port)
        await store_all(client, descriptor, payload_for(descriptor))
        assert repr(server.data_port) == before

    async def test_frame_memory_is_used_again(self, client: AsyncClient, server: Server) -> None:
        """A fetch needs one frame, a store as many as it may hold; none is made anew for ever."""
        assert server.data_port is not None
        made: list[int] = []
        buffers = server.data_port.buffers
        take = buffers.take

        def counted(payload_size_bytes: int) -> memoryview:
            buffer = take(payload_size_bytes)
            made.append(id(buffer.obj))
            return buffer

        buffers.take = counted  # type: ignore[method-assign]
        descriptor = large()
        source = payload_for(descriptor)
        await store_all(client, descriptor, source)
        assert len(made) == 32
        assert len(set(made)) <= 9, "one more than frames_in_flight"
        made.clear()
        await client.fetch(descriptor, bytearray(len(source))).wait()
        assert len(made) == 32
        assert len(set(made)) == 1

    async def test_closing_the_client_closes_them(self, server: Server) -> None:
        descriptor = small_descriptor()
        async with AsyncClient(server.address, plane="tcp") as client:
            await store_all(client, descriptor, payload_for(descriptor))
            assert " 1 connections" in repr(server.data_port)
        await until(lambda: " 0 connections" in repr(server.data_port))

    async def test_too_many_push_out_the_oldest_that_is_idle(self) -> None:
        port = DataPort(Staging(16384, 4096), connections_max=2)
        await port.start("127.0.0.1", 0, tell_host=True)
        with port.expect() as expected:
            used = await connected(port.address)
            await used.send((HELLO_MAGIC, expected.secret))
            connection = await expected.connection()
        oldest, newest = await connected(port.address), await connected(port.address)
        assert await is_closed(oldest)
        with port.expect() as another:
            await newest.send((HELLO_MAGIC, another.secret))
            await another.connection()
        over = await connected(port.address)
        assert await is_closed(over)
        assert port.refused == 1, "both are in use"
        port.close(connection)
        await port.stop()
        assert " 0 connections" in repr(port)
        used.close()
        newest.close()

    async def test_the_address_must_be_free(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = DataPort(Staging(16384, 4096), connections_max=2)
            with pytest.raises(InvalidRequest, match=r"cannot listen on 127\.0\.0\.1:\d+ for data"):
                await port.start("127.0.0.1", taken.getsockname()[1], tell_host=False)
            await port.stop()


class TestChoice:
    async def test_a_plane_that_nobody_knows(self) -> None:
        with pytest.raises(
            InvalidRequest, match="plane 'rdma' must be one of auto, shm, nixl, tcp, grpc"
        ):
            AsyncClient("127.0.0.1:1", plane="rdma")

    async def test_a_server_without_it(self, start_server: StartServer) -> None:
        server = await start_server(server={"data_listen": "off", "shared_memory": False})
        descriptor = small_descriptor()
        source = payload_for(descriptor)
        target = bytearray(len(source))
        async with AsyncClient(server.address) as client:
            await store_all(client, descriptor, source)
            assert (await client.fetch(descriptor, target).wait()).is_whole
            info = await client.server_info()
            assert (info.planes, info.data_address) == (("grpc",), "")

    async def test_an_address_that_cannot_be_reached(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """By itself a client goes on over grpc, says so once, and tries again after a while."""
        assert server.data_port is not None
        server.data_port.address = "127.0.0.1:9"
        descriptor = small_descriptor()
        source = payload_for(descriptor)
        target = bytearray(len(source))
        async with AsyncClient(server.address) as client:
            await store_all(client, descriptor, source)
            assert client.requests["Store"] == 2
            assert (await client.fetch(descriptor, target).wait()).is_whole
            assert client.requests["Fetch"] == 1, "remembered"
            assert target == source
        assert caplog.text.count("the data address 127.0.0.1:9 cannot be reached") == 1
        async with AsyncClient(server.address) as client:
            assert (await client.fetch(descriptor, target).wait()).is_whole
            assert client.requests["Fetch"] == 2
        async with AsyncClient(server.address, plane="tcp") as client:
            with pytest.raises(ServerUnavailable, match="plane tcp: the data address"):
                await client.fetch(descriptor, target).wait()
        await until_quiet(server)

    @pytest.mark.parametrize(
        ("data_listen", "told"),
        [("", r":\d+"), ("127.0.0.1:0", r"127\.0\.0\.1:\d+"), ("0.0.0.0:0", r":\d+")],
    )
    async def test_what_clients_are_told(
        self, start_server: StartServer, data_listen: str, told: str
    ) -> None:
        server = await start_server(server={"data_listen": data_listen})
        descriptor = small_descriptor()
        async with AsyncClient(server.address, plane="tcp") as client:
            address = (await client.server_info()).data_address
            assert re.fullmatch(told, address), address
            await store_all(client, descriptor, payload_for(descriptor))

    async def test_beside_a_unix_socket(self, start_server: StartServer, tmp_path: Path) -> None:
        """It is off, unless it has an address of its own."""
        server = await start_server(server={"listen": f"unix:{tmp_path}/a"})
        assert server.data_port is not None
        assert server.data_port.address == ""
        settings = {"listen": f"unix:{tmp_path}/b", "data_listen": "0.0.0.0:0"}
        server = await start_server(server=settings)
        descriptor = small_descriptor()
        async with AsyncClient(server.address, plane="tcp") as client:
            await store_all(client, descriptor, payload_for(descriptor))


class TestBrokenClients:
    """What comes on the data connection of a store."""

    async def _sent(self, rpcs: Rpcs, *records: bytes) -> str:
        """How the server ends a store whose client sends this."""
        call = rpcs.store(timeout=5)
        opening = pb.StoreOpen(descriptor=descriptor_to_pb(small_descriptor()), planes=["tcp"])
        await call.write(pb.StoreRequest(open=opening).SerializeToString())
        needs = pb.StoreReply.FromString(await call.read()).needs
        connection = await connected(needs.data.address)
        try:
            await connection.send((HELLO_MAGIC, needs.data.secret, *records))
            if records and records[-1] == b"":
                connection.close()
            while isinstance(await call.read(), bytes):
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            connection.close()
        return "OK"

    @pytest.mark.parametrize(
        ("records", "words"),
        [
            ([b"\xff" * 24], "INVALID_ARGUMENT: a record of unknown kind 255"),
            (
                [encode_miss(0, Verdict(ChunkStatus.MISS_CORRUPT))],
                "INVALID_ARGUMENT: a store over tcp takes PAYLOAD records, got MISS",
            ),
            (
                [encode_frame(FrameHeader(0, 0, 0, b""), (1 << 20) + 1)],
                "INVALID_ARGUMENT: layer 0: a frame with 1048577 bytes of payload; must be 1 to",
            ),
            (
                [encode_frame(FrameHeader(0, 0, 0, bytes(8)), 8192), bytes(8192)],
                "INVALID_ARGUMENT: layer 0 of chunk 0: the payload does not match its checksum",
            ),
            (
                [encode_frame(FrameHeader(0, 1, 0, bytes(8)), 8192), bytes(8192)],
                "INVALID_ARGUMENT: layer 0: a frame for chunk 1 at byte 0 came, chunk 0",
            ),
            (
                [encode_frame(FrameHeader(0, 0, 0, bytes(8)), 8192), bytes(100), b""],
                "UNAVAILABLE: the data connection with 127.0.0.1",
            ),
            ([b""], "UNAVAILABLE: the data connection with 127.0.0.1"),
        ],
    )
    async def test_the_store_ends_and_leaves_nothing(
        self, server: Server, rpcs: Rpcs, root: Path, records: list[bytes], words: str
    ) -> None:
        assert words in await self._sent(rpcs, *records)
        await until_quiet(server)
        await until(lambda: " 0 connections" in repr(server.data_port))
        assert [path for path in root.rglob(".*") if path.is_file()] == []

    async def test_a_finish_before_the_last_layer(self, server: Server, rpcs: Rpcs) -> None:
        assert await self._sent(rpcs, encode_finish()) == "OK"
        await until_quiet(server)


class DataStub:
    """A server that grants a fetch and then sends on the data connection what a test says."""

    def __init__(self) -> None:
        self.address = ""
        self.ended = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler(
            SERVICE, {"Fetch": grpc.unary_stream_rpc_method_handler(self._fetch)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self._chunks = 0

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        self.ended.set()
        await self._server.stop(0)
        self._listener.close()

    async def connection(self) -> DataSocket:
        """The client's, past its hello."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        connection = DataSocket(sock, "the client")
        await connection.receive([memoryview(bytearray(HELLO_SIZE_BYTES))])
        return connection

    async def _fetch(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        descriptor = pb.FetchRequest.FromString(request).descriptor
        count = len(descriptor.chunk_hashes) // descriptor.hash_size_bytes
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        offer = pb.DataOffer(address=address, secret=bytes(32))
        head = pb.FetchHead(chunk_statuses=b"\1" * count, plane="tcp", data=offer)
        await context.write(pb.FetchReply(head=head).SerializeToString())
        await self.ended.wait()


@pytest.fixture
async def stub() -> AsyncIterator[DataStub]:
    stub = DataStub()
    await stub.start()
    yield stub
    await stub.stop()


def frame(payload: bytes, layer: int, chunk: int, sum_of: bytes | None = None) -> bytes:
    checksums = checksum(payload if sum_of is None else sum_of).to_bytes(8, "little")
    return encode_frame(FrameHeader(layer, chunk, 0, checksums), len(payload)) + payload


class TestBrokenServers:
    async def test_no_late_write_after_cancel(self, stub: DataStub) -> None:
        """T6: half a frame lands, the server stalls, cancel returns, the buffer stays intact."""
        descriptor = small_descriptor()
        size = descriptor.layout.slice_sizes[0]
        async with AsyncClient(stub.address) as client:
            target = bytearray(descriptor.payload_size_bytes)
            region = client.register(target)
            handle = client.fetch(descriptor, region)
            connection = await stub.connection()
            whole = frame(b"\x11" * 8 * size, 0, 0)
            await connection.send((whole[: len(whole) // 2],))
            await until(lambda: target[2 * size] == 0x11)
            await handle.cancel()
            assert isinstance(handle.error, TransferCancelled)
            region.close()
            target[:] = b"\xaa" * len(target)
            with suppress(ServerUnavailable):
                await connection.send((whole[len(whole) // 2 :],))
            assert await is_closed(connection)
            assert target == b"\xaa" * len(target)

    async def test_a_stall_is_ended_by_the_deadline(self, stub: DataStub) -> None:
        descriptor = small_descriptor()
        size = descriptor.layout.slice_sizes[0]
        async with AsyncClient(stub.address) as client:
            target = bytearray(descriptor.payload_size_bytes)
            handle = client.fetch(descriptor, target, timeout_s=0.3)
            connection = await stub.connection()
            await connection.send((frame(b"\x11" * size, 0, 0)[: size // 2],))
            await until(lambda: handle.state is not HandleState.PROC)
            assert type(handle.error).__name__ == "DeadlineExceeded"
            assert await is_closed(connection)

    async def test_bytes_that_changed_on_the_way_are_a_miss(self, stub: DataStub) -> None:
        descriptor = small_descriptor(layers=1, chunks=2)
        size = descriptor.layout.slice_sizes[0]
        async with AsyncClient(stub.address) as client:
            handle = client.fetch(descriptor, bytearray(2 * size))
            connection = await stub.connection()
            await connection.send((frame(b"\x11" * size, 0, 0, sum_of=b"\x12" * size),))
            await connection.send((frame(b"\x22" * size, 0, 1),))
            stub.ended.set()
            result = await handle.wait()
            connection.close()
        assert result.verdicts[0].status is ChunkStatus.MISS_CORRUPT
        assert result.verdicts[1].status is ChunkStatus.HIT

    @pytest.mark.parametrize(
        ("sent", "words"),
        [
            (frame(b"x" * 8192, 1, 0), "layer 1 came, layer 0 was next"),
            (frame(b"x" * 8192, 0, 0) * 2, "was next"),
            (frame(b"x" * 8192, 0, 2), "is not asked for"),
            (encode_frame(FrameHeader(0, 0, 0, b""), 1 << 31), "is not asked for"),
            (encode_frame(FrameHeader(0, 0, 0, b""), 8193), "neither a piece of a slice"),
            (encode_miss(9, Verdict(ChunkStatus.MISS_CORRUPT)), "it was no hit"),
            (encode_finish(), "a record of kind FINISH in a fetch"),
            (b"\xff" * 24, "unknown kind 255"),
        ],
    )
    async def test_what_breaks_the_rules(self, stub: DataStub, sent: bytes, words: str) -> None:
        descriptor = small_descriptor(layers=2, chunks=2)
        async with AsyncClient(stub.address) as client:
            handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes), timeout_s=5)
            connection = await stub.connection()
            await connection.send((sent,))
            with pytest.raises(ServerFault, match=words):
                await handle.wait()
            assert await is_closed(connection)

    @pytest.mark.parametrize("ends_call", [True, False])
    async def test_an_end_in_the_middle(self, stub: DataStub, ends_call: bool) -> None:
        descriptor = small_descriptor(layers=2, chunks=2)
        async with AsyncClient(stub.address) as client:
            handle = client.fetch(descriptor, bytearray(descriptor.payload_size_bytes), timeout_s=5)
            connection = await stub.connection()
            await connection.send((frame(b"x" * 8192, 0, 0)[:-1],))
            if ends_call:
                stub.ended.set()
            connection.close()
            if ends_call:
                with pytest.raises(ServerFault, match="ended the stream before the last layer"):
                    await handle.wait()
            else:
                with pytest.raises(ServerUnavailable, match="the data connection"):
                    await handle.wait()
