"""A step of the upkeep that hangs fails its round only, and nothing runs beside it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvserve.errors import StorageUnavailable
from kvserve.metrics import Metrics
from kvserve.open_tree import OpenTree
from kvserve.testing.faulty_fs import FaultyFileSystem
from kvserve.upkeep import Upkeep, _Line, sweep_interval
from tests.trees import tree_on

TIMEOUT_S = 0.2


@pytest.fixture
def fs() -> Iterator[FaultyFileSystem]:
    fs = FaultyFileSystem()
    yield fs
    fs.heal()


@pytest.fixture
def tree(fs: FaultyFileSystem, tmp_path: Path) -> OpenTree:
    (tmp_path / "kv").mkdir()
    tree = tree_on(tmp_path / "kv", fs, store={"owner_lease_s": 1.0})
    tree.owner.lease_s = 0.3
    tree.owner.claim_blocking()
    return tree


@pytest.fixture
async def upkeep(tree: OpenTree, fs: FaultyFileSystem) -> AsyncIterator[Upkeep]:
    upkeep = Upkeep(
        tree,
        Metrics(tree),
        sweep_interval_s=0.05,
        exchange_interval_s=0.05,
        ttl_s=0.0,
        timeout_s=TIMEOUT_S,
    )
    yield upkeep
    fs.heal()
    await upkeep.stop()


async def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.01)


async def test_a_sweep_that_hangs_holds_up_no_beat_and_is_followed_by_another(
    upkeep: Upkeep, tree: OpenTree, fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    def beats() -> int:
        return fs.attempts("create", f".servers/{tree.owner.tag}")

    def sweeps() -> int:
        return fs.attempts("scan", tenant)

    tenant = f"{tree.store.root}/tenant"
    await asyncio.to_thread(fs.make_dirs, tenant)
    fs.hang(tenant, ["scan"])
    upkeep.start()
    await until(lambda: "upkeep: a file call did not end within" in caplog.text)
    shown = beats()
    await until(lambda: beats() > shown + 1)
    await until(lambda: "sweeping: the last step still hangs" in caplog.text)
    assert sweeps() == 1, "nothing beside the one that hangs"
    fs.heal()
    await until(lambda: sweeps() > 1)
    assert "already executing" not in caplog.text
    assert "had ended" not in caplog.text


async def test_a_count_removes_what_a_killed_server_was_writing(
    upkeep: Upkeep, tree: OpenTree
) -> None:
    left = Path(tree.store.root) / ".usage" / "base.zZ9"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half")
    upkeep.start()
    await until(lambda: not left.exists())


def test_a_line_lets_one_step_in_at_a_time() -> None:
    line, inside, go_on = _Line("testing"), threading.Event(), threading.Event()

    def step() -> None:
        inside.set()
        assert go_on.wait(10)

    thread = threading.Thread(target=line.run_blocking, args=(1.0, step))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(StorageUnavailable, match="testing: the last step still hangs"):
        line.run_blocking(0.01, step)
    go_on.set()
    thread.join(10)
    assert line.run_blocking(0.01, lambda: 7) == 7


@pytest.mark.parametrize(
    ("interval_s", "ttl_s", "expected"),
    [(3600, 0, 3600), (3600, 400, 100), (3600, 2, 1), (5, 400, 5)],
)
def test_how_often_the_tree_is_walked(interval_s: float, ttl_s: float, expected: float) -> None:
    assert sweep_interval(interval_s, ttl_s) == expected
