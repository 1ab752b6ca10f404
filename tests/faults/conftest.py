"""Mounts that always go away again, and servers that end before them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvserve.testing.fuse_mount import FaultyMount, why_no_fuse
from kvserve.testing.server_process import ServerProcess
from tests.faults.mounts import Serving, Tmpfs, why_no_tmpfs


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Tmpfs]:
    reason = why_no_tmpfs()
    if reason:
        pytest.skip(reason)
    tree = Tmpfs(tmp_path / "kv")
    yield tree
    tree.unmount()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    """A pass-through mount at `kv` without any cache of the kernel."""
    yield from _mounted(tmp_path, is_direct=True)


@pytest.fixture
def cached_mount(tmp_path: Path) -> Iterator[FaultyMount]:
    """The same with page cache."""
    yield from _mounted(tmp_path, is_direct=False)


def _mounted(tmp_path: Path, *, is_direct: bool) -> Iterator[FaultyMount]:
    reason = why_no_fuse()
    if reason:
        pytest.skip(reason)
    (tmp_path / "backing").mkdir()
    (tmp_path / "kv").mkdir()
    with FaultyMount(tmp_path / "backing", tmp_path / "kv", is_direct=is_direct) as mount:
        yield mount


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Serving]]:
    """`serve(root, "store.io_threads=2")`: a started server and its client; may be called again.

    Asked for before `mount` in a test's arguments or after it, servers end first: a process that
    waits for a hung file system cannot be killed, so what hangs is let go before.
    """
    mounts = [
        request.getfixturevalue(name)
        for name in ("mount", "cached_mount", "tmpfs")
        if name in request.fixturenames
    ]
    servings: list[Serving] = []

    def start(root: Path, *settings: str) -> Serving:
        serving = Serving(ServerProcess(root, settings=settings).start())
        servings.append(serving)
        return serving

    yield start
    for mount in mounts:
        if isinstance(mount, FaultyMount):
            mount.stop()
    for serving in servings:
        serving.end()
