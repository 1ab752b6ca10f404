"""The numbers between the processes and the reports: the unit, usage, ratios, bars."""

import mmap
import os

import pytest

from kvserve.bench.grpc_ceiling import frame_size_bytes
from kvserve.bench.measure import Meter, Usage, cpu_s, memory
from kvserve.bench.report import ServerGrowth, first_layer_bar, growth_bar, ratio_bar, summarise
from kvserve.bench.rounds import Case, Sample, Timing, run_rounds
from kvserve.bench.unit import WorkUnit

UNIT = WorkUnit(chunk_count=4, layer_count=3, slice_size_bytes=4096)
MIB = 1 << 20


class Recorded(Case):
    """A case that notes what is called on it."""

    def __init__(self, name: str, calls: list[str], *, is_ceiling: bool = False) -> None:
        self.name = self.label = name
        self.is_ceiling = is_ceiling
        self._calls = calls

    async def prepare(self) -> None:
        self._calls.append(f"{self.name} prepare")

    async def run(self) -> Timing:
        self._calls.append(f"{self.name} run")
        return Timing(0.5, 0.1)

    async def clean_up(self) -> None:
        self._calls.append(f"{self.name} clean up")


class TestUnit:
    def test_the_default_is_128_mib(self) -> None:
        assert WorkUnit().size_bytes == 128 * MIB

    def test_series_share_no_chunk(self) -> None:
        one, other = UNIT.descriptor(0), UNIT.descriptor(1)
        assert one == UNIT.descriptor(0)
        assert not set(one.chunk_hashes) & set(other.chunk_hashes)

    def test_bytes_are_the_same_in_every_process_and_differ_by_layer_and_series(self) -> None:
        payloads = {UNIT.layer_bytes(s, layer) for s in range(2) for layer in range(3)}
        assert len(payloads) == 6
        assert UNIT.layer_bytes(0, 0)[:4].hex() == WorkUnit(4, 1, 4096).layer_bytes(0, 0)[:4].hex()

    def test_a_wrong_byte_is_found_in_its_layer(self) -> None:
        region = bytearray(UNIT.size_bytes)
        UNIT.fill(memoryview(region), 5)
        assert UNIT.first_wrong_layer(memoryview(region), 5) is None
        region[UNIT.layer_size_bytes] ^= 1
        assert UNIT.first_wrong_layer(memoryview(region), 5) == 1

    @pytest.mark.parametrize(
        ("slice_size_bytes", "expected"),
        [(4096, 4 * 4096), (600 << 10, 600 << 10), (3 * MIB, MIB), (MIB, MIB)],
    )
    def test_the_bare_stream_has_the_frames_of_kvserve(
        self, slice_size_bytes: int, expected: int
    ) -> None:
        assert frame_size_bytes(WorkUnit(4, 2, slice_size_bytes)) == expected


class TestMeasure:
    def test_memory_that_is_touched_shows(self) -> None:
        meter = Meter(os.getpid())
        meter.start()
        # Not from the heap, which may give again what earlier tests have freed.
        with mmap.mmap(-1, 32 * MIB) as touched:
            touched[:] = b"\1" * len(touched)
            usage = meter.stop()
            assert len(touched) <= usage.growth_bytes + 4 * MIB
        assert usage.peak_bytes >= usage.growth_bytes
        assert memory(os.getpid()).peak_bytes >= memory(os.getpid()).resident_bytes // 2

    def test_work_that_is_done_shows(self) -> None:
        before = cpu_s(os.getpid())
        while cpu_s(os.getpid()) == before:
            sum(range(10_000))
        assert cpu_s(os.getpid()) > before


async def test_rounds_interleave_and_leave_warm_ups_out() -> None:
    calls: list[str] = []
    cases = [Recorded("a", calls), Recorded("b", calls)]
    steps: list[str] = []
    samples = await run_rounds(cases, repeats=2, warm_ups=1, step=steps.append)
    one_round = [f"{name} {call}" for name in "ab" for call in ("prepare", "run", "clean up")]
    assert calls == 3 * one_round
    assert [len(taken) for taken in samples.values()] == [2, 2]
    assert len(steps) == 6


def test_ratios_are_of_medians_and_of_ceilings_only() -> None:
    usage = Usage(0.1, 10, 1)
    ours, ceiling = Recorded("kvserve", []), Recorded("grpc", [], is_ceiling=True)
    samples = {
        "kvserve": [Sample(Timing(t, t / 2), usage, usage) for t in (2.0, 4.0, 40.0)],
        "grpc": [Sample(Timing(t, t / 2), usage, None) for t in (1.0, 2.0, 9.0)],
    }
    rows = summarise([ours, ceiling], samples, size_bytes=8 * 10**9)
    assert rows[0].gb_per_s_median == pytest.approx(2.0)
    assert rows[0].gb_per_s_best == pytest.approx(4.0)
    assert rows[0].first_layer_ms_median == pytest.approx(2000.0)
    assert rows[0].ratios == pytest.approx({"grpc": 0.5})
    assert rows[1].ratios == {}
    assert rows[1].server is None
    assert ratio_bar(rows, "kvserve", "grpc", 0.5).passed
    assert not ratio_bar(rows, "kvserve", "grpc", 0.51).passed


@pytest.mark.parametrize(
    ("took_s", "ceiling_s", "passed"),
    [(0.003, 0.001, True), (0.0031, 0.001, False), (0.0031, 0.0016, True), (0.004, 0.0019, False)],
)
def test_the_first_layer_within_its_time_or_twice_the_ceilings(
    took_s: float, ceiling_s: float, passed: bool
) -> None:
    usage = Usage(0.1, 10, 1)
    ours, ceiling = Recorded("kvserve", []), Recorded("tcp", [], is_ceiling=True)
    samples = {
        "kvserve": [Sample(Timing(1.0, took_s), usage, usage)],
        "tcp": [Sample(Timing(1.0, ceiling_s), usage, usage)],
    }
    rows = summarise([ours, ceiling], samples, size_bytes=10**9)
    assert first_layer_bar(rows, "kvserve", "tcp", 3.0).passed is passed


@pytest.mark.parametrize(("large_mib", "passed"), [(20, True), (42, True), (43, False)])
def test_memory_may_rise_a_little(large_mib: int, passed: bool) -> None:
    growth = [
        ServerGrowth("kvserve", "", 128 * MIB, 10 * MIB),
        ServerGrowth("grpc", "", 128 * MIB, 1 * MIB),
        ServerGrowth("kvserve", "", 512 * MIB, large_mib * MIB),
        ServerGrowth("grpc", "", 512 * MIB, 400 * MIB),
    ]
    assert growth_bar(growth, "kvserve", 32 * MIB).passed is passed
