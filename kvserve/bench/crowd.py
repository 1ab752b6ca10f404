"""Many clients in one process, a child of `concurrency.py`.

Each client has a connection and a region of its own and fetches one series again and again, from
`start` to `stop`; `measure` says what landed for each of them in so many seconds. Clients of
kvserve share one event loop, bare loops have a thread each.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from kvclient import AsyncClient, SharedRegion
from kvserve.bench.child import Child, answer_questions, run_child
from kvserve.bench.load import Landed, fetch_for_ever
from kvserve.bench.tcp_ceiling import opening_for
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault
from kvserve.store.locations import ChunkLocations

BARE = "bare"
"""In place of a plane: the loop of `tcp_ceiling_server`."""


@dataclass(frozen=True, slots=True)
class Start:
    """What the clients do: one for each of `series`."""

    address: str
    plane: str
    series: Sequence[int]

    def question(self) -> str:
        return json.dumps({"start": asdict(self)})


def measure(seconds: float) -> str:
    """The question whose answer has `took_s` and `landed_bytes`, by client."""
    return json.dumps({"measure": seconds})


STOP = json.dumps({"stop": True})


def crowd_process(unit: WorkUnit, tree: Path, clients_max: int) -> Child:
    """The process, not started; `tree` is where a bare loop finds the files."""
    numbers = (unit.chunk_count, unit.layer_count, unit.slice_size_bytes, clients_max)
    return Child("kvserve.bench.crowd", str(tree), *map(str, numbers))


class Crowd:
    """Regions are made once: a page costs most when it is touched first."""

    def __init__(self, unit: WorkUnit, tree: str, clients_max: int) -> None:
        self._unit = unit
        self._tree = tree
        self._regions = [SharedRegion(unit.size_bytes) for _ in range(clients_max)]
        self._threads = ThreadPoolExecutor(clients_max)
        self._clients = AsyncExitStack()
        self._landed: list[Landed] = []
        self._loops: list[asyncio.Future[None]] = []
        self._sockets: list[socket.socket] = []
        self._stopping = threading.Event()

    async def answer(self, question: str) -> dict[str, Any]:
        asked = json.loads(question)
        if "start" in asked:
            await self._start(Start(**asked["start"]))
            return {}
        if "measure" in asked:
            return await self._measure(asked["measure"])
        await self._stop()
        return {}

    async def _start(self, start: Start) -> None:
        """Returns once each client has fetched its series once."""
        self._stopping.clear()
        self._landed = [Landed() for _ in start.series]
        once = [asyncio.Event() for _ in start.series]
        for place, series in enumerate(start.series):
            begin = self._start_bare if start.plane == BARE else self._start_client
            await begin(start, place, series, once[place])
        waiting = asyncio.gather(*(ended_once.wait() for ended_once in once))
        ends: list[asyncio.Future[Any]] = [waiting, *self._loops]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._check_loops()
        await waiting

    async def _start_client(
        self, start: Start, place: int, series: int, once: asyncio.Event
    ) -> None:
        client = await self._clients.enter_async_context(
            AsyncClient(start.address, timeout_s=600.0, plane=start.plane)
        )
        work = fetch_for_ever(
            client,
            self._unit,
            series,
            region=self._regions[place],
            landed=self._landed[place],
            once=once,
        )
        self._loops.append(asyncio.get_running_loop().create_task(work))

    async def _start_bare(self, start: Start, place: int, series: int, once: asyncio.Event) -> None:
        host, _, port = start.address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        self._sockets.append(connection)
        files = ChunkLocations(self._tree, self._unit.descriptor(series))
        loop = asyncio.get_running_loop()

        def read_for_ever_blocking() -> None:
            region, opening = self._regions[place].view, opening_for(self._unit, files).encode()
            try:
                while _read_blocking(connection, opening, region, self._landed[place]):
                    loop.call_soon_threadsafe(once.set)
            except ConnectionError:
                if not self._stopping.is_set():
                    raise

        ended: Future[None] = self._threads.submit(read_for_ever_blocking)
        self._loops.append(asyncio.wrap_future(ended))

    async def _measure(self, seconds: float) -> dict[str, Any]:
        before, started = [it.payload_bytes for it in self._landed], perf_counter()
        await asyncio.sleep(seconds)
        took_s = perf_counter() - started
        after = [it.payload_bytes for it in self._landed]
        self._check_loops()
        landed = [late - early for early, late in zip(before, after, strict=True)]
        return {"took_s": took_s, "landed_bytes": landed}

    async def _stop(self) -> None:
        self._stopping.set()
        for connection in self._sockets:
            connection.shutdown(socket.SHUT_RDWR)
        for loop in self._loops:
            if not self._sockets:
                loop.cancel()
        await asyncio.wait(self._loops)
        for loop in self._loops:
            if not loop.cancelled():
                loop.result()
        for connection in self._sockets:
            connection.close()
        await self._clients.aclose()
        self._loops, self._sockets, self._clients = [], [], AsyncExitStack()

    def _check_loops(self) -> None:
        for loop in self._loops:
            if loop.done():
                loop.result()
                raise ServerFault("a bare server has ended")


def _read_blocking(
    connection: socket.socket, opening: bytes, region: memoryview, landed: Landed
) -> bool:
    """One payload; whether it is whole."""
    connection.sendall(opening)
    left = region
    while left:
        got = connection.recv_into(left)
        if not got:
            return False
        landed.payload_bytes += got
        left = left[got:]
    landed.fetches += 1
    return True


async def _run(unit: WorkUnit, tree: str, clients_max: int) -> None:
    await answer_questions({}, Crowd(unit, tree, clients_max).answer)


if __name__ == "__main__":
    chunk_count, layer_count, slice_bytes, count_max = map(int, sys.argv[2:])
    run_child(_run(WorkUnit(chunk_count, layer_count, slice_bytes), sys.argv[1], count_max))
