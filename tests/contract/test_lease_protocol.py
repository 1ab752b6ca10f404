"""No chunk is both leased and gone, however the calls of those who lease and evict interleave.

A chunk that was answered as the hit of a lease is on the tree for as long as the lease lasts. Two
servers, or two threads of one, are run call by call (`kvserve.testing.stepped_fs`): in every order
with two turns for each side, and in many random orders of more of them.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from kvserve.errors import StorageError
from kvserve.model import Verdict
from kvserve.store import journal
from kvserve.store.journal import RecordKind, read_all_blocking
from kvserve.testing.stepped_fs import Actor
from tests.contract.eviction_world import EvictingServer

Step = Callable[[], None]


def told(by: EvictingServer) -> dict[int, RecordKind]:
    """What a server's journal says of each chunk at last."""
    path = f"{by.tree.store.root}/.evicted/{by.tree.owner.tag}"
    keys = {by.where.known_key(index): index for index in by.indexes}
    return {keys[it.key]: it.kind for it in read_all_blocking(by.fs, path)}


def check_told(evicting: EvictingServer) -> None:
    """Every pick has an end, and what was told to be gone is."""
    ends = told(evicting)
    assert RecordKind.LEAVING not in ends.values()
    gone = {index for index, kind in ends.items() if kind is RecordKind.GONE}
    assert gone.isdisjoint(evicting.there()), f"told to be gone, but there: {gone}"


class Encounter:
    """A server that leases three chunks and one that evicts them, each ready to be stepped."""

    def __init__(self, root: Path, *, is_one_server: bool, are_files_there: bool) -> None:
        self.leasing = EvictingServer(root, "aB3")
        self.evicting = self.leasing if is_one_server else EvictingServer(root, "bC4")
        self.leasing.put()
        if are_files_there:
            self.leasing.lease("earlier", among=[0])
            self.evicting.evict()
            self.leasing.put(1, 2)
            self.leasing.release("earlier")
            self.leasing.tree.exchange.tell_blocking()
        self.hits: set[int] = set()
        self.candidates = self.evicting.candidates()

    def lease(self) -> None:
        self.hits = self.leasing.lease()

    def evict(self) -> None:
        self.evicting.evict(self.candidates)

    def check(self) -> None:
        there = self.leasing.there()
        assert self.hits <= there, f"leased {self.hits}, there are {there}"
        check_told(self.evicting)
        self.leasing.tree.exchange.read_departures_blocking()
        assert self.leasing.picked() == set()
        self.leasing.close()
        self.evicting.close()


@pytest.fixture(params=["new files", "appended to", "anew with each record"])
def are_files_there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The journals of both sides."""
    if request.param == "anew with each record":
        monkeypatch.setattr(journal, "_SIZE_BYTES_MAX", 1)
    return str(request.param) != "new files"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_one_server", [False, True], ids=["two servers", "one server"])
@pytest.mark.parametrize("first", ["lease", "evict"])
def test_every_order_of_two_turns_each(
    tmp_path: Path, are_files_there: bool, is_one_server: bool, first: str
) -> None:
    """One side does n calls, the other m, the first all the rest, then the other."""
    second = "evict" if first == "lease" else "lease"
    outcomes: set[tuple[int, int]] = set()
    first_calls = second_calls = 0
    while True:
        root = tmp_path / f"{first_calls}-{second_calls}"
        met = Encounter(root, is_one_server=is_one_server, are_files_there=are_files_there)
        with (
            Actor(met.leasing.fs, met.lease) as lease,
            Actor(met.evicting.fs, met.evict) as evict,
        ):
            actors = {"lease": lease, "evict": evict}
            done_first = actors[first].run(first_calls)
            done_second = actors[second].run(second_calls)
            actors[first].run()
            actors[second].run()
        met.check()
        outcomes.add((len(met.hits), len(met.leasing.there())))
        if done_second == second_calls:
            second_calls += 1
        elif done_first == first_calls:
            first_calls, second_calls = first_calls + 1, 0
        else:
            break
    assert first_calls >= 6, "the sweep covers the whole of it"
    assert {(3, 3), (0, 0)} <= outcomes, "each side wins where it comes first"


class Crowd:
    """Two servers that lease, two that evict (a steward and a tool), one chunk being read by the
    tool, one that is stored anew; `promised` is checked between any two calls."""

    def __init__(self, root: Path, random: Random) -> None:
        self.random = random
        self.one, self.other, self.steward, self.tool = self.servers = [
            EvictingServer(root, tag) for tag in ("aB3", "bC4", "cD5", "dE6")
        ]
        self.one.put()
        self.promised: dict[tuple[str, str], set[int]] = {}
        found = self.tool.tree.store.open_blocking(self.tool.where, 0)
        assert not isinstance(found, Verdict)
        self.read_by_tool = found

    def lease(self, by: EvictingServer, request: str) -> None:
        indexes = [it for it in by.indexes if self.random.random() < 0.7]
        owner = (by.tree.owner.tag, request)
        # Of the shard only this is held from now on.
        before = self.promised.pop(owner, set())
        try:
            self.promised[owner] = by.lease(request, among=indexes)
        except StorageError:
            self.promised[owner] = before

    def leasing(self, by: EvictingServer) -> None:
        for letter in self.random.choices("rst", k=4):
            # Of its own: a release anywhere is one everywhere.
            request = f"{letter} at {by.tree.owner.tag}"
            if self.random.random() < 0.3:
                self.promised.pop((by.tree.owner.tag, request), None)
                by.release(request)
            else:
                self.lease(by, request)
            with suppress(StorageError):
                by.tree.exchange.tell_blocking()

    def evicting(self, by: EvictingServer) -> None:
        for _ in range(2):
            with suppress(StorageError):
                by.evict()

    def storing(self) -> None:
        with suppress(StorageError):
            self.other.put(2)

    def check(self) -> None:
        there = self.one.there()
        for owner, hits in self.promised.items():
            assert hits <= there, f"{owner} holds {hits}, there are {there}"

    def run(self) -> None:
        works: list[tuple[EvictingServer, Step]] = [
            (self.one, partial(self.leasing, self.one)),
            (self.one, self.storing),
            (self.other, partial(self.leasing, self.other)),
            (self.steward, partial(self.evicting, self.steward)),
            (self.tool, partial(self.evicting, self.tool)),
        ]
        with ExitStack() as stack:
            actors = [stack.enter_context(Actor(by.fs, work)) for by, work in works]
            while left := [actor for actor in actors if not actor.is_done]:
                self.random.choice(left).run(self.random.choice((1, 1, 2, 5, 30)))
                self.check()
        self.tool.tree.store.open_chunks.release(self.read_by_tool)
        for server in self.servers:
            server.fs.fails_at = 0
            server.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("with_faults", [False, True], ids=["no faults", "with faults"])
def test_random_orders(tmp_path: Path, with_faults: bool) -> None:
    """Renewals, releases, two evictors that disagree; with faults, one call of each server fails,
    and what was promised before holds."""
    held = gone = 0
    for seed in range(100):
        random = Random(seed)
        crowd = Crowd(tmp_path / str(seed), random)
        if with_faults:
            for server in crowd.servers:
                server.fs.fails_at = len(server.fs.calls) + random.randint(1, 40)
        try:
            crowd.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        held += sum(map(len, crowd.promised.values()))
        gone += 3 - len(crowd.one.there())
    assert held > 70
    assert gone > 70, "neither side always wins"


@pytest.mark.timeout(60)
def test_threads_at_any_time(tmp_path: Path) -> None:
    """The same without steps: real threads on two servers for a while."""
    leasing, evicting = EvictingServer(tmp_path, "aB3"), EvictingServer(tmp_path, "bC4")
    until = time.monotonic() + 3.0
    kept = evicted = 0

    def lease(request: str) -> int:
        count = 0
        while time.monotonic() < until:
            hits = leasing.lease(request)
            for _ in range(20):
                there = leasing.there()
                assert hits <= there, f"leased {hits}, there are {there}"
            count += len(hits)
            leasing.release(request)
            leasing.tree.exchange.tell_blocking()
        return count

    def evict(by: EvictingServer) -> int:
        count = 0
        while time.monotonic() < until:
            count += by.evict().evicted.files
        return count

    def store() -> None:
        while time.monotonic() < until:
            leasing.put(*(it for it in leasing.indexes if it not in leasing.there()))

    with ThreadPoolExecutor(5) as threads:
        storing = threads.submit(store)
        leases = [threads.submit(lease, request) for request in ("r", "s")]
        # One evictor beside the leases, in their own process.
        evictions = [threads.submit(evict, by) for by in (leasing, evicting)]
        storing.result()
        kept = sum(it.result() for it in leases)
        evicted = sum(it.result() for it in evictions)
    leasing.close()
    evicting.close()
    assert kept > 20
    assert evicted > 20
