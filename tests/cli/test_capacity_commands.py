"""`kvserve pin, unpin, release, evict` beside a real server."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.cli.evict import seconds
from kvserve.errors import InvalidRequest
from kvserve.testing.server_process import ServerProcess
from tests.cli.run_here import run_here
from tests.cli.test_commands import descriptor

__all__ = ["descriptor"]  # the fixture

SETTINGS = ("capacity.exchange_interval_s=0.05", "store.known_ttl_s=0")


@pytest.fixture
def server(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess(root, settings=SETTINGS) as server:
        yield server


@pytest.fixture
def at(server: ServerProcess, descriptor: Path, tmp_path: Path) -> tuple[str, str]:
    """The example's chunk is stored."""
    payload = tmp_path / "kv.bin"
    payload.write_bytes(os.urandom(131_072))
    run_here("put", str(descriptor), str(payload), "--server", server.address)
    return ("--server", server.address)


def evict(root: Path, *more: str, code: int = 0) -> dict[str, object]:
    ended = run_here("evict", "--root", str(root), "--json", *more, code=code)
    report: dict[str, object] = json.loads(ended.stdout)
    return report


def test_a_pinned_chunk_is_not_evicted(root: Path, descriptor: Path, at: tuple[str, str]) -> None:
    assert run_here("pin", str(descriptor), *at).stdout == "pin: 1 of 1 chunks\n"
    assert evict(root, "--tenant", "default")["chunks"] == 0
    run_here("unpin", str(descriptor), *at)
    assert evict(root, "--tenant", "default", "--dry-run")["chunks"] == 1
    assert evict(root, "--tenant", "default")["chunks"] == 1
    assert evict(root, "--tenant", "default")["chunks"] == 0
    # The running server knows, also why.
    deadline = time.monotonic() + 10
    while "1 MISS_EVICTED" not in run_here("lookup", str(descriptor), *at).stdout:
        assert time.monotonic() < deadline
    none = run_here("pin", str(descriptor), *at, code=1).stdout
    assert none == "pin: 0 of 1 chunks; the others are not stored\n"
    assert sorted(path.name for path in (root / ".servers").iterdir()) != []


def test_a_leased_chunk_is_not_evicted(root: Path, descriptor: Path, at: tuple[str, str]) -> None:
    lease = ("--lease-owner", "request-1", "--lease-ttl-s", "60")
    found = json.loads(run_here("lookup", str(descriptor), *at, *lease, "--json").stdout)
    assert found["leased_chunks"] == 1
    report = evict(root, "--older-than", "0s")
    assert (report["chunks"], report["held"]) == (0, 1)
    released = run_here("release", "request-1", *at, "--timeout-s", "10", "--json").stdout
    assert json.loads(released) == {"command": "release", "released_chunks": 1}
    assert "0 chunks given free" in run_here("release", "request-1", *at).stdout
    deadline = time.monotonic() + 10
    while evict(root, "--older-than", "0s")["chunks"] != 1:
        assert time.monotonic() < deadline, "the release was told to nobody"


def test_age_and_tenant_choose(root: Path, at: tuple[str, str], server: ServerProcess) -> None:
    server.stop()  # it would stamp the chunk as just used, a few seconds after the store
    assert evict(root, "--older-than", "1d")["chunks"] == 0
    assert evict(root, "--tenant", "other", "--older-than", "0s")["chunks"] == 0
    (chunk,) = root.glob("default/*/*/*/*")
    then = time.time() - 2 * 86_400
    os.utime(chunk, (then, then))
    report = evict(root, "--tenant", "default", "--older-than", "1d")
    assert (report["chunks"], report["size_bytes"]) == (1, 131_072 + 65_536)
    assert not chunk.exists()
    again = run_here("evict", "--root", str(root), "--tenant", "default")
    assert again.stdout == "evicted 0 chunks, 0 bytes\n", "said once"
    assert again.stderr == "", "the moving line is for terminals"


def test_everything_is_not_evicted_by_mistake(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    assert "--tenant or --older-than" in run_here("evict", "--root", str(root), code=1).stderr
    absent = str(tmp_path / "absent")
    assert absent in run_here("evict", "--root", absent, "--tenant", "a", code=1).stderr
    assert "tenant" in run_here("evict", "--root", str(root), "--tenant", "../x", code=1).stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0s", 0), ("90s", 90), ("1.5h", 5400), ("7d", 604_800), ("4w", 2_419_200)],
)
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 d", "1y"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--older-than"):
        seconds(text)
