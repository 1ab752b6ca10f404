"""Durability "power": what a disk's slow flush costs is shared by the puts that wait for it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest

from kvclient import ChunkStatus
from kvserve.testing.fuse_mount import why_no_fuse
from kvserve.testing.server_process import ServerProcess
from tests.faults.mounts import Serving, why_no_tmpfs
from tests.faults.slow_disk import SlowDisk
from tests.payload import payload_for, small_descriptor

_FLUSH_S = 0.01
_PUTS = 48


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[SlowDisk]:
    if reason := why_no_tmpfs() or why_no_fuse():
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(SlowDisk(tmp_path, size_bytes=256 << 20, flush_s=_FLUSH_S))
        except OSError as error:
            pytest.skip(f"no ext4 on a loop device here: {error}")
        yield disk


def test_sixteen_puts_at_once_share_the_disk_s_flushes(slow_disk: SlowDisk) -> None:
    with ServerProcess(slow_disk.path / "kv", settings=("store.durability=power",)) as process:
        serving = Serving(process)
        puts = iter(range(10_000))

        def put(number: int) -> None:
            descriptor = small_descriptor(chunks=1, first_token=16 * number)
            (verdict,) = serving.put(descriptor, payload_for(descriptor, number))
            assert verdict.status is ChunkStatus.STORED

        def cost(at_once: int) -> tuple[float, float]:
            """Flushes and seconds for a put."""
            numbers = [next(puts) for _ in range(_PUTS)]
            flushes, began = slow_disk.flushes, monotonic()
            with ThreadPoolExecutor(at_once) as threads:
                list(threads.map(put, numbers))
            return (slow_disk.flushes - flushes) / _PUTS, (monotonic() - began) / _PUTS

        try:
            cost(4)  # makes directories
            alone, together = cost(1), cost(16)
        finally:
            serving.client.close()
    print(f"flushes a put: {alone[0]:.2f} one by one, {together[0]:.2f} with 16 at once")
    print(f"ms a put: {alone[1] * 1e3:.1f} one by one, {together[1] * 1e3:.1f} with 16 at once")
    assert alone[0] >= 2, "a flush for the file and one for its name, at least"
    assert together[0] < alone[0] / 2
