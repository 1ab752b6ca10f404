"""The benchmark of read plans, end to end, with a unit so small that its figures say nothing."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from kvserve.bench.readplan import (
    LATENCIES_MS,
    OURS,
    PLANS,
    PlanTimes,
    ReadReport,
    ReadSettings,
)
from kvserve.bench.unit import WorkUnit
from kvserve.testing.slow_fs import SlowFileSystem

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "readplan.py"
TINY = ("--chunks", "4", "--layers", "5", "--slice-bytes", "16384", "--repeats", "2")


def test_every_plan_at_every_latency(tmp_path: Path) -> None:
    root, plot = tmp_path / "root", tmp_path / "plot.svg"
    root.mkdir()
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, "--root", str(root), "--json", "--plot", str(plot)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert not list(root.iterdir()), "a benchmark must leave nothing behind"
    rows = report["times"]
    assert [row["plan"] for row in rows] == list(PLANS) * len(LATENCIES_MS)
    for row in rows:
        assert len(row["total_ms"]) == len(row["first_layer_ms"]) == 2
        assert 0 < row["first_layer_median_ms"] <= row["total_median_ms"]
        assert row["first_layer_median_ms"] >= row["latency_ms"]
    assert [it["latency_ms"] for it in report["ratios"]] == list(LATENCIES_MS)
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_ours_is_held_against_the_better_of_the_two() -> None:
    settings = ReadSettings(WorkUnit(1, 1, 1), 1, (5.0,))
    per_layer, whole, ours = (PlanTimes(plan, 5.0) for plan in PLANS)
    assert ours.plan == OURS
    per_layer.first_layer_ms, per_layer.total_ms = [10.0], [100.0]
    whole.first_layer_ms, whole.total_ms = [40.0], [50.0]
    ours.first_layer_ms, ours.total_ms = [11.0], [55.0]
    report = ReadReport(settings, [per_layer, whole, ours])
    (ratios,) = report.ratios()
    assert (ratios.first_layer, ratios.total, ratios.passed) == (1.1, 1.1, True)
    assert not replace(ratios, total=1.11).passed
    assert not replace(ratios, first_layer=1.11).passed


def test_a_slow_file_system_has_nothing_in_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kv" * 100)
    fs = SlowFileSystem()
    fd = fs.open_read(str(path))
    assert fd is not None
    into = memoryview(bytearray(4))
    assert fs.read_cached(fd, into, 0) is None
    assert fs.read_parts(fd, (into[:1], into[1:]), 0) == 4
    assert bytes(into) == b"kvkv"
    fs.close(fd)
