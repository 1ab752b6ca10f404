"""The contract of planes where somebody misbehaves: the same on each, in both directions."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest

from kvclient import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Region,
    SharedRegion,
)
from kvclient.channel import Rpcs
from kvclient.planes.base import FetchCall, StoreCall
from kvserve import nixl_agent
from kvserve.data_socket import DataSocket
from kvserve.errors import ServerUnavailable
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.records import HELLO_MAGIC
from kvserve.model import Span
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.transfer.planes.base import OutgoingFrame
from kvserve.transfer.planes.grpc import GrpcFetchPlane
from kvserve.transfer.planes.nixl import NixlFetchPlane
from kvserve.transfer.planes.shm import ShmFetchPlane
from kvserve.transfer.planes.tcp import TcpFetchPlane
from kvserve.v1 import kvserve_pb2 as pb
from tests.payload import memory, payload_for, small_descriptor, store_all
from tests.rpc.test_planes import until, until_quiet

PLANES = ["grpc", "tcp", "shm", "nixl"]
STORED, NEW = small_descriptor(), small_descriptor(first_token=5000)

StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed (the extra nixl)")
    return name


@pytest.fixture(params=["fetch", "store"])
def direction(request: pytest.FixtureRequest, plane: str) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def server(start_server: StartServer, plane: str) -> Server:
    return await start_server(server={"nixl": plane == "nixl"})


def temp_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_file()]


async def offered(
    rpcs: Rpcs, plane: str, direction: str
) -> tuple[FetchCall | StoreCall, pb.DataOffer]:
    """A transfer whose data connection is awaited, and what it was offered."""
    if direction == "fetch":
        request = pb.FetchRequest(descriptor=descriptor_to_pb(STORED), planes=[plane])
        fetch = rpcs.fetch(request, timeout=10)
        return fetch, pb.FetchReply.FromString(await fetch.read()).head.data
    store = rpcs.store(timeout=10)
    opening = pb.StoreOpen(descriptor=descriptor_to_pb(NEW), planes=[plane])
    await store.write(pb.StoreRequest(open=opening).SerializeToString())
    return store, pb.StoreReply.FromString(await store.read()).needs.data


async def connected(address: str) -> DataSocket:
    if address.startswith("unix:@"):
        sock, target = socket.socket(socket.AF_UNIX), "\0" + address.removeprefix("unix:@")
    else:
        host, _, port = address.rpartition(":")
        sock, target = socket.socket(), (host or "127.0.0.1", int(port))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, target)
    return DataSocket(sock, address)


async def is_closed(connection: DataSocket) -> bool:
    """Whether the other side closes it without a word."""
    try:
        async with asyncio.timeout(5):
            await connection.receive([memoryview(bytearray(1))])
    except ServerUnavailable:
        return True
    finally:
        connection.close()
    return False


@pytest.mark.parametrize("plane", [it for it in PLANES if it != "grpc"], indirect=True)
async def test_a_wrong_secret_and_one_that_was_used(
    client: AsyncClient, server: Server, rpcs: Rpcs, plane: str, direction: str
) -> None:
    """Either is closed, counted and of no harm to who has the right one; grpc needs none."""
    await store_all(client, STORED, payload_for(STORED))
    await until_quiet(server)
    assert server.data_port is not None
    call, offer = await offered(rpcs, plane, direction)
    wrong = await connected(offer.address)
    await wrong.send((HELLO_MAGIC, bytes(32)))
    assert await is_closed(wrong)
    assert server.data_port.refused == 1
    with closing(await connected(offer.address)) as right:
        await right.send((HELLO_MAGIC, offer.secret))
        await until(lambda: " 0 expected" in repr(server.data_port))
        again = await connected(offer.address)
        await again.send((HELLO_MAGIC, offer.secret))
        assert await is_closed(again)
        assert server.data_port.refused == 2
        if call.done():  # all that a fetch sends may fit in the socket
            assert await call.code() is grpc.StatusCode.OK
    call.cancel()
    await until_quiet(server)


async def test_a_plane_that_is_not_there(
    start_server: StartServer, plane: str, direction: str
) -> None:
    """The error names what is; grpc is always there."""
    server = await start_server(server={"data_listen": "off", "shared_memory": False})
    async with AsyncClient(server.address, plane=plane) as client:
        region = memory(plane, payload_for(NEW))
        if plane == "grpc":
            await store_all(client, NEW, region)
            assert (await client.fetch(NEW, region).wait()).is_whole
            return
        handle = getattr(client, direction)(NEW, region)
        end = handle.wait if direction == "fetch" else handle.finish
        with pytest.raises(InvalidRequest, match=f"plane {plane} is not there; this server has gr"):
            await end()
    await until_quiet(server)


class Short:
    """A placement that has no room for the last byte of a frame."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def views(self, layer: int, first: int, count: int, span: Span) -> list[memoryview]:
        return [self.region.view[: count * span.size_bytes - 1]]


async def test_a_region_that_is_too_small(
    client: AsyncClient, server: Server, root: Path, plane: str, direction: str
) -> None:
    """By a byte, whether the client sees it at once or only its placement's views show it."""
    await store_all(client, STORED, payload_for(STORED))
    size_bytes = STORED.payload_size_bytes
    with pytest.raises(InvalidRequest, match="wrong dtype or number of chunks"):
        getattr(client, direction)(NEW, bytearray(size_bytes - 1))
    short = Short(memory(plane, size_bytes))
    if direction == "fetch":
        words = "the placement gives 65535 bytes for 65536|spans for 262140 bytes"
        with pytest.raises(InvalidRequest, match=words):
            await client.fetch(STORED, short).wait()
    else:
        handle = client.store(NEW, short)
        # One layer: grpcio may lose the server's status to a write that comes after it.
        with suppress(InvalidRequest):
            await handle.store_layer(0)
        await handle.ended()
        assert isinstance(handle.error, InvalidRequest)
        assert not any((await client.lookup(NEW)).hits)
    await until_quiet(server)
    assert temp_files(root) == []


async def test_a_store_that_stalls_is_ended_by_its_deadline(
    client: AsyncClient, server: Server, root: Path, plane: str
) -> None:
    """The server waits with some frames, serves others, and keeps nothing."""
    handle = client.store(NEW, memory(plane, payload_for(NEW)), timeout_s=1.5)
    await handle.store_layer(0)
    await handle.layer(0)
    await store_all(client, STORED, payload_for(STORED))
    await handle.ended()
    assert isinstance(handle.error, DeadlineExceeded)
    await until_quiet(server)
    assert temp_files(root) == []
    assert not any((await client.lookup(NEW)).hits)


async def test_a_store_s_region_is_the_caller_s_after_a_cancel(
    client: AsyncClient, server: Server, root: Path, plane: str
) -> None:
    """What is written into it then is stored by nobody, and is not changed by anybody."""
    region = memory(plane, payload_for(NEW))
    for layers in range(4):
        handle = client.store(NEW, region)
        await handle.needed()
        for layer_index in range(layers):
            await handle.store_layer(layer_index)
        sending = asyncio.ensure_future(handle.store_layer(layers))
        await asyncio.sleep(0.001 * layers)
        await handle.cancel()
        region.view[:] = b"\xaa" * region.size_bytes
        await asyncio.wait([sending])
        sending.exception()
    await until_quiet(server)
    assert region.view == b"\xaa" * region.size_bytes
    assert temp_files(root) == []
    assert not any((await client.lookup(NEW)).hits)


_KILLED = """
import os, signal, sys
from kvclient import Client
from tests.payload import memory, payload_for, small_descriptor
address, plane, direction = sys.argv[1:]
first_token = 0 if direction == "fetch" else 5000
descriptor = small_descriptor(
    kv_heads=4, head_dim=128, chunks=32, layers=8, first_token=first_token
)
region = memory(plane, payload_for(descriptor))
client = Client(address, plane=plane)
if direction == "fetch":
    client.fetch(descriptor, region).wait_layer(0)
else:
    store = client.store(descriptor, region)
    store.store_layer(0)
    store.post_layer(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestKilledClients:
    """A real process, SIGKILL in the middle."""

    @pytest.fixture
    def process(self, root: Path, plane: str) -> Iterator[ServerProcess]:
        with ServerProcess(
            root, settings=(f"server.nixl={str(plane == 'nixl').lower()}",)
        ) as process:
            yield process

    def test_leave_nothing(
        self, process: ServerProcess, root: Path, plane: str, direction: str
    ) -> None:
        stored = small_descriptor(kv_heads=4, head_dim=128, chunks=32, layers=8)
        with Client(process.address, plane="grpc") as client:
            with client.store(stored, payload_for(stored)) as handle:
                for layer_index in stored.layer_order:
                    handle.store_layer(layer_index)
                assert handle.finish().is_whole
            before = _sockets(process.pid)
            died = subprocess.run(
                [sys.executable, "-c", _KILLED, process.address, plane, direction],
                timeout=50,
                check=False,
            )
            assert died.returncode == -signal.SIGKILL
            deadline = time.monotonic() + 10
            while (
                temp_files(root)
                or _sockets(process.pid) > before
                or "memfd:kvclient" in Path(f"/proc/{process.pid}/maps").read_text()
            ):
                assert time.monotonic() < deadline, "something of a dead client is left"
                client.server_info()
                time.sleep(0.02)
            into = bytearray(stored.payload_size_bytes)
            with client.fetch(stored, into) as fetch:
                assert fetch.wait().is_whole
            assert into == payload_for(stored)


def _sockets(pid: int) -> int:
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(entry).startswith("socket:")
    return count


def test_shared_memory_cannot_be_truncated() -> None:
    """Not even by its owner: the server would be killed by the page that is gone."""
    with closing(SharedRegion(1 << 16)) as region:
        for size_bytes in (0, 4096, 1 << 17):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size_bytes)


async def test_sixteen_clients_at_once(
    server: Server, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ends with its own bytes, none waits for the others' end, and frames have a bound."""
    frames, frames_max = 0, 0
    of: dict[str, type[GrpcFetchPlane | TcpFetchPlane]]
    of = {"grpc": GrpcFetchPlane, "tcp": TcpFetchPlane, "shm": ShmFetchPlane}
    of["nixl"] = NixlFetchPlane
    new_frame, send = of[plane].new_frame, of[plane].send

    def counted_new_frame(
        self: object, *args: object, may_be_in_place: bool = False
    ) -> OutgoingFrame:
        nonlocal frames, frames_max
        frames += 1
        frames_max = max(frames_max, frames)
        return new_frame(self, *args, may_be_in_place=may_be_in_place)  # type: ignore[arg-type]

    async def counted_send(self: object, frame: OutgoingFrame) -> None:
        nonlocal frames
        await send(self, frame)  # type: ignore[arg-type]
        frames -= 1

    monkeypatch.setattr(of[plane], "new_frame", counted_new_frame)
    monkeypatch.setattr(of[plane], "send", counted_send)
    wanted = [
        small_descriptor(kv_heads=4, head_dim=64, chunks=8, layers=16, first_token=1000 * number)
        for number in range(16)
    ]
    payloads = [payload_for(it, seed) for seed, it in enumerate(wanted)]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(server.address, timeout_s=40, plane=plane))
            for _ in wanted
        ]
        for client, descriptor, payload in zip(clients, wanted, payloads, strict=True):
            await store_all(client, descriptor, payload)
        regions = [memory(plane, len(payload)) for payload in payloads]
        handles = [
            client.fetch(descriptor, region)
            for client, descriptor, region in zip(clients, wanted, regions, strict=True)
        ]
        ends = asyncio.as_completed([handle.wait() for handle in handles])
        for number, end in enumerate(ends):
            assert (await end).is_whole
            if number == len(handles) * 3 // 4:
                assert all(handle._events for handle in handles), "one has got no layer yet"
    assert [region.view for region in regions] == payloads
    assert 0 < frames_max <= 16 * 8, "frames_in_flight each"
    await until_quiet(server)
