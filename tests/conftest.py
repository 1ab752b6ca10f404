"""Fixtures that every test may use, and two guards: uvloop as the loop, no blocking call on it."""

import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from blockbuster import BlockBusterFunction, blockbuster_ctx

from kvclient import AsyncClient
from kvserve.config import load_config
from kvserve.fs import FileSystem
from kvserve.rpc.server import Server
from tests.certificates import Certificates

# The defaults of blockbuster leave these out; each can wait for a disk.
_FILE_CALLS = ("open", "pread", "preadv", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate")


def pytest_asyncio_loop_factories(config: object, item: object) -> dict[str, Callable[..., object]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: collections in tests then cost milliseconds, with torch too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A file call by kvserve or kvclient on the event loop fails the test.

    Exceptions: the read that the kernel promises not to wait for (RWF_NOWAIT), and a memory file's
    size.
    """
    with blockbuster_ctx(["kvserve", "kvclient"]) as guard:
        for name in _FILE_CALLS:
            function = BlockBusterFunction(
                os,
                name,
                scanned_modules=["kvserve", "kvclient"],
                can_block_functions=[
                    ("kvserve/fs/posix.py", {"read_cached"}),
                    ("kvclient/shared_region.py", {"__init__"}),
                ],
            )
            guard.functions[f"os.{name}"] = function
            function.activate()
        # gRPC joins its own thread when the last channel closes, and short locks are no blocking.
        for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            guard.functions[name].deactivate()
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def start_server(root: Path) -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """`await start_server(limits={"transfers_max": 1})`: a real server on this loop."""
    servers: list[Server] = []

    async def start(file_system: FileSystem | None = None, **sections: dict[str, object]) -> Server:
        settings = {
            "server": {"listen": "127.0.0.1:0", "drain_timeout_s": 1, **sections.get("server", {})},
            "store": {"root": str(root), **sections.get("store", {})},
            "limits": sections.get("limits", {}),
            "capacity": sections.get("capacity", {}),
            "tenants": sections.get("tenants", {}),
        }
        server = Server(load_config(None, settings), file_system)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(start_server: Callable[..., Awaitable[Server]]) -> Server:
    return await start_server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout_s=20) as client:
        yield client
