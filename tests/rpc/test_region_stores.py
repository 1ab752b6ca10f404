"""Stores whose payload the server takes out of the region itself: over shm, and over nixl."""

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvclient import AsyncClient, Descriptor, InvalidRequest
from kvserve import nixl_agent
from kvserve.rpc.server import Server
from kvserve.transfer.planes import nixl_store, shm
from tests.payload import memory, payload_for, small_descriptor, store_all
from tests.rpc.test_planes import large, until_quiet
from tests.rpc.test_shm_plane import NEW, SIZE_BYTES


@pytest.fixture(params=["shm", "nixl"])
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed (the extra nixl)")
    return name


@pytest.fixture
async def server(start_server: Callable[..., Awaitable[Server]], plane: str) -> Server:
    return await start_server(server={"nixl": plane == "nixl"})


async def test_a_layer_s_memory_is_the_caller_s_again_when_its_call_returns(
    client: AsyncClient, plane: str
) -> None:
    descriptor = large()
    source = payload_for(descriptor)
    region = memory(plane, source)
    layer_bytes = descriptor.layout.slice_sizes[0] * descriptor.chunk_count
    handle = client.store(descriptor, region)
    for layer_index in descriptor.layer_order:
        await handle.store_layer(layer_index)
        at = descriptor.payload_offsets[layer_index]
        region.view[at : at + layer_bytes] = b"\xee" * layer_bytes
    assert (await handle.finish()).is_whole
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == source


async def test_a_frame_is_copied_before_it_is_answered(
    client: AsyncClient, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = payload_for(NEW)
    region = memory(plane, source)
    layer_bytes = SIZE_BYTES // 4
    answers = 0
    of_plane: ModuleType = {"shm": shm, "nixl": nixl_store}[plane]
    real = of_plane.encode_taken

    def answered() -> bytes:
        nonlocal answers
        at = NEW.payload_offsets[answers]  # each layer is one frame
        region.view[at : at + layer_bytes] = b"\xee" * layer_bytes
        answers += 1
        return real()

    monkeypatch.setattr(of_plane, "encode_taken", answered)
    await store_all(client, NEW, region)
    assert answers == 4
    assert (await client.fetch(NEW, region).wait()).is_whole
    assert region.view == source


async def test_only_what_is_needed_is_read(client: AsyncClient, plane: str) -> None:
    """The chunks that are known have their places in the memory all the same."""
    descriptor = small_descriptor(layers=3, chunks=6)
    source = payload_for(descriptor)
    await store_all(client, descriptor, source)
    holes = [1, 2, 4]
    assert await client.delete(_only(descriptor, holes))
    region = memory(plane, source)
    size = descriptor.layout.slice_sizes[0]
    for layer_index in range(3):
        for chunk in set(range(6)) - set(holes):
            at = descriptor.payload_offsets[layer_index] + chunk * size
            region.view[at : at + size] = b"\xee" * size
    handle = client.store(descriptor, region)
    assert await handle.needed() == holes
    for layer_index in (2, 0, 1):
        await handle.store_layer(layer_index)
    assert (await handle.finish()).is_whole
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == source


def _only(descriptor: Descriptor, chunks: list[int]) -> Descriptor:
    return Descriptor(descriptor.identity, [descriptor.chunk_hashes[chunk] for chunk in chunks])


async def test_a_wild_pointer_publishes_nothing_wrong(
    client: AsyncClient, server: Server, root: Path, plane: str
) -> None:
    """What changes while it is stored fails its checksum: before it is written, not when read."""
    descriptor = large()
    region = memory(plane, descriptor.payload_size_bytes)
    stop = threading.Event()

    def scribble() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            region.view[:] = bytes([turn % 251]) * region.size_bytes

    thread = threading.Thread(target=scribble)
    thread.start()
    refused = 0
    try:
        for _ in range(5):
            try:
                await store_all(client, descriptor, region)
            except InvalidRequest as error:
                assert "does not match its checksum" in str(error)  # noqa: PT017
                refused += 1
            else:
                await client.delete(descriptor)
    finally:
        stop.set()
        thread.join()
    assert refused
    await until_quiet(server)
    assert not any((await client.lookup(descriptor)).hits)
    assert [path for path in root.rglob(".*") if path.is_file()] == []
    source = payload_for(descriptor)
    region.view[:] = source
    await store_all(client, descriptor, region)
    assert (await client.fetch(descriptor, region).wait()).is_whole
    assert region.view == source
