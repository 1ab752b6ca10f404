"""The bare loops over NIXL: what they land, and that a dead server ends them."""

import os
import signal
from collections.abc import Iterator

import pytest

from kvserve import nixl_agent
from kvserve.bench import nixl_ceiling
from kvserve.bench.child import Child
from kvserve.bench.nixl_ceiling import NixlRead, nixl_ceiling_server
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import Workspace, touched
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations

pytestmark = pytest.mark.skipif(
    not nixl_agent.is_installed(), reason="NIXL is not installed (the extra nixl)"
)
UNIT = WorkUnit(11, 5, 200_000)
"""Five slices a frame: three frames a layer, of which the last is smaller; 15 frames, 4 slots."""


@pytest.fixture
def server() -> Iterator[Child]:
    with nixl_ceiling_server() as server:
        yield server


async def test_files_land_in_their_places_each_time(server: Child) -> None:
    with Workspace(None) as space:
        await space.store_series([(UNIT, 0)])
        files = ChunkLocations(str(space.chunks), UNIT.descriptor(0))
        region = touched(UNIT.size_bytes)
        with NixlRead(server, UNIT, region, files) as case:
            assert (case.name, case.label) == ("nixl_files", "bare nixl, same files")
            for _ in range(3):
                region[:] = bytes(len(region))
                timing = await case.run()
                assert UNIT.first_wrong_layer(region, 0) is None
                assert 0 < timing.first_layer_s <= timing.took_s


async def test_constant_bytes_land_everywhere(server: Child) -> None:
    region = touched(UNIT.size_bytes)
    region[:] = bytes(len(region))
    with NixlRead(server, UNIT, region, None) as case:
        assert (case.name, case.label) == ("nixl_constant", "bare nixl, constant bytes")
        await case.run()
    size = UNIT.slice_size_bytes
    frame = {bytes(region[at : at + size]) for at in range(0, 5 * size, size)}
    assert bytes(size) not in frame
    assert all(bytes(region[at : at + size]) in frame for at in range(0, len(region), size))


async def test_a_server_that_has_died(server: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    with NixlRead(server, UNIT, touched(UNIT.size_bytes), None) as case:
        await case.run()
        monkeypatch.setattr(nixl_ceiling, "_RUN_S_MAX", 0.5)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises((ServerFault, ConnectionError)):
            await case.run()
