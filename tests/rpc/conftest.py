"""Every test of this directory that takes `client` or `plane` runs once for each plane."""

from collections.abc import AsyncIterator

import pytest

from kvclient import AsyncClient
from kvclient.channel import Channel, Rpcs
from kvserve.rpc.server import Server


@pytest.fixture(params=["grpc", "tcp"])
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def client(server: Server, plane: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout_s=20, plane=plane) as client:
        yield client


@pytest.fixture
async def rpcs(server: Server) -> AsyncIterator[Rpcs]:
    channel = Channel(server.address, 2.0)
    yield await channel.connected("Fetch")
    await channel.close()
