"""Stores over nixl alone: what a server reads, and what it keeps of clients that stop or die."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvclient import AsyncClient, Client, HandleState, Region, ServerFault, ServerUnavailable
from kvclient.channel import Rpcs
from kvclient.nixl_region import RegionAgent, region_agent_blocking
from kvclient.planes.nixl import poll
from kvclient.planes.tcp import DataConnections
from kvserve import nixl_agent
from kvserve.format.frames import FrameHeader
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.records import RecordKind, encode_frame
from kvserve.format.remote_region import encode_remote_region
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.transfer.planes import nixl_port, nixl_store
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import payload_for, small_descriptor, store_all
from tests.rpc.test_planes import large, until, until_quiet
from tests.rpc.test_shm_store import REFUSED

pytestmark = pytest.mark.skipif(
    not nixl_agent.is_installed(), reason="NIXL is not installed (the extra nixl)"
)
NEW = small_descriptor(first_token=5000)
SIZE_BYTES = NEW.payload_size_bytes
StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
def plane() -> str:
    return "nixl"


@pytest.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server(server={"nixl": True})


async def _nothing_left(server: Server) -> None:
    await until_quiet(server)
    with suppress(TimeoutError):
        await until(lambda: "0 in flight, 0 retiring, 0 of" in repr(server.nixl))
    assert "0 in flight, 0 retiring, 0 of" in repr(server.nixl)


class Peer:
    """A client made by hand: how the server ends a store from this region."""

    def __init__(self, rpcs: Rpcs, agent: RegionAgent) -> None:
        self._rpcs = rpcs
        self._agent = agent

    async def told(
        self, records: bytes, *, size_bytes: int = SIZE_BYTES, span: tuple[int, int] | None = None
    ) -> str:
        call = self._rpcs.store(timeout=5)
        opening = pb.StoreOpen(descriptor=descriptor_to_pb(NEW), planes=["nixl"])
        await call.write(pb.StoreRequest(open=opening).SerializeToString())
        needs = pb.StoreReply.FromString(await call.read()).needs
        connection = await DataConnections("127.0.0.1").open(needs.data)
        agent = self._agent
        region = encode_remote_region(
            agent.address, size_bytes, agent.metadata, [span or (0, SIZE_BYTES)]
        )
        polling = asyncio.create_task(poll(agent))
        try:
            with suppress(ServerUnavailable):  # it may refuse in the middle
                await connection.send((region, records))
            while isinstance(await call.read(), bytes):
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            connection.close()
            await asyncio.sleep(0.05)
            polling.cancel()
        return "OK"


@pytest.fixture
async def peer(rpcs: Rpcs) -> AsyncIterator[Peer]:
    region = Region(bytearray(SIZE_BYTES))
    loop = asyncio.get_running_loop()
    yield Peer(rpcs, await loop.run_in_executor(None, region_agent_blocking, region))
    region.close()


@pytest.mark.parametrize(("record", "words"), REFUSED)
async def test_frames_that_are_refused(
    peer: Peer, server: Server, root: Path, record: bytes, words: str
) -> None:
    answer = await peer.told(record)
    assert answer.startswith("INVALID_ARGUMENT: ")
    assert words in answer
    await _nothing_left(server)
    assert " 0 connections" in repr(server.data_port)
    assert [path for path in root.rglob(".*") if path.is_file()] == []


async def test_regions_that_are_refused(peer: Peer, server: Server) -> None:
    """Its spans, and what NIXL finds when it reads: the region is not registered there."""
    assert f"a span of {SIZE_BYTES} bytes at 1 in a" in await peer.told(b"", span=(1, SIZE_BYTES))
    header = FrameHeader(0, 0, 0, bytes(8))
    frame = encode_frame(header, 8192, RecordKind.OFFERED)
    beyond = await peer.told(frame, size_bytes=2 * SIZE_BYTES, span=(SIZE_BYTES, SIZE_BYTES))
    assert beyond.startswith("UNAVAILABLE: the read from kv-")
    await _nothing_left(server)


@pytest.mark.parametrize("layers", [0, 1, 5])
async def test_after_a_cancel_nothing_is_read(
    client: AsyncClient, server: Server, layers: int
) -> None:
    """T6. And the region stays registered, for the other transfers from it."""
    descriptor = large()
    region = Region(bytearray(payload_for(descriptor)))
    for delay_s in (0, 0.0005, 0.002, 0.005):
        handle = client.store(descriptor, region)
        await handle.needed()
        for layer_index in range(layers):
            await handle.store_layer(layer_index)
        sending = asyncio.ensure_future(handle.store_layer(layers))
        await asyncio.sleep(delay_s)
        agent = region_agent_blocking(region)
        await handle.cancel()
        assert " 0 in flight" in repr(server.nixl)
        assert not agent.is_closed
        await asyncio.wait([sending])
        sending.exception()
    await _nothing_left(server)
    assert not any((await client.lookup(descriptor)).hits)
    region.close()


async def test_frames_that_found_no_slot_to_be_kept_in(
    client: AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only pass, and are kept elsewhere."""
    assert server.nixl is not None
    descriptor = large()
    region = Region(bytearray(payload_for(descriptor)))
    for to_keep in (2, 0):
        monkeypatch.setattr(server.nixl.slots, "_to_keep", to_keep)
        await store_all(client, descriptor, region)
        into = bytearray(region.size_bytes)
        async with AsyncClient(server.address, plane="tcp") as other:
            assert (await other.fetch(descriptor, into).wait()).is_whole
        assert into == region.view
        await client.delete(descriptor)
    await _nothing_left(server)
    region.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [(encode_frame(FrameHeader(0, 0, 0, b""), 0), ServerFault), (b"", ServerUnavailable)],
)
async def test_a_server_that_gives_a_wrong_answer(
    client: AsyncClient,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    error: type[Exception],
) -> None:
    def answered() -> bytes:
        if not answer:
            raise ServerUnavailable("as if it had died")
        return answer

    monkeypatch.setattr(nixl_store, "encode_taken", answered)
    region = Region(bytearray(payload_for(NEW)))
    handle = client.store(NEW, region)
    with pytest.raises(error):
        await handle.store_layer(0)
    await handle.cancel()
    await _nothing_left(server)
    assert not any((await client.lookup(NEW)).hits)
    region.close()


_STORES = """
import sys
from kvclient import Client, Region
from tests.payload import payload_for, small_descriptor
descriptor = small_descriptor(
    kv_heads=8, head_dim=128, chunks=64, layers=16, first_token=int(sys.argv[2])
)
client = Client(sys.argv[1], plane="nixl", timeout_s=5)
region = Region(payload_for(descriptor))
print("ready", flush=True)
while True:
    store = client.store(descriptor, region)
    for layer_index in range(15):
        store.store_layer(layer_index)
        print("layer", flush=True)
    store.cancel()
"""


@contextmanager
def _storing(address: str, first_token: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A client that stores without end, in the middle of it."""
    command = [sys.executable, "-c", _STORES, address, str(first_token)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        assert process.stdout.readline() == b"layer\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_what_a_stopped_client_holds(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP nothing can be read from it, and what it sends later must not come into memory that
    is used again: its slots are held until it goes on, or dies. Others are served meanwhile."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_port, "_RETIRE_S", 0.2)
    server = await start_server(server={"nixl": True})
    loop = asyncio.get_running_loop()
    descriptor = large()
    region = Region(bytearray(payload_for(descriptor)))

    def stopped_blocking(process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for _ in range(40):  # until it is stopped with something in flight
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.1)
            if " 0 in flight" not in repr(server.nixl):
                return
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == b"layer\n"
        pytest.fail("it has nothing in flight whenever it is stopped")

    for ends in (signal.SIGCONT, signal.SIGKILL):
        storing = _storing(server.address, 7000)
        process = await loop.run_in_executor(None, storing.__enter__)
        try:
            await loop.run_in_executor(None, stopped_blocking, process)
            await until(lambda: "0 transfers" in repr(server.service), 15)
            await until(lambda: " 0 retiring" in repr(server.nixl))
            assert " 0 in flight" not in repr(server.nixl)
            assert server.nixl is not None
            assert 0 < server.nixl.slots.taken <= nixl_port.IN_FLIGHT_MAX
            async with AsyncClient(server.address, plane="nixl") as client:
                await store_all(client, descriptor, region)
                assert (await client.fetch(descriptor, region).wait()).is_whole
                await client.delete(descriptor)
            assert server.nixl.slots.taken
            os.kill(process.pid, ends)
            await until(lambda: " 0 in flight" in repr(server.nixl))
        finally:
            await loop.run_in_executor(None, storing.__exit__, None, None, None)
        await _nothing_left(server)
    assert region.view == payload_for(descriptor)
    region.close()


@pytest.mark.parametrize("transports", ["", "tcp"], ids=["any transport", "tcp only"])
class TestProcesses:
    @pytest.fixture(autouse=True)
    def transport(self, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """UCX reads it when an agent is made."""
        if transports:
            monkeypatch.setenv("UCX_TLS", transports)

    @pytest.fixture
    def process(self, root: Path, transport: None) -> Iterator[ServerProcess]:
        with ServerProcess(root, settings=("server.nixl=true",)) as process:
            yield process

    def test_killed_clients_cost_nobody_else(self, process: ServerProcess) -> None:
        descriptor = large()
        source = payload_for(descriptor)
        region = Region(bytearray(source))
        with Client(process.address, plane="nixl") as client:
            for number in range(2):
                with _storing(process.address, 7000) as died:
                    os.kill(died.pid, signal.SIGKILL)
                    with client.store(descriptor, region) as handle:
                        for layer_index in descriptor.layer_order:
                            handle.store_layer(layer_index)
                        assert handle.finish().is_whole, number
            region.view[:] = bytes(region.size_bytes)
            assert client.fetch(descriptor, region).wait().is_whole
        assert region.view == source
        region.close()
        assert process.stop() == 0, process.log()

    def test_a_killed_server(self, process: ServerProcess) -> None:
        """The store fails, and nothing can be read from the region any more."""
        region = Region(bytearray(payload_for(NEW)))
        with Client(process.address, plane="nixl") as client:
            handle = client.store(NEW, region)
            handle.store_layer(0)
            agent = region_agent_blocking(region)
            process.kill()
            with pytest.raises(ServerUnavailable):
                handle.finish()
            assert handle.state is HandleState.ERR
            assert agent.is_closed
            with (
                ServerProcess(process.root, settings=("server.nixl=true",)) as again,
                Client(again.address, plane="nixl") as other,
                other.store(NEW, region) as store,
            ):
                for layer_index in NEW.layer_order:
                    store.store_layer(layer_index)
                assert store.finish().is_whole
        region.close()

    def test_a_server_that_hangs_holds_the_cancel_for_a_moment(
        self, process: ServerProcess
    ) -> None:
        """Then the region's registration is ended, and it is the caller's."""
        region = Region(bytearray(payload_for(NEW)))
        with Client(process.address, plane="nixl") as client:
            handle = client.store(NEW, region)
            handle.store_layer(0)
            agent = region_agent_blocking(region)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                cancelling = threading.Thread(target=handle.cancel)
                cancelling.start()
                cancelling.join(8)
                assert not cancelling.is_alive()
                assert agent.is_closed
                region.view[:] = b"\xee" * SIZE_BYTES
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert not any(client.lookup(NEW).hits)
            region.view[:] = payload_for(NEW)
            with client.store(NEW, region) as again:
                for layer_index in NEW.layer_order:
                    again.store_layer(layer_index)
                assert again.finish().is_whole
        region.close()
