"""Mounts that always go away again, and servers that end after them.

In this order: a process that waits for a hung file system cannot be killed, and a mount that ends
lets go of all who wait for it.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kvserve.testing.fuse_mount import FaultyMount, why_no_fuse
from kvserve.testing.server_process import ServerProcess
from tests.faults.mounts import Case, Serving, Tmpfs, why_no_tmpfs

SETTINGS = ("store.durability=power", "store.owner_lease_s=1", "store.known_ttl_s=0")
_TENANTS = count()


@pytest.fixture
def servings() -> Iterator[list[Serving]]:
    """What is put here is ended, after the mounts."""
    servings: list[Serving] = []
    yield servings
    for serving in servings:
        serving.end()


@pytest.fixture
def tmpfs(servings: list[Serving], tmp_path: Path) -> Iterator[Tmpfs]:
    """Not mounted yet: its size is the test's."""
    if reason := why_no_tmpfs():
        pytest.skip(reason)
    tree = Tmpfs(tmp_path / "kv")
    yield tree
    tree.unmount()


@pytest.fixture
def mount(servings: list[Serving], tmp_path: Path) -> Iterator[FaultyMount]:
    """A mount of the test's own, to be killed and mounted again."""
    yield from _mounted(tmp_path)


@pytest.fixture
def serve(servings: list[Serving]) -> Callable[..., Serving]:
    """`serve(root, "store.io_threads=2")`: a started server and its client."""

    def start(root: Path, *settings: str) -> Serving:
        serving = Serving(ServerProcess(root, settings=SETTINGS + settings).start())
        servings.append(serving)
        return serving

    return start


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultyMount, Serving]]:
    """A mount and a server on it for all tests of a module: each start costs a second."""
    for mount in _mounted(tmp_path_factory.mktemp("shared")):
        serving = Serving(ServerProcess(mount.path, settings=SETTINGS).start())
        yield mount, serving
        mount.unmount()
        serving.end()


@pytest.fixture
def case(shared: tuple[FaultyMount, Serving]) -> Iterator[Case]:
    """A tenant of the test's own on the shared mount, and no faults before and after."""
    mount, serving = shared
    yield Case(mount, serving, f"tenant{next(_TENANTS)}")
    mount.heal()


@pytest.fixture
def cached_mount(servings: list[Serving], tmp_path: Path) -> Iterator[FaultyMount]:
    """The same with the kernel's page cache, as parallel file systems have it."""
    yield from _mounted(tmp_path, is_direct=False)


def _mounted(directory: Path, *, is_direct: bool = True) -> Iterator[FaultyMount]:
    # The first also finds a root who may not mount, as in many containers.
    if reason := why_no_tmpfs() or why_no_fuse():
        pytest.skip(reason)
    backing, path = directory / "backing", directory / "kv"
    backing.mkdir()
    path.mkdir()
    with FaultyMount(backing, path, is_direct=is_direct) as mount:
        yield mount
