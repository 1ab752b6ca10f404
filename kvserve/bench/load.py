"""Background load: fetches that run again and again, in a process of their own.

`python -m kvserve.bench.load ADDRESS CHUNKS LAYERS SLICE_BYTES FIRST_SERIES COUNT` keeps COUNT
fetches of one series each open until its standard input closes. It says hello when each has ended
once; the answer to every line is what has landed so far.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvclient import AsyncClient, Region
from kvserve.bench.child import Child, answer_parent, run_child
from kvserve.bench.unit import WorkUnit
from kvserve.bench.workspace import touched
from kvserve.errors import ServerFault


@dataclass
class Landed:
    """Bytes of layers that are whole in the region, and fetches that have ended."""

    payload_bytes: int = 0
    fetches: int = 0


def load_process(address: str, unit: WorkUnit, series: Sequence[int]) -> Child:
    """The process, not started; `series` are consecutive."""
    numbers = (unit.chunk_count, unit.layer_count, unit.slice_size_bytes, series[0], len(series))
    return Child("kvserve.bench.load", address, *map(str, numbers))


async def fetch_for_ever(
    client: AsyncClient,
    unit: WorkUnit,
    series: int,
    *,
    region: memoryview | Region,
    landed: Landed,
    once: asyncio.Event,
) -> None:
    """Counts what lands as it lands; `once` is set when the first fetch has ended."""
    descriptor = unit.descriptor(series)
    while True:
        async with client.fetch(descriptor, region) as handle:
            async for _ in handle.layers():
                landed.payload_bytes += unit.layer_size_bytes
            result = await handle.wait()
        if not result.is_whole:
            raise ServerFault(f"series {series} was not fetched whole")
        landed.fetches += 1
        once.set()


async def _run(address: str, unit: WorkUnit, series: Sequence[int]) -> None:
    landed = Landed()
    once = [asyncio.Event() for _ in series]
    async with AsyncClient(address, timeout_s=600.0) as client, asyncio.TaskGroup() as group:
        loops = [
            group.create_task(
                fetch_for_ever(
                    client,
                    unit,
                    number,
                    region=touched(unit.size_bytes),
                    landed=landed,
                    once=ended_once,
                )
            )
            for number, ended_once in zip(series, once, strict=True)
        ]
        for ended_once in once:
            await ended_once.wait()
        await answer_parent(
            {"fetches_at_once": len(series)},
            lambda: {"payload_bytes": landed.payload_bytes, "fetches": landed.fetches},
        )
        for task in loops:
            task.cancel()


if __name__ == "__main__":
    chunks, layers, slice_bytes, first, count = map(int, sys.argv[2:])
    work_unit = WorkUnit(chunks, layers, slice_bytes)
    run_child(_run(sys.argv[1], work_unit, range(first, first + count)))
