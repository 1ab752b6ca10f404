"""The nixl plane alone: what a server takes for a region, and who may hold whom.

Clients that are to be killed run in processes of their own.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from kvclient import AsyncClient, Client, HandleState, InvalidRequest, Region, ServerUnavailable
from kvclient.channel import Rpcs
from kvclient.nixl_region import RegionAgent, region_agent_blocking
from kvclient.planes.tcp import DataConnections
from kvclient.region import as_region
from kvserve import nixl_agent
from kvserve.config import load_config
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.remote_region import encode_remote_region
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.transfer.planes import nixl_port
from kvserve.v1 import kvserve_pb2 as pb
from tests.certificates import Certificates
from tests.payload import payload_for, small_descriptor, store_all
from tests.rpc.stopped_server import check_that_a_cancel_is_held
from tests.rpc.test_planes import large, until, until_quiet

pytestmark = pytest.mark.skipif(
    not nixl_agent.is_installed(), reason="NIXL is not installed (the extra nixl)"
)
SIZE_BYTES = small_descriptor().payload_size_bytes


@pytest.fixture
def plane() -> str:
    return "nixl"


@pytest.fixture
async def server(start_server: Callable[..., object]) -> Server:
    return await start_server(server={"nixl": True})  # type: ignore[misc, no-any-return]


class TestRegions:
    """What a client says of its region is checked before a byte is written."""

    @pytest.fixture(autouse=True)
    async def stored(self, client: AsyncClient) -> None:
        descriptor = small_descriptor()
        await store_all(client, descriptor, payload_for(descriptor))

    @pytest.fixture
    async def agent(self) -> AsyncIterator[RegionAgent]:
        loop = asyncio.get_running_loop()
        region = Region(bytearray(SIZE_BYTES))
        yield await loop.run_in_executor(None, region_agent_blocking, region)
        assert not any(region.view)
        region.close()

    async def _told(self, rpcs: Rpcs, said: bytes) -> str:
        """How the server ends a fetch into this region."""
        request = pb.FetchRequest(descriptor=descriptor_to_pb(small_descriptor()), planes=["nixl"])
        call = rpcs.fetch(request, timeout=5)
        head = pb.FetchReply.FromString(await call.read()).head
        connection = await DataConnections("127.0.0.1").open(head.data)
        try:
            with suppress(ServerUnavailable):
                await connection.send((said,))
            while isinstance(await call.read(), bytes):
                pass
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
        finally:
            connection.close()
        return ""

    @pytest.mark.parametrize(
        ("spans", "words"),
        [
            ([(1, SIZE_BYTES)], f"a span of {SIZE_BYTES} bytes at 1 in a region of"),
            ([(2**64 - 1, 2)], "a span of 2 bytes at 18446744073709551615"),
            ([(0, 0), (0, SIZE_BYTES)], "a span of 0 bytes"),
            ([(0, SIZE_BYTES - 1)], f"spans for {SIZE_BYTES - 1} bytes, the payload has"),
            ([], "0 spans of a region; must be 1 to 65536"),
        ],
    )
    async def test_spans_outside_of_it(
        self, rpcs: Rpcs, agent: RegionAgent, spans: Sequence[tuple[int, int]], words: str
    ) -> None:
        said = encode_remote_region(agent.address, SIZE_BYTES, agent.metadata, spans)
        assert words in await self._told(rpcs, said)

    async def test_a_region_that_is_larger_than_what_is_registered(
        self, rpcs: Rpcs, agent: RegionAgent, server: Server
    ) -> None:
        """Too small for the payload: NIXL finds it, and the server goes on."""
        spans = [(SIZE_BYTES, SIZE_BYTES)]
        said = encode_remote_region(agent.address, 2 * SIZE_BYTES, agent.metadata, spans)
        assert "the write to kv-" in await self._told(rpcs, said)
        await until_quiet(server)

    async def test_metadata_that_is_none(self, rpcs: Rpcs, agent: RegionAgent) -> None:
        spans = [(0, SIZE_BYTES)]
        for junk in (b"x", b"nixl" * 100, agent.metadata[:-3], bytes(reversed(agent.metadata))):
            said = encode_remote_region(agent.address, SIZE_BYTES, junk, spans)
            assert "NIXL metadata cannot be used" in await self._told(rpcs, said)
        said = encode_remote_region(agent.address, SIZE_BYTES, b"", spans)
        assert "0 bytes of metadata; must be 1 to 262144" in await self._told(rpcs, said)

    async def test_no_region_at_all(self, rpcs: Rpcs) -> None:
        said = encode_remote_region(0, 0, b"m", [(0, 1)])
        assert "a region of 0 bytes at address 0" in await self._told(rpcs, said)


async def test_a_region_is_registered_once_until_it_is_closed(
    client: AsyncClient, server: Server
) -> None:
    descriptor = small_descriptor()
    source = payload_for(descriptor)
    region = Region(bytearray(source))
    await store_all(client, descriptor, region)
    region.view[:] = bytes(SIZE_BYTES)
    for layer_index in range(4):
        assert (await client.fetch(descriptor, region, layers=[layer_index]).wait()).is_whole
    assert "1 remotes" in repr(server.nixl)
    agent = region_agent_blocking(region)
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region_agent_blocking(region) is agent
    assert region.view == source
    region.close()
    assert agent.is_closed


async def test_a_region_that_nobody_uses_is_forgotten(
    client: AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another one that takes its place; it is known again when it comes back."""
    monkeypatch.setattr(nixl_port, "_IDLE_POLL_S", 0.02)
    region = Region(bytearray(payload_for(small_descriptor())))
    await store_all(client, small_descriptor(), region)
    await asyncio.sleep(0.1)
    assert "1 remotes" in repr(server.nixl)
    monkeypatch.setattr(nixl_port, "_REMOTE_IDLE_S", 0.0)
    await until(lambda: "0 remotes" in repr(server.nixl))
    assert (await client.fetch(small_descriptor(), region).wait()).is_whole
    region.close()


async def test_by_itself_a_client_takes_it_for_a_region_that_was_made(server: Server) -> None:
    descriptor = small_descriptor()
    async with AsyncClient(server.address) as client:
        await store_all(client, descriptor, as_region(payload_for(descriptor)))
        assert (await client.fetch(descriptor, bytearray(SIZE_BYTES)).wait()).is_whole
        await store_all(client, small_descriptor(first_token=5000), Region(bytes(SIZE_BYTES)))
        assert "0 remotes" in repr(server.nixl)
        region = Region(bytearray(SIZE_BYTES))
        assert (await client.fetch(descriptor, region).wait()).is_whole
        assert "1 remotes" in repr(server.nixl)
        other = Region(bytearray(SIZE_BYTES))
        await store_all(client, small_descriptor(first_token=9000), other)
        assert "2 remotes" in repr(server.nixl)
        region.close()
        other.close()


async def test_a_cancel_keeps_the_region_registered(client: AsyncClient, server: Server) -> None:
    """The server says that it is quiet: nothing has to be taken from other fetches."""
    descriptor = large()
    await store_all(client, descriptor, payload_for(descriptor))
    region = Region(bytearray(descriptor.payload_size_bytes))
    for _ in range(5):
        handle = client.fetch(descriptor, region)
        await handle.layer(1)
        agent = region_agent_blocking(region)
        await handle.cancel()
        assert not agent.is_closed
    await until_quiet(server)
    await until(lambda: "0 in flight, 0 retiring, 0 of" in repr(server.nixl))
    region.close()


async def test_frames_that_found_no_slot_to_be_read_into(
    client: AsyncClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read elsewhere and copied into one that is kept for that."""
    assert server.nixl is not None
    descriptor = large()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    region = Region(bytearray(len(source)))
    for to_read_into in (2, 0):
        region.view[:] = bytes(len(source))
        monkeypatch.setattr(server.nixl.slots, "_to_keep", to_read_into)
        assert (await client.fetch(descriptor, region).wait()).is_whole
        assert region.view == source
    await until(lambda: "0 in flight, 0 retiring, 0 of" in repr(server.nixl))
    region.close()


async def test_with_tls(start_server: Callable[..., object], certificates: Certificates) -> None:
    """Only by name, since NIXL encrypts nothing; its connection is secured, and says QUIET."""
    settings = {"nixl": True, **certificates.settings}
    server: Server = await start_server(server=settings)  # type: ignore[misc]
    descriptor = large()
    source = payload_for(descriptor)
    region = Region(bytearray(len(source)))
    async with AsyncClient(server.address, tls=certificates.tls) as client:
        await store_all(client, descriptor, source)
        assert (await client.fetch(descriptor, region).wait()).is_whole
        assert "0 remotes" in repr(server.nixl)
    region.view[:] = bytes(len(source))
    async with AsyncClient(server.address, tls=certificates.tls, plane="nixl") as client:
        handle = client.fetch(descriptor, region)
        await handle.layer(1)
        agent = region_agent_blocking(region)
        await handle.cancel()
        assert not agent.is_closed
        assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == source
    await until_quiet(server)
    region.close()


async def test_a_server_without_it(root: Path) -> None:
    settings = {"server": {"listen": "127.0.0.1:0"}, "store": {"root": str(root)}}
    server = Server(load_config(None, settings))
    await server.start()
    try:
        async with AsyncClient(server.address, plane="nixl") as client:
            descriptor = small_descriptor()
            words = "plane nixl is not there; this server has grpc and tcp"
            with pytest.raises(InvalidRequest, match=words):
                await store_all(client, descriptor, payload_for(descriptor))
            with pytest.raises(InvalidRequest, match=words):
                await client.fetch(descriptor, Region(bytearray(SIZE_BYTES))).wait()
    finally:
        await server.stop()


async def test_settings_that_leave_no_data_connections(start_server: Callable[..., object]) -> None:
    with pytest.raises(InvalidRequest, match=r"server\.nixl needs the tcp plane"):
        await start_server(server={"nixl": True, "data_listen": "off"})  # type: ignore[misc]


async def test_a_server_without_the_package(
    start_server: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("nixl_that_is_not_there",))
    with pytest.raises(InvalidRequest, match=r"pip install 'PATH/TO/kvserve\[nixl\]'"):
        await start_server(server={"nixl": True})  # type: ignore[misc]


_FETCHES = """
import os, sys
from kvclient import Client, Region
from tests.payload import small_descriptor
descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
client = Client(sys.argv[1], plane="nixl")
region = Region(bytearray(descriptor.payload_size_bytes))
print("ready", flush=True)
while True:
    with client.fetch(descriptor, region) as fetch:
        fetch.wait_layer(0)
        print("layer", flush=True)
        fetch.wait()
"""


@pytest.mark.parametrize("transports", ["", "tcp"], ids=["any transport", "tcp only"])
class TestProcesses:
    @pytest.fixture(autouse=True)
    def transport(self, transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """UCX reads it when an agent is made."""
        if transports:
            monkeypatch.setenv("UCX_TLS", transports)

    @pytest.fixture
    def process(self, root: Path, transport: None) -> object:
        with ServerProcess(root, settings=("server.nixl=true",)) as process:
            yield process

    @pytest.fixture
    def stored(self, process: ServerProcess) -> object:
        descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
        payload = payload_for(descriptor)
        with Client(process.address) as client, client.store(descriptor, payload) as handle:
            for layer_index in descriptor.layer_order:
                handle.store_layer(layer_index)
            assert handle.finish().is_whole
        return descriptor

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_client_that_ends_or_hangs_in_the_middle(
        self, process: ServerProcess, stored: object, number: signal.Signals
    ) -> None:
        """The server lives on, and serves others meanwhile and after."""
        descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
        died = subprocess.Popen(
            [sys.executable, "-c", _FETCHES, process.address], stdout=subprocess.PIPE
        )
        try:
            assert died.stdout is not None
            assert died.stdout.readline() == b"ready\n"
            assert died.stdout.readline() == b"layer\n"
            os.kill(died.pid, number)
            region = Region(bytearray(descriptor.payload_size_bytes))
            with Client(process.address, plane="nixl") as client:
                for _ in range(3):
                    with client.fetch(descriptor, region) as handle:
                        assert handle.wait().is_whole
            assert region.view == payload_for(descriptor)
            region.close()
        finally:
            died.kill()
            died.wait()
            assert died.stdout is not None
            died.stdout.close()
        assert process.stop() == 0, process.log()

    def test_a_killed_server(
        self,
        process: ServerProcess,
        stored: object,
        transports: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """T6: what it had sent and was not taken yet does not arrive after the fetch's end."""
        descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
        region = Region(bytearray(descriptor.payload_size_bytes))
        reused = b"\xaa" * len(region.view)
        with Client(process.address, plane="nixl") as client:
            handle = client.fetch(descriptor, region)
            handle.wait_layer(0)
            poll = RegionAgent.poll
            monkeypatch.setattr(RegionAgent, "poll", lambda agent: None)  # so that it piles up
            if transports:
                time.sleep(0.1)
            process.kill()
            try:
                handle.wait()
                assert not transports, "nothing arrives without polling"
            except ServerUnavailable:
                assert handle.state is HandleState.ERR
            region.view[:] = reused
            agent = region_agent_blocking(region)
            for _ in range(200):
                poll(agent)
            monkeypatch.setattr(RegionAgent, "poll", poll)
            assert region.view == reused
            with ServerProcess(process.root, settings=("server.nixl=true",)) as again:
                assert region.view == reused
                with Client(again.address, plane="nixl") as other:
                    assert other.fetch(descriptor, region).wait().is_whole
            assert region.view == payload_for(descriptor)
        region.close()

    def test_a_server_that_hangs_holds_the_cancel(
        self, process: ServerProcess, stored: object
    ) -> None:
        descriptor = small_descriptor(kv_heads=8, head_dim=128, chunks=64, layers=16)
        region = Region(bytearray(descriptor.payload_size_bytes))
        with Client(process.address, plane="nixl") as client:
            check_that_a_cancel_is_held(process, client, descriptor, region)
        region.close()
