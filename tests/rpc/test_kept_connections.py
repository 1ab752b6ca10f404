"""A fetch names the data connection that its client has kept: no offer, no hello, same rules."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

import kvserve.transfer.planes.tcp
from kvclient import AsyncClient, Descriptor, Region, SharedRegion
from kvclient.planes import named_connection
from kvclient.planes.tcp import DataConnections
from kvserve.data_socket import DataSocket
from kvserve.errors import DeadlineExceeded, Overloaded, ServerFault, TransferCancelled
from kvserve.format.messages import SERVICE, descriptor_to_pb
from kvserve.format.records import RegionHead, encode_finish, encode_region
from kvserve.rpc.server import Server
from kvserve.service import Service
from kvserve.transfer.planes.data_port import DataPort
from kvserve.transfers import Transfers
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import payload_for, small_descriptor, store_all

SCRUBBED = 0xEE


@pytest.fixture(params=["tcp", "shm"])
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(server: Server, plane: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout_s=20, plane=plane) as client:
        yield client


@pytest.fixture
async def descriptor(server: Server) -> Descriptor:
    descriptor = small_descriptor(chunks=4)
    async with AsyncClient(server.address, timeout_s=20) as client:
        await store_all(client, descriptor, payload_for(descriptor))
    return descriptor


@pytest.fixture
def region(descriptor: Descriptor, plane: str) -> Region:
    size = descriptor.payload_size_bytes
    return SharedRegion(size) if plane == "shm" else Region(bytearray(size))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one for every hello that a client sends."""
    found: list[str] = []
    open_one = DataConnections.open

    async def counted(self: DataConnections, offer: pb.DataOffer, plane: str = "") -> DataSocket:
        found.append(offer.address)
        return await open_one(self, offer, plane)

    monkeypatch.setattr(DataConnections, "open", counted)
    return found


def port_of(server: Server) -> DataPort:
    assert server.data_port is not None
    return server.data_port


def kept_of(client: AsyncClient) -> list[DataSocket]:
    return [connection for _, connection in client._channel.planes.connections._kept]


async def fetch(client: AsyncClient, descriptor: Descriptor, region: Region) -> None:
    region.view[:] = bytes([SCRUBBED]) * region.size_bytes
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == payload_for(descriptor)


async def test_only_the_first_fetch_says_hello(
    client: AsyncClient, descriptor: Descriptor, region: Region, opened: list[str]
) -> None:
    for _ in range(5):
        await fetch(client, descriptor, region)
    for layer_index in range(descriptor.layout.layer_count):
        assert (await client.fetch(descriptor, region, layers=[layer_index]).wait()).is_whole
    assert len(opened) == 1
    assert len(kept_of(client)) == 1


async def test_at_once_each_has_its_own(
    client: AsyncClient, descriptor: Descriptor, region: Region
) -> None:
    for _ in range(3):
        handles = [client.fetch(descriptor, region) for _ in range(3)]
        for handle in handles:
            assert (await handle.wait()).is_whole
        assert region.view == payload_for(descriptor)


async def test_a_fetch_without_payload_leaves_it_for_the_next(
    client: AsyncClient, descriptor: Descriptor, region: Region, opened: list[str]
) -> None:
    await fetch(client, descriptor, region)
    absent = small_descriptor(chunks=4, first_token=5000)
    assert (await client.fetch(absent, region).wait()).prefix_chunks == 0
    await fetch(client, descriptor, region)
    assert len(opened) == 1


async def test_one_that_the_server_has_closed_is_made_anew(
    client: AsyncClient,
    descriptor: Descriptor,
    region: Region,
    opened: list[str],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fetch(client, descriptor, region)
    # The client has not seen it when it names it.
    monkeypatch.setattr(DataSocket, "is_idle", lambda self: True)
    port = port_of(server)
    for connection in list(port._connections):
        port.close(connection)
    await fetch(client, descriptor, region)
    assert len(opened) == 2


async def test_a_refused_request_costs_no_more_than_its_connection(
    client: AsyncClient,
    descriptor: Descriptor,
    region: Region,
    opened: list[str],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fetch(client, descriptor, region)

    def refuse(self: Service) -> None:
        raise Overloaded("full", retry_after_s=0.1)

    monkeypatch.setattr(Service, "_admitted", refuse)
    with pytest.raises(Overloaded, match="full"):
        await client.fetch(descriptor, region).wait()
    monkeypatch.undo()
    before = len(opened)
    await fetch(client, descriptor, region)
    assert (before, len(kept_of(client))) == (1, 1)
    await until_idle(server, connections=1)


async def until_idle(server: Server, connections: int) -> None:
    port = port_of(server)
    for _ in range(200):
        if (len(port._connections), len(port._kept)) == (connections, connections):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{port!r}, {len(port._kept)} kept")


@pytest.mark.parametrize("is_late", [False, True], ids=["cancel", "deadline"])
async def test_whatever_ends_a_fetch_before_its_first_answer_makes_the_region_quiet(
    client: AsyncClient,
    descriptor: Descriptor,
    region: Region,
    server: Server,
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T6: the server has the connection by name already, and would write."""
    await fetch(client, descriptor, region)
    may_open, is_asked = asyncio.Event(), asyncio.Event()
    open_chunks = Transfers._open

    async def slow(self: Transfers, *args: object) -> object:
        is_asked.set()
        await may_open.wait()
        return await open_chunks(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Transfers, "_open", slow)
    region.view[:] = bytes([SCRUBBED]) * region.size_bytes
    handle = client.fetch(descriptor, region, timeout_s=1 if is_late else 20)
    await is_asked.wait()
    if is_late:
        with pytest.raises(DeadlineExceeded):
            await handle.wait()
    else:
        await handle.cancel()
        with pytest.raises(TransferCancelled):
            await handle.wait()
    may_open.set()
    await asyncio.sleep(0.1)
    assert region.view == bytes([SCRUBBED]) * region.size_bytes
    await until_idle(server, connections=0)
    monkeypatch.undo()
    await fetch(client, descriptor, region)


async def test_cancels_at_any_moment_end(
    client: AsyncClient, descriptor: Descriptor, region: Region, server: Server
) -> None:
    """Also one that finds the server between the name and the connection."""
    for number in range(150):
        await fetch(client, descriptor, region)
        handle = client.fetch(descriptor, region)
        for _ in range(number % 30):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await handle.cancel()
    await fetch(client, descriptor, region)
    await until_idle(server, connections=1)


async def test_a_cancel_while_the_server_takes_the_connection_closes_it(
    client: AsyncClient, descriptor: Descriptor, region: Region, server: Server
) -> None:
    await fetch(client, descriptor, region)
    port = port_of(server)
    (connection,) = port._connections
    taking = asyncio.create_task(port.kept(connection.secret, is_local=connection.is_local))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert connection not in port._connections
    await fetch(client, descriptor, region)


async def test_the_rpc_s_end_may_overtake_the_payload(
    client: AsyncClient,
    descriptor: Descriptor,
    region: Region,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are two streams: on a network the small one is often faster."""
    await fetch(client, descriptor, region)
    reply_over = named_connection._reply_over

    async def late(connection: DataSocket) -> object:
        await asyncio.sleep(0.3)
        return await reply_over(connection)

    monkeypatch.setattr(named_connection, "_reply_over", late)
    before = len(opened)
    await fetch(client, descriptor, region)
    assert (before, len(kept_of(client))) == (1, 1)


class TestTheRequest:
    """Names that are none, sent by hand."""

    @staticmethod
    async def offer(
        server: Server, descriptor: Descriptor, plane: str, kept: pb.KeptConnection
    ) -> pb.DataOffer | None:
        """The first answer's; None if the rpc ends without one. The call is cancelled."""
        request = pb.FetchRequest(
            descriptor=descriptor_to_pb(descriptor), planes=[plane], kept=kept
        )
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.unary_stream(f"/{SERVICE}/Fetch")(request.SerializeToString())
            try:
                reply = await call.read()
            finally:
                call.cancel()
        return pb.FetchReply.FromString(reply).head.data if isinstance(reply, bytes) else None

    @pytest.mark.parametrize("secret", [b"", b"x", bytes(32), bytes(1000)])
    async def test_an_unknown_secret_gets_an_offer(
        self, server: Server, descriptor: Descriptor, plane: str, secret: bytes
    ) -> None:
        kept = pb.KeptConnection(secret=secret, region=b"whatever")
        offer = await self.offer(server, descriptor, plane, kept)
        assert offer is not None
        assert (len(offer.secret), bool(offer.address)) == (32, True)

    async def test_one_of_the_other_plane_gets_an_offer(
        self,
        server: Server,
        client: AsyncClient,
        descriptor: Descriptor,
        region: Region,
        plane: str,
    ) -> None:
        await fetch(client, descriptor, region)
        (connection,) = kept_of(client)
        other = "tcp" if plane == "shm" else "shm"
        kept = pb.KeptConnection(secret=connection.secret)
        assert await self.offer(server, descriptor, other, kept) is not None
        await fetch(client, descriptor, region)

    async def test_somebody_else_who_knows_it_costs_the_connection_and_no_bytes(
        self,
        server: Server,
        client: AsyncClient,
        descriptor: Descriptor,
        region: Region,
        plane: str,
    ) -> None:
        """Its owner finds that something has come, and takes another."""
        await fetch(client, descriptor, region)
        (connection,) = kept_of(client)
        spans = [(0, region.size_bytes)] if plane == "shm" else []
        where = encode_region(RegionHead(False, 1, region.size_bytes), spans) if spans else b""
        kept = pb.KeptConnection(secret=connection.secret, region=where)
        assert await self.offer(server, descriptor, plane, kept) is None
        await asyncio.sleep(0.1)
        await fetch(client, descriptor, region)
        assert kept_of(client) != [connection]

    @pytest.mark.parametrize("plane", ["shm"])
    @pytest.mark.parametrize(
        ("head", "spans", "words"),
        [
            (RegionHead(False, 1, 1), [(0, 1)], "spans for 1 bytes, the payload has"),
            (RegionHead(False, 2, 1), [(0, 1)], "a region of 2 spans in 32 bytes"),
            (RegionHead(True, 1, 1), [(0, 1)], "a region of 1 spans in 32 bytes"),
            (RegionHead(False, 1, 1), [(1 << 40, 1)], "a span of 1 bytes at"),
        ],
    )
    async def test_a_region_that_is_none_is_refused(
        self,
        server: Server,
        client: AsyncClient,
        descriptor: Descriptor,
        region: Region,
        plane: str,
        head: RegionHead,
        spans: list[tuple[int, int]],
        words: str,
    ) -> None:
        await fetch(client, descriptor, region)
        (connection,) = kept_of(client)
        kept = pb.KeptConnection(secret=connection.secret, region=encode_region(head, spans))
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await self.offer(server, descriptor, plane, kept)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until_idle(server, connections=0)
        await fetch(client, descriptor, region)

    async def test_a_server_that_begins_with_something_else(
        self,
        client: AsyncClient,
        descriptor: Descriptor,
        region: Region,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await fetch(client, descriptor, region)
        monkeypatch.setattr(
            kvserve.transfer.planes.tcp, "encode_first_reply", lambda _: encode_finish()
        )
        with pytest.raises(ServerFault, match="began with a record of kind FINISH"):
            await client.fetch(descriptor, region).wait()
        monkeypatch.undo()
        await fetch(client, descriptor, region)
