"""A mount that does not answer: whoever waits for it is told in time, nobody else waits.

The server's own deadline for file calls (`store.io_timeout_s`) does that. A process inside a call
that hangs cannot be killed either, which the last test is about.
"""

import os
import signal
import time
from collections.abc import Callable

import pytest

from kvclient import ChunkStatus
from kvserve.testing.fuse_faults import Fault
from kvserve.testing.fuse_mount import FaultyMount
from tests.faults.mounts import Case, Serving, chunk_files, statuses, temp_files, until

Serve = Callable[..., Serving]
STORED, HIT = ChunkStatus.STORED, ChunkStatus.HIT
MISSES = {status for status in ChunkStatus if status.name in ("MISS_ERROR", "MISS_TIMEOUT")}
TIMEOUT_S = 0.5
# What a chunk that hangs may cost: a deadline for its open, one for its read, and some.
PATIENCE_S = 4.0


@pytest.fixture
def own(mount: FaultyMount, serve: Serve) -> Case:
    """A mount and a server of the test's own with few threads and a short deadline."""
    return Case(mount, serve(mount.path, "store.io_threads=2", *deadline()), "own")


def deadline() -> tuple[str, ...]:
    return (f"store.io_timeout_s={TIMEOUT_S}",)


def other_on(case: Case) -> Case:
    return Case(case.mount, case.serving, "other")


@pytest.mark.parametrize("on", ["read", "open"])
def test_a_hung_chunk_is_a_miss_and_nobody_else_waits(own: Case, on: str) -> None:
    """T7: the others of the same fetch are whole, other fetches are not held up."""
    other = other_on(own)
    for case in (own, other):
        assert statuses(case.put()) == [STORED] * 8
    own.mount.inject(Fault(on, own.bad_file, hangs=True))
    started = time.monotonic()
    verdicts = own.get()
    assert time.monotonic() - started < PATIENCE_S
    assert verdicts[own.bad].status in MISSES
    assert [it for it in range(8) if verdicts[it].status is not HIT] == [own.bad]
    for _ in range(3):  # more than there are threads
        assert own.get()[own.bad].status in MISSES
    started = time.monotonic()
    assert statuses(other.get()) == [HIT] * 8
    assert other.hits() == [True] * 8
    assert time.monotonic() - started < TIMEOUT_S * 2
    own.mount.heal()
    assert all(status.is_stored for status in statuses(own.put()))
    assert statuses(own.get()) == [HIT] * 8


def test_a_hung_stat(own: Case) -> None:
    """A lookup has an answer for every chunk in time."""
    other = other_on(own)
    for case in (own, other):
        assert statuses(case.put()) == [STORED] * 8
    own.mount.inject(Fault("getattr", own.bad_file, hangs=True))
    started = time.monotonic()
    verdicts = own.serving.client.lookup(own.descriptor).verdicts
    assert time.monotonic() - started < PATIENCE_S
    assert verdicts[own.bad].status in MISSES
    assert other.hits() == [True] * 8
    own.mount.heal()


@pytest.mark.parametrize("on", ["write", "fsync", "rename"])
def test_a_hung_write_costs_its_chunk(own: Case, on: str) -> None:
    """The others are stored; what hung leaves nothing once it comes back; a put heals."""
    own.mount.inject(Fault(on, own.bad_file, hangs=True))
    started = time.monotonic()
    ended = statuses(own.put())
    assert time.monotonic() - started < PATIENCE_S
    assert ended == own.all_but(ChunkStatus.STORE_ERROR, STORED)
    own.mount.heal()
    until(lambda: not temp_files(own.tree))
    assert all(status.is_stored for status in statuses(own.put()))
    assert statuses(own.get()) == [HIT] * 8


def test_everything_hangs(own: Case) -> None:
    """Every request ends in time; the server serves again as soon as the mount does."""
    assert statuses(own.put()) == [STORED] * 8
    for on in ("getattr", "open", "read", "create", "write", "mkdir"):
        own.mount.inject(*(Fault(it, hangs=True) for it in (on, "statfs")))
        started = time.monotonic()
        assert set(statuses(own.get())) <= MISSES | {HIT}
        assert time.monotonic() - started < PATIENCE_S, on
        own.mount.heal()
    until(lambda: all(it.is_stored for it in statuses(own.put())))
    assert statuses(own.get()) == [HIT] * 8
    assert "Traceback" not in own.serving.process.log()


def test_delays_are_waited_for(mount: FaultyMount, serve: Serve) -> None:
    """Slow is not dead."""
    case = Case(mount, serve(mount.path), "slow")
    mount.inject(*(Fault(on, delay_s=0.02, count=20) for on in ("write", "read", "open", "create")))
    assert statuses(case.put()) == [STORED] * 8
    assert statuses(case.get()) == [HIT] * 8


def test_a_server_killed_in_a_hung_write(mount: FaultyMount, serve: Serve) -> None:
    """Its successor on the same tree serves at once; nothing half-written is ever visible.

    The kernel ends the dead server's process only when the write comes back, which must not make
    its chunk appear.
    """
    case = Case(mount, serve(mount.path), "killed")
    mount.inject(Fault("write", case.bad_file, hangs=True, skip=1))
    with case.serving.client.store(case.descriptor, case.payload) as handle:
        handle.store_layer(0)
        handle.store_layer(1)
        until(lambda: mount.hanging() == 1)
        os.kill(case.serving.process.pid, signal.SIGKILL)
        mount.inject()
        # Not a sweep yet: to remove a file in a write that hangs hangs itself, and its directory.
        successor = Case(mount, serve(mount.path, "store.owner_lease_s=30"), "killed")
    assert successor.hits() == [False] * 8
    assert statuses(successor.put()) == [STORED] * 8
    assert statuses(successor.get()) == [HIT] * 8
    mount.heal()
    case.serving.process.kill()
    serve(mount.path, "store.sweep_interval_s=1")
    until(lambda: not temp_files(case.tree))
    assert len(chunk_files(case.tree)) == 8
    assert statuses(successor.get()) == [HIT] * 8
