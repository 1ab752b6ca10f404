"""The shm plane alone: which memory a server takes, and who may hold whom."""

import asyncio
import fcntl
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvclient import (
    AsyncClient,
    Client,
    HandleState,
    InvalidRequest,
    Paged,
    ServerUnavailable,
    SharedRegion,
)
from kvclient.channel import Rpcs
from kvclient.planes.base import FetchCall, StoreCall
from kvclient.planes.shm import spans_of
from kvclient.planes.tcp import DataConnections
from kvserve.format.messages import descriptor_to_pb
from kvserve.format.records import RegionHead, encode_finish, encode_region
from kvserve.rpc.server import Server
from kvserve.testing.server_process import ServerProcess
from kvserve.transfer.planes import shared_memory
from kvserve.v1 import kvserve_pb2 as pb
from tests.descriptors import open_files
from tests.payload import memory, payload_for, small_descriptor, store_all
from tests.rpc.stopped_server import check_that_a_cancel_is_held
from tests.rpc.test_planes import large, until, until_quiet

SIZE_BYTES = small_descriptor().payload_size_bytes


@pytest.fixture
def plane() -> str:
    return "shm"


STORED, NEW = small_descriptor(), small_descriptor(first_token=5000)


@dataclass
class Peer:
    """A client made by hand: how the server ends a fetch or a store with this memory."""

    rpcs: Rpcs
    direction: str

    async def told(
        self,
        fd: int | None,
        spans: Sequence[tuple[int, int]] = ((0, SIZE_BYTES),),
        *,
        announced: int = SIZE_BYTES,
        says_memory: bool = True,
        records: Sequence[bytes] = (encode_finish(),),
    ) -> str:
        try:
            call, offer = await (self._fetch() if self.direction == "fetch" else self._store())
            connection = await DataConnections("").open(offer)
            try:
                region = RegionHead(says_memory, len(spans), announced)
                with suppress(ServerUnavailable):  # it may refuse in the middle
                    await connection.send((encode_region(region, spans),))
                    if fd is not None:
                        await connection.send_fd(fd)
                    elif says_memory:
                        await connection.send((b"m",))
                    if self.direction == "store":
                        await connection.send(records)
                while isinstance(await call.read(), bytes):
                    pass
            finally:
                connection.close()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    async def _fetch(self) -> tuple[FetchCall | StoreCall, pb.DataOffer]:
        request = pb.FetchRequest(descriptor=descriptor_to_pb(STORED), planes=["shm"])
        call = self.rpcs.fetch(request, timeout=5)
        return call, pb.FetchReply.FromString(await call.read()).head.data

    async def _store(self) -> tuple[FetchCall | StoreCall, pb.DataOffer]:
        call = self.rpcs.store(timeout=5)
        opening = pb.StoreOpen(descriptor=descriptor_to_pb(NEW), planes=["shm"])
        await call.write(pb.StoreRequest(open=opening).SerializeToString())
        return call, pb.StoreReply.FromString(await call.read()).needs.data


@pytest.fixture(params=["fetch", "store"])
async def peer(request: pytest.FixtureRequest, client: AsyncClient, rpcs: Rpcs) -> Peer:
    await store_all(client, STORED, payload_for(STORED))
    return Peer(rpcs, request.param)


class TestMemory:
    """What a client shares is checked before a byte is touched, in both directions."""

    async def test_sealed_memory_is_taken(self, peer: Peer, server: Server) -> None:
        region = SharedRegion(SIZE_BYTES)
        assert await peer.told(region.fd) == "OK"
        expected = payload_for(STORED) if peer.direction == "fetch" else bytes(SIZE_BYTES)
        assert region.view == expected
        await until_quiet(server)

    async def test_memory_that_may_shrink(self, peer: Peer) -> None:
        """Its pages could go while the server writes: SIGBUS."""
        fd = os.memfd_create("may-shrink", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE_BYTES)
        assert "INVALID_ARGUMENT: shared memory must be sealed" in await peer.told(fd)
        os.close(fd)

    async def test_memory_of_huge_pages(self, peer: Peer) -> None:
        """The host may have no more of them: SIGBUS, too."""
        fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert "shared memory must have ordinary pages, not of " in await peer.told(fd)
        os.close(fd)

    async def test_an_ordinary_file(self, peer: Peer, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(SIZE_BYTES))
        fd = os.open(tmp_path / "file", os.O_RDWR)
        assert "INVALID_ARGUMENT: shared memory must be a memfd" in await peer.told(fd)
        os.close(fd)

    async def test_less_than_was_announced(self, peer: Peer) -> None:
        region = SharedRegion(SIZE_BYTES)
        answer = await peer.told(region.fd, announced=SIZE_BYTES + 1)
        assert f"shared memory of {SIZE_BYTES} bytes was announced as {SIZE_BYTES + 1}" in answer

    @pytest.mark.parametrize(
        ("spans", "words"),
        [
            ([(1, SIZE_BYTES)], f"a span of {SIZE_BYTES} bytes at 1 in a region of"),
            ([(2**64 - 1, 2)], "a span of 2 bytes at 18446744073709551615"),
            ([(0, 0), (0, SIZE_BYTES)], "a span of 0 bytes"),
            ([(0, SIZE_BYTES - 1)], f"spans for {SIZE_BYTES - 1} bytes, the payload has"),
            ([(0, SIZE_BYTES), (0, 1)], f"spans for {SIZE_BYTES + 1} bytes, the payload has"),
            ([], "0 spans of a region; must be 1 to 65536"),
            ([(0, 1)] * 65_537, "65537 spans of a region; must be 1 to 65536"),
        ],
    )
    async def test_spans_outside_of_it(
        self, peer: Peer, spans: list[tuple[int, int]], words: str
    ) -> None:
        region = SharedRegion(SIZE_BYTES)
        assert words in await peer.told(region.fd, spans)
        assert not any(region.view)

    async def test_a_descriptor_that_does_not_come(self, peer: Peer) -> None:
        assert "was announced and did not come" in await peer.told(None)

    async def test_memory_of_before_where_there_was_none(self, peer: Peer) -> None:
        answer = await peer.told(None, says_memory=False)
        assert "no shared memory came over this connection" in answer

    async def test_memory_that_cannot_be_written(self, peer: Peer) -> None:
        region = SharedRegion(SIZE_BYTES)
        fd = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY)
        assert "cannot be mapped for writing" in await peer.told(fd)
        os.close(fd)

    async def test_a_file_descriptor_on_no_refusal_is_left_open(
        self, peer: Peer, server: Server
    ) -> None:
        region = SharedRegion(SIZE_BYTES)
        await peer.told(region.fd)
        await until_quiet(server)
        await asyncio.sleep(0.05)
        before = open_files()
        for spans in ([(1, SIZE_BYTES)], [(0, 1)]):
            for _ in range(5):
                await peer.told(region.fd, spans)
        await until_quiet(server)
        await until(lambda: open_files() <= before)


class TestRegions:
    async def test_a_region_is_mapped_once_for_a_store_and_all_layers(
        self, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mapped: list[int] = []
        real = shared_memory._map
        monkeypatch.setattr(shared_memory, "_map", lambda *args: mapped.append(1) or real(*args))
        descriptor = small_descriptor()
        source = payload_for(descriptor)
        one, other = memory("shm", source), SharedRegion(SIZE_BYTES)
        await store_all(client, descriptor, one)
        one.view[:] = bytes(SIZE_BYTES)
        for layer_index in range(4):
            assert (await client.fetch(descriptor, one, layers=[layer_index]).wait()).is_whole
        assert len(mapped) == 1
        assert (await client.fetch(descriptor, other).wait()).is_whole
        assert len(mapped) == 2
        assert one.view == other.view == source

    async def test_the_client_does_not_keep_a_region_alive(self, client: AsyncClient) -> None:
        descriptor = small_descriptor()
        await store_all(client, descriptor, payload_for(descriptor))
        region = SharedRegion(SIZE_BYTES)
        watched = weakref.ref(region)
        await client.fetch(descriptor, region).wait()
        del region
        gc.collect()
        assert watched() is None
        again = SharedRegion(SIZE_BYTES)
        assert (await client.fetch(descriptor, again).wait()).is_whole
        assert again.view == payload_for(descriptor)

    async def test_only_layers_of_a_placement(self, client: AsyncClient) -> None:
        descriptor = small_descriptor(layers=3)
        source = payload_for(descriptor)
        await store_all(client, descriptor, source)
        size = descriptor.layout.slice_sizes[0]
        pool = SharedRegion(8 * size + 100)
        addresses = [[], [100 + (7 - chunk) * size for chunk in range(8)], []]
        paged = Paged(pool, descriptor, addresses)
        assert spans_of(paged, descriptor, [1]) == [(at, size) for at in addresses[1]]
        assert (await client.fetch(descriptor, paged, layers=[1]).wait()).is_whole
        for chunk in range(8):
            at = descriptor.payload_offsets[1] + chunk * size
            assert pool.view[addresses[1][chunk] :][:size] == source[at : at + size]
        assert pool.view[:100] == bytes(100)

    async def test_an_ordinary_region(self, client: AsyncClient, server: Server) -> None:
        """Pinned it is refused; by itself a client takes tcp for it, and shm where it can."""
        descriptor = small_descriptor()
        await store_all(client, descriptor, payload_for(descriptor))
        with pytest.raises(InvalidRequest, match="plane shm takes a SharedRegion only"):
            await client.fetch(descriptor, bytearray(SIZE_BYTES)).wait()
        async with AsyncClient(server.address) as free:
            assert (await free.fetch(descriptor, bytearray(SIZE_BYTES)).wait()).is_whole
            (kept,) = free._channel.planes.connections._kept
            assert not kept[1].peer.startswith("unix:")
            assert (await free.fetch(descriptor, SharedRegion(SIZE_BYTES)).wait()).is_whole
            assert free._channel.planes.connections._kept[-1][1].peer.startswith("unix:")

    async def test_another_host(self, server: Server, caplog: pytest.LogCaptureFixture) -> None:
        """Its sockets are not there: the client goes on over tcp."""
        assert server.data_port is not None
        server.data_port.unix_address = "unix:@kvserve-of-another-host"
        descriptor = small_descriptor()
        region = SharedRegion(SIZE_BYTES)
        async with AsyncClient(server.address) as client:
            await store_all(client, descriptor, payload_for(descriptor))
            assert (await client.fetch(descriptor, region).wait()).is_whole
            assert client.requests["Fetch"] == 2
            assert (await client.fetch(descriptor, region).wait()).is_whole
            assert client.requests["Fetch"] == 3
        assert region.view == payload_for(descriptor)
        assert caplog.text.count("shm is avoided for 60 s") == 1
        async with AsyncClient(server.address, plane="shm") as client:
            with pytest.raises(
                ServerUnavailable, match="plane shm: the data address unix:@kvserve"
            ):
                await client.fetch(descriptor, region).wait()

    def test_of_no_size(self) -> None:
        with pytest.raises(InvalidRequest, match="a shared region of 0 bytes"):
            SharedRegion(0)


async def test_a_wild_pointer_condemns_no_chunk(
    client: AsyncClient, server: Server, root: Path
) -> None:
    """The client writes into the region all the time: its own fetch suffers, nobody else's."""
    descriptor = large()
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    region = SharedRegion(len(source))
    stop = threading.Event()
    junk = b"\xee" * len(source)

    def scribble() -> None:
        while not stop.is_set():
            region.view[:] = junk

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(3):
            await client.fetch(descriptor, region).wait()
    finally:
        stop.set()
        thread.join()
    await until_quiet(server)
    assert not (root / ".quarantine").exists()
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == source


class TestProcesses:
    @pytest.fixture
    def process(self, root: Path) -> object:
        with ServerProcess(root) as process:
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

    def test_a_killed_server(self, process: ServerProcess, stored: object) -> None:
        """The fetch ends with an error, and the region is quiet then."""
        region = SharedRegion(stored.payload_size_bytes)  # type: ignore[attr-defined]
        with Client(process.address, plane="shm") as client:
            handle = client.fetch(stored, region)  # type: ignore[arg-type]
            handle.wait_layer(0)
            process.kill()
            try:
                handle.wait()
            except ServerUnavailable:
                assert handle.state is HandleState.ERR
            region.view[:] = b"\xaa" * len(region.view)
            assert region.view == b"\xaa" * len(region.view)

    def test_a_server_that_hangs_holds_the_cancel(
        self, process: ServerProcess, stored: object
    ) -> None:
        region = SharedRegion(stored.payload_size_bytes)  # type: ignore[attr-defined]
        with Client(process.address, plane="shm") as client:
            check_that_a_cancel_is_held(process, client, stored, region)  # type: ignore[arg-type]
