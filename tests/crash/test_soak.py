"""Many mixed operations, 30 % cut off (T9): what they took is given back, whatever became of them.

1,500 operations here; `KVSERVE_SOAK_OPERATIONS=50000` is the long run of docs/reliability.md.
"""

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median

import pytest

from kvclient import AsyncClient, Overloaded
from kvclient.handle import Handle
from kvserve.testing.metrics_page import MetricsPage
from kvserve.testing.server_process import ServerProcess
from tests.crash.dropping_proxy import DroppingProxy
from tests.crash.soak import CUT_SHARE, Soak, open_transfers, until

OPERATIONS = int(os.environ.get("KVSERVE_SOAK_OPERATIONS", "1500"))
IS_LONG = OPERATIONS >= 20_000
WORKERS, TRANSFERS_MAX = 8, 32
# Half of the prefixes' chunks, of 16 KiB each: every other store makes eviction start.
SETTINGS = (
    f"capacity.size_bytes_max={240 * 16384}",
    "capacity.exchange_interval_s=0.05",
    "store.sweep_interval_s=1",
    "server.log_level=warning",
    f"limits.transfers_max={TRANSFERS_MAX}",
)
SHORT_GROWTH_BYTES_MAX = 24 << 20
"""For the short run: it ends before the pools of the libraries are full."""


class Watched:
    """A server process from outside: its files, its memory, its metrics, its tree."""

    def __init__(self, process: ServerProcess, page: MetricsPage) -> None:
        self.process = process
        self._page = page
        self._root = str(process.root)

    def files(self) -> tuple[int, Counter[str]]:
        """Open chunk files (deleted ones too), and all other descriptors by kind."""
        chunks, others = 0, Counter[str]()
        directory = Path(f"/proc/{self.process.pid}/fd")
        for link in os.listdir(directory):
            try:
                target = os.readlink(directory / link)
            except FileNotFoundError:
                continue
            inside = target.removeprefix(f"{self._root}/")
            if inside == target:
                others[target.partition(":[")[0]] += 1
            elif not inside.startswith("."):  # else a journal of the server itself
                chunks += 1
        return chunks, others

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.pid)

    async def value(self, name: str) -> float:
        return await asyncio.to_thread(self._page.value_blocking, f"kvserve_{name}")

    def chunk_files(self) -> list[Path]:
        return [path for path in Path(self._root).rglob("*") if len(path.name) == 64]

    def temp_files(self) -> list[Path]:
        found = Path(self._root).rglob(".*")
        return [path for path in found if path.is_file() and len(path.name) > 64]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def drop_now_and_then(proxy: DroppingProxy, random: Random) -> None:
    while CUT_SHARE:
        await asyncio.sleep(random.uniform(0.1, 0.6))
        proxy.drop()


def watch_memory(watched: Watched, soak: Soak, resident: list[int]) -> Callable[[int], None]:
    """A callback that takes 50 samples on the way, and says so in a long run."""
    every = max(1, OPERATIONS // 50)
    started = time.monotonic()

    def progress(done: int) -> None:
        if done % every == 0:
            resident.append(watched.resident_bytes())
            if IS_LONG:
                own = resident_bytes(os.getpid())
                print(
                    f"{done} operations, {time.monotonic() - started:.0f} s: server "
                    f"{resident[-1] / 2**20:.1f} MiB, client {own / 2**20:.1f} MiB, "
                    f"{soak.compared_bytes / 2**20:.0f} MiB compared",
                    flush=True,
                )

    return progress


def check_memory(resident: list[int]) -> None:
    """From the end of the warm-up, 20 % of the operations, to the end; medians of five samples."""
    warm, end = median(resident[10:15]), median(resident[-5:])
    growth = end / warm - 1
    print(f"server: {warm / 2**20:.1f} MiB warm, {end / 2**20:.1f} at the end, {growth:+.1%}")
    if IS_LONG:
        assert growth < 0.05
    assert end - warm < SHORT_GROWTH_BYTES_MAX


async def check_baseline(
    watched: Watched, client: AsyncClient, soak: Soak, others: Counter[str]
) -> None:
    """Nothing is open, leased, half-written or in use any more."""
    for descriptor in soak.prefixes:
        await client.unpin(descriptor)
        await client.delete(descriptor)  # closes the idle files of the chunks, too

    async def is_back() -> bool:
        return (
            watched.files() == (0, others)
            and not await watched.value("open_files")
            and not await watched.value("leased_chunks")
            and not await watched.value("stored_chunks")
        )

    try:
        await until(is_back)
    except TimeoutError:
        names = ("open_files", "leased_chunks", "stored_chunks", "stored_bytes")
        left = {name: await watched.value(name) for name in names}
        pytest.fail(f"descriptors {watched.files()}, at the start (0, {others}); {left}")
    assert watched.chunk_files() == []
    assert watched.temp_files() == []
    await open_transfers(client, TRANSFERS_MAX)
    with pytest.raises(Overloaded):
        await open_transfers(client, TRANSFERS_MAX + 1)


@pytest.fixture
def watched(root: Path) -> Iterator[Watched]:
    page = MetricsPage()
    with ServerProcess(root, settings=(*SETTINGS, page.setting)) as process:
        yield Watched(process, page)


@pytest.mark.timeout(60 + OPERATIONS // 10)
async def test_soak(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled() if IS_LONG else nullcontext():
        await soak_and_check(watched)


async def soak_and_check(watched: Watched) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    process = watched.process
    async with AsyncClient(process.address, timeout_s=20) as client:
        await client.server_info()
        await watched.value("open_files")
        _, others = watched.files()
        async with DroppingProxy(process.address) as proxy:
            clients = [AsyncClient(process.address, timeout_s=20) for _ in range(3)]
            flaky = AsyncClient(proxy.address, timeout_s=20)
            soak = Soak(clients, flaky, operations=OPERATIONS, seed=seed)
            dropping = asyncio.create_task(drop_now_and_then(proxy, Random(seed)))
            resident: list[int] = []
            await soak.run(WORKERS, watch_memory(watched, soak, resident))
            dropping.cancel()
            for other in (*clients, flaky):
                await other.close()
        print(f"{dict(sorted(soak.ends.items()))}, {proxy.dropped} connections dropped")
        evicted = await watched.value("evicted_chunks")
        print(f"{evicted:.0f} chunks evicted, {soak.compared_bytes} bytes compared")
        assert evicted > 0
        assert soak.compared_bytes > 0
        assert proxy.dropped > 0 or not CUT_SHARE
        check_memory(resident)
        # Ended handles and their errors refer to one another; a channel lives as long as its calls.
        gc.collect()
        assert [it for it in gc.get_objects() if isinstance(it, Handle)] == []
        await check_baseline(watched, client, soak, others)
        log = await asyncio.to_thread(process.log)
        assert "Traceback" not in log, log
        started = time.monotonic()
        assert await asyncio.to_thread(process.stop) == 0
        assert time.monotonic() - started < 5, "something that was cut off is still being drained"
