"""A directory that cannot be listed ends no walk, also where the process is out of descriptors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvserve.care.fsck import FsckOptions, fsck_blocking
from kvserve.care.listing import ListedChunk, Unlisted, Wanted, chunks_blocking
from kvserve.care.usage import usage_blocking
from kvserve.errors import KvserveError, Overloaded, StorageUnavailable
from kvserve.fs import Entry, PosixFileSystem
from kvserve.policy.quota import Amount, Pressure
from kvserve.store.evict import EvictionResult
from kvserve.store.owners import Owner
from kvserve.store.sweep import sweep_blocking
from kvserve.testing.stepped_fs import SteppedFileSystem
from tests.care.damaged_tree import good_tree
from tests.contract.eviction_world import EvictingServer
from tests.contract.store_tree import Tree


@pytest.fixture(params=[StorageUnavailable("list: EIO"), Overloaded("list: EMFILE")], ids=str)
def error(request: pytest.FixtureRequest) -> KvserveError:
    found: KvserveError = request.param
    return found


class Refusing(PosixFileSystem):
    """Lists every directory but one."""

    def __init__(self, path: Path, error: KvserveError) -> None:
        super().__init__()
        self.refused, self.error = str(path), error

    def scan(self, path: str) -> Iterator[Entry]:
        if path == self.refused:
            raise self.error
        yield from super().scan(path)


class RefusingEvictor(SteppedFileSystem):
    """The same below an evictor, by whatever verb it lists."""

    refused = ""
    error: KvserveError

    def scan(self, path: str) -> Iterator[Entry]:
        if path == self.refused:
            raise self.error
        yield from super().scan(path)

    def list_dir(self, path: str) -> list[str]:
        if path == self.refused:
            raise self.error
        return super().list_dir(path)


@pytest.fixture
def tree(root: Path) -> Tree:
    return good_tree(root)


def chunks_in(directory: Path) -> int:
    return sum(len(path.name) == 64 for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("place", [lambda path: path.parent, lambda path: path.parents[1]])
def test_the_others_are_looked_at(
    tree: Tree, error: KvserveError, place: Callable[[Path], Path]
) -> None:
    bad = place(tree.file(0))
    fs, root, rest = Refusing(bad, error), str(tree.root), 12 - chunks_in(bad)
    owner = tree_owner(root)
    swept = list(sweep_blocking(fs, root, owner))[-1]
    assert (swept.failed, swept.unlisted) == (1, 1)
    *_, usage = usage_blocking(fs, root)
    assert (usage.chunks().files, usage.unreadable) == (rest, 1)
    listed = list(chunks_blocking(fs, root, Wanted()))
    assert sum(isinstance(it, ListedChunk) for it in listed) == rest
    assert [it.reason for it in listed if isinstance(it, Unlisted)] == [str(error)]
    tally = fsck_blocking(fs, root, FsckOptions()).tally
    assert (tally.counts["ok"], tally.counts["unreadable"]) == (rest + 1, 1)


def tree_owner(root: str) -> Owner:
    owner = Owner(PosixFileSystem(), root, Random(3), lease_s=60.0)
    owner.claim_blocking()
    return owner


def test_eviction_goes_on(root: Path, error: KvserveError) -> None:
    fs = RefusingEvictor()
    server = EvictingServer(root, "aB3", fs=fs, chunks=12)
    server.put()
    fs.refused, fs.error = str(Path(server.where.path(0)).parent), error
    left = {it for it in server.indexes if str(Path(server.where.path(it)).parent) == fs.refused}
    all_of_it = Pressure(None, Amount(1 << 40, 1 << 20))
    result = list(server.tree.evictor.relieve_blocking(all_of_it))[-1]
    assert result.failed == 1
    assert server.there() == left
    expired = EvictionResult()
    server.tree.evictor.expire_blocking(fs.refused, 0.0, expired)
    assert expired.failed == 1
