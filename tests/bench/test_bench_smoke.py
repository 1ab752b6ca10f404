"""Every benchmark end to end: real processes, and a unit so small that its figures say nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from kvserve import nixl_agent
from kvserve.bench.planes import GEOMETRIES
from kvserve.bench.unit import WorkUnit
from kvserve.cli.bench import bench as bench_commands

TINY = ("--chunks", "4", "--layers", "2", "--slice-bytes", "16384")
SIZE_BYTES = 4 * 2 * 16384
MACHINE = {
    *("cpu", "cpu_count", "file_system", "load_average_1m", "python", "grpcio", "kvserve"),
}


PLANES = ["shm", *(["nixl"] if nixl_agent.is_installed() else []), "tcp", "grpc"]
PLANES_BARS = [
    *(f"kvserve_stream_{plane} speed" for plane in PLANES),
    *(f"kvserve_stream_{plane} first layer" for plane in ("tcp", "shm")),
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvserve", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def bench_json(root: Path, *arguments: str) -> dict[str, Any]:
    ended = bench(*arguments, "--root", str(root), "--json")
    assert ended.returncode == 0, ended.stderr
    assert not list(root.iterdir()), "a benchmark must leave nothing behind"
    report: dict[str, Any] = json.loads(ended.stdout)
    assert set(report["machine"]) == MACHINE
    assert report["unit"]["size_bytes"] == SIZE_BYTES
    for bar in report["bars"]:
        assert set(bar) == {"name", "figure", "passed"}
    return report


def check_case(case: dict[str, Any], repeats: int, ceilings: set[str]) -> None:
    assert len(case["gb_per_s"]) == repeats
    assert 0 < case["gb_per_s_median"] <= case["gb_per_s_best"]
    assert case["first_layer_ms_median"] > 0
    assert case["is_ceiling"] == (case["name"] in ceilings)
    assert set(case["ratios"]) == ceilings - {case["name"]}
    for name in ceilings - {case["name"]}:
        assert case["ratios"][name] > 0
    assert (case["server"] is None) == (case["requests"] == 0)
    for process in (case["client"], case["server"]):
        if process is not None:
            assert process["cpu_s_mean"] >= 0
            assert process["cpu_s_a_gib"] == pytest.approx(
                process["cpu_s_mean"] * (1 << 30) / SIZE_BYTES
            )
            assert process["peak_bytes"] > 1 << 20
            assert process["growth_bytes"] >= 0


def check_growth(report: dict[str, Any]) -> None:
    """kvserve and the bare stream, each with the unit and with four times as much."""
    found = [(row["name"], row["payload_bytes"]) for row in report["server_growth"]]
    assert found == [
        ("kvserve_stream", SIZE_BYTES),
        ("grpc", SIZE_BYTES),
        ("kvserve_stream", 4 * SIZE_BYTES),
        ("grpc", 4 * SIZE_BYTES),
    ]


def test_fetch(tmp_path: Path) -> None:
    report = bench_json(tmp_path, "fetch", *TINY, "--repeats", "2")
    requests = {case["name"]: case["requests"] for case in report["cases"]}
    assert requests == {
        "kvserve_stream": 1,
        "kvserve_by_layer_sequential": 2,
        "kvserve_by_layer_2_deep": 2,
        "grpc": 1,
        "page_cache": 0,
        "memcpy": 0,
    }
    for case in report["cases"]:
        check_case(case, 2, {"grpc", "page_cache", "memcpy"})
    assert report["verified_cases"] == [name for name in requests if name.startswith("kvserve")]
    assert [bar["name"] for bar in report["bars"]] == [
        "kvserve_stream speed",
        "server memory growth",
    ]
    check_growth(report)


def test_store(tmp_path: Path) -> None:
    report = bench_json(tmp_path, "store", *TINY, "--repeats", "2")
    requests = {case["name"]: case["requests"] for case in report["cases"]}
    assert requests == {"kvserve_stream": 1, "grpc": 1, "page_cache": 0, "memcpy": 0}
    for case in report["cases"]:
        check_case(case, 2, {"grpc", "page_cache", "memcpy"})
    assert report["verified_cases"] == ["kvserve_stream"]
    check_growth(report)


def test_planes(tmp_path: Path) -> None:
    report = bench_json(tmp_path, "planes", *TINY, "--repeats", "2")
    requests = {case["name"]: case["requests"] for case in report["cases"]}
    transports = {"memcpy": 0, "tcp_constant": 1, "grpc": 1}
    if "nixl" in PLANES:
        transports["nixl_constant"] = 1
    verified = [name for name in requests if name not in transports]
    ceilings = {f"{plane}_files" for plane in PLANES} | transports.keys()
    assert requests == {
        **{f"kvserve_stream_{plane}": 1 for plane in PLANES},
        **{f"kvserve_by_layer_sequential_{plane}": 2 for plane in PLANES},
        **{f"{plane}_files": 1 for plane in PLANES},
        **transports,
    }
    for case in report["cases"]:
        check_case(case, 2, ceilings)
    assert report["verified_cases"] == verified
    assert [bar["name"] for bar in report["bars"]] == PLANES_BARS


def test_planes_of_several_geometries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself, in this process, so that the units can be tiny. Slices of 18 KiB: no
    frame is as large as a layer, and no payload a whole number of frames."""
    assert (GEOMETRIES["mla"].layer_count, GEOMETRIES["mla"].slice_size_bytes) == (61, 18 << 10)
    for name, unit in (("mla", WorkUnit(70, 2, 18 << 10)), ("large", WorkUnit(2, 2, 1 << 20))):
        monkeypatch.setitem(GEOMETRIES, name, unit)
    output, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    names = ("--geometry", "mla", "--geometry", "large", "--geometry", "mla")
    files = ("--output", str(output), "--plot", str(plot))
    ended = CliRunner().invoke(bench_commands, ["planes", *names, "--repeats", "1", *files])
    assert ended.exit_code == 0, ended.output
    report = json.loads(output.read_text("utf-8"))
    units = {name: of_one["unit"] for name, of_one in report["geometries"].items()}
    assert [*units] == ["mla", "large"]
    assert units["large"]["slice_size_bytes"] == 1 << 20
    for of_one in report["geometries"].values():
        assert [bar["name"] for bar in of_one["bars"]] == PLANES_BARS
    labels = "".join(ElementTree.parse(plot).getroot().itertext())
    assert "mla: kvserve tcp, 1 request" in labels
    assert "large: bare shm, same files" in labels


def test_an_unknown_geometry() -> None:
    ended = bench("planes", "--geometry", "mga")
    assert ended.returncode == 1
    assert "--geometry mga must be all, default or small or large or mla" in ended.stderr


@pytest.mark.timeout(120)  # a dozen processes, one after the other
def test_concurrency(tmp_path: Path) -> None:
    crowds = ("--clients", "3", "--clients", "1", "--workers", "1", "--workers", "2")
    report = bench_json(
        tmp_path, "concurrency", *TINY, *crowds, "--seconds", "0.1", "--repeats", "1"
    )
    rows = {row["name"]: row for row in report["rows"]}
    assert [*rows] == [
        *(
            f"{plane}_{workers}_workers_{clients}_clients"
            for workers in (1, 2)
            for plane in ("shm", "tcp", "grpc")
            for clients in (1, 3)
        ),
        "bare_1_workers_1_clients",
        "bare_1_workers_3_clients",
    ]
    for row in rows.values():
        assert 0 < row["gb_per_s_median"] <= row["gb_per_s_best"]
        assert 0 < row["of_peak"] <= 1
        assert 0 < row["slowest_of_fastest"] <= 1
        assert row["clients"] > 1 or row["slowest_of_fastest"] == 1
        assert row["server_peak_bytes"] > 1 << 20
        assert row["is_ceiling"] == (row["plane"] == "bare")
    for plane in ("shm", "tcp", "grpc"):
        one, two = (rows[f"{plane}_{workers}_workers_3_clients"] for workers in (1, 2))
        assert two["server_peak_bytes"] > 1.5 * one["server_peak_bytes"], "both processes count"
        assert two["of_fewest_workers"] == pytest.approx(
            two["gb_per_s_median"] / one["gb_per_s_median"]
        )
    assert [line.partition(":")[0] for line in report["scaling"]] == ["shm", "tcp", "grpc"]
    assert [bar["name"] for bar in report["bars"]] == [
        f"{plane}, {workers}: {what}"
        for workers in ("1 worker", "2 workers")
        for plane in ("shm", "tcp", "grpc")
        for what in ("throughput", "clients")
    ]


def test_concurrency_for_people(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    crowds = ("--clients", "2", "--seconds", "0.1", "--repeats", "1", "--plot", str(plot))
    ended = bench("concurrency", *TINY, *crowds)
    assert (ended.returncode, ended.stderr) == (0, ""), "nobody complains at the end"
    assert "kvserve shm, 2 clients" in ended.stdout
    labels = "".join(ElementTree.parse(plot).getroot().itertext())
    assert "bare TCP, 2 clients" in labels


def test_concurrency_over_nixl(tmp_path: Path) -> None:
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed (the extra nixl)")
    crowds = ("--plane", "nixl", "--clients", "2", "--seconds", "0.1", "--repeats", "1")
    report = bench_json(tmp_path, "concurrency", *TINY, *crowds)
    assert [row["plane"] for row in report["rows"]] == ["nixl", "bare"]


@pytest.mark.parametrize("plane", ["grpc", "shm", "nixl"])
@pytest.mark.parametrize("command", ["fetch", "store"])
def test_a_plane_by_name(command: str, plane: str, tmp_path: Path) -> None:
    if plane == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed (the extra nixl)")
    ended = bench(command, *TINY, "--repeats", "1", "--root", str(tmp_path), "--plane", plane)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", ["fetch", "store", "concurrency"])
def test_a_plane_that_nobody_knows(command: str) -> None:
    ended = bench(command, *TINY, "--plane", "rdma")
    assert ended.returncode == 1
    known = "shm, nixl, tcp, grpc" if command == "concurrency" else "auto, shm, nixl, tcp, grpc"
    assert f"--plane rdma must be one of {known}" in ended.stderr


def test_lookup(tmp_path: Path) -> None:
    report = bench_json(tmp_path, "lookup", *TINY, "--lookups", "20", "--processes", "2")
    latencies = {row["name"]: row for row in report["latencies"]}
    assert list(latencies) == [
        "lookup_idle",
        "grpc_unary_idle",
        "lookup_under_load",
        "grpc_unary_under_load",
    ]
    for row in latencies.values():
        assert row["calls"] == 20
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["p99_9_ms"] <= row["max_ms"]
    load = report["load"]
    assert load["processes"] == 2
    assert load["fetches_at_once"] == 8
    assert load["fetch_size_bytes"] == SIZE_BYTES // 2
    assert load["gb_per_s"] > 0
    assert [bar["name"] for bar in report["bars"]] == ["lookup latency under load"]


def test_metadata(tmp_path: Path) -> None:
    counts = ("--count", "200", "--count", "64")
    root, plot = tmp_path / "root", tmp_path / "plot.svg"
    root.mkdir()
    options = ("--root", str(root), "--json", "--plot", str(plot))
    ended = bench("metadata", *counts, "--lookups", "10", *options)
    assert ended.returncode == 0, ended.stderr
    assert not list(root.iterdir()), "a benchmark must leave nothing behind"
    report = json.loads(ended.stdout)
    assert set(report["machine"]) == MACHINE
    assert [size["chunk_files"] for size in report["sizes"]] == [64, 200]
    for size, lookups in zip(report["sizes"], (1, 4), strict=True):
        assert size["unknown"]["calls"] == lookups, "64 chunks in each, each chunk once"
        assert size["known"]["calls"] == 10
        assert 0 < size["known"]["p50_ms"] <= size["known"]["p99_ms"]
        assert 0 < size["ready_s"] <= size["counted_s"]
        assert 0 < size["directory_entries_max"] <= size["chunk_files"]
    assert [bar["name"] for bar in report["bars"]] == [
        "unknown lookup latency stays flat",
        "known lookup latency stays flat",
        "memory of a known chunk",
        "time to the first answer",
        "entries of the fullest directory",
    ]
    labels = "".join(ElementTree.parse(plot).getroot().itertext())
    assert "200 chunk files, known" in labels


def test_table_files_and_check(tmp_path: Path) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    files = ("--output", str(output), "--plot", str(plot))
    ended = bench("fetch", *TINY, "--repeats", "1", *files, "--check")
    bars = json.loads(output.read_text("utf-8"))["bars"]
    assert ended.returncode == (0 if all(bar["passed"] for bar in bars) else 1)
    for bar in bars:
        verdict = "pass" if bar["passed"] else "FAIL"
        assert f"{verdict}  {bar['name']}: {bar['figure']}" in ended.stdout
    assert "bare grpcio stream" in ended.stdout
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    "command", ["fetch", "store", "planes", "concurrency", "lookup", "metadata"]
)
def test_a_root_that_is_not_there(command: str, tmp_path: Path) -> None:
    ended = bench(command, "--root", str(tmp_path / "absent"))
    assert ended.returncode == 1
    assert "absent is no directory" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    option: str, tmp_path: Path
) -> None:
    ended = bench("fetch", *TINY, "--repeats", "1000", option, str(tmp_path / "absent" / "file"))
    assert ended.returncode == 1
    assert f"{option} {tmp_path}/absent/file must name a file" in ended.stderr
