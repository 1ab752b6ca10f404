"""T6 on a hung mount: memory that a request gave up is written by nobody else's transfer, nor is
the client's region once the fetch has ended, whenever the file call comes back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from kvclient import AsyncClient, ChunkStatus, SharedRegion
from kvserve.rpc.server import Server
from kvserve.testing.faulty_fs import FaultyFileSystem
from tests.payload import payload_for, small_descriptor, store_all

TIMEOUT_S = 0.4
HIT, TIMEOUT = ChunkStatus.HIT, ChunkStatus.MISS_TIMEOUT
SLOW = small_descriptor(chunks=1)
OTHER = small_descriptor(chunks=4, first_token=5000)


@dataclass
class Hung:
    """A server on a file system that can hang, and what is stored on it."""

    fs: FaultyFileSystem
    server: Server

    def hang(self, verb: str) -> None:
        self.fs.hang(SLOW.chunk_hashes[0].hex(), [verb])

    async def release(self) -> None:
        """Returns when every thread has come back."""
        assert self.server._threads.hung > 0
        self.fs.heal()
        deadline = time.monotonic() + 10
        while self.server._threads.hung:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@pytest.fixture
def fs() -> Iterator[FaultyFileSystem]:
    fs = FaultyFileSystem()
    yield fs
    fs.heal()


@pytest.fixture
async def hung(
    fs: FaultyFileSystem, start_server: Callable[..., Awaitable[Server]]
) -> AsyncIterator[Hung]:
    store = {"io_timeout_s": TIMEOUT_S, "io_threads": 4, "known_ttl_s": 0}
    healthy = await start_server()
    async with AsyncClient(healthy.address, timeout_s=20) as client:
        await store_all(client, OTHER, payload_for(OTHER))
        await store_all(client, SLOW, payload_for(SLOW))
    yield Hung(fs, await start_server(fs, store=store))
    fs.heal()


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm"])
async def test_a_read_that_comes_back_late_writes_into_nobody_s_memory(
    hung: Hung, plane: str
) -> None:
    async with AsyncClient(hung.server.address, timeout_s=20, plane=plane) as client:
        with SharedRegion(SLOW.payload_size_bytes) as region:
            # The file is open: what hangs is the read of a slice.
            assert (await client.fetch(SLOW, region).wait()).is_whole
            hung.hang("read_into")
            began = time.monotonic()
            result = await client.fetch(SLOW, region).wait()
            assert time.monotonic() - began < 2 * TIMEOUT_S + 1
            assert [it.status for it in result.verdicts] == [TIMEOUT]
            region.view[:] = b"\xaa" * SLOW.payload_size_bytes
            assert hung.server.data_port is not None
            buffers = hung.server.data_port.buffers
            kept = [
                buffers.take(size) for size, of_it in buffers._kept.items() for _ in list(of_it)
            ]
            for buffer in kept:
                buffer[:] = b"\xaa" * len(buffer)
            await hung.release()
            assert bytes(region.view) == b"\xaa" * SLOW.payload_size_bytes
            assert all(bytes(it) == b"\xaa" * len(it) for it in kept)
            for buffer in kept:
                buffers.give(buffer)
        with SharedRegion(OTHER.payload_size_bytes) as other:
            result = await client.fetch(OTHER, other).wait()
            assert [it.status for it in result.verdicts] == [HIT] * OTHER.chunk_count
            assert bytes(other.view) == bytes(payload_for(OTHER))


async def test_a_frame_whose_write_hangs_is_not_used_again(hung: Hung) -> None:
    async with AsyncClient(hung.server.address, timeout_s=20, plane="tcp") as client:
        await client.delete(SLOW)
        assert hung.server.data_port is not None
        buffers = hung.server.data_port.buffers
        taken: list[memoryview] = []
        given: list[memoryview] = []
        take, give = buffers.take, buffers.give

        def counted_take(payload_size_bytes: int) -> memoryview:
            taken.append(take(payload_size_bytes))
            return taken[-1]

        def counted_give(buffer: memoryview) -> None:
            given.append(buffer)
            give(buffer)

        buffers.take, buffers.give = counted_take, counted_give  # type: ignore[method-assign]
        hung.hang("write_all")
        handle = client.store(SLOW, payload_for(SLOW))
        for layer in range(SLOW.layout.layer_count):
            await handle.store_layer(layer)
        result = await handle.finish()
        assert [it.status for it in result.verdicts] == [ChunkStatus.STORE_ERROR]
        assert hung.server._threads.hung == len(taken) - len(given)
        await hung.release()
        assert len(given) < len(taken)
