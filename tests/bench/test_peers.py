"""benchmarks/peers: the harness with a fake peer; the real redis where it is installed."""

import json
import os
import shutil
import sys
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console

from benchmarks.peers.bench import PeersSettings, bench_peers, steps
from benchmarks.peers.install import NotInstalled, install, python_of
from benchmarks.peers.recipes import RECIPES, Environment, Recipe, SystemNeed
from benchmarks.peers.report import PeersReport, peers_chart, print_peers
from benchmarks.peers.run import chosen
from kvserve.bench.plot import render_svg
from kvserve.bench.rounds import Case, Timing, run_rounds
from kvserve.bench.unit import WorkUnit
from kvserve.errors import ServerFault

TINY = WorkUnit(4, 2, 16384)
FAKE = Environment("fake", ())
WORK_DIR = Path(os.environ.get("KVSERVE_PEERS", Path.home() / ".cache" / "kvserve-peers"))


def fake(name: str, fault: str = "none") -> Recipe:
    title = f"fake that has {fault}"
    return Recipe(name, title, "tests.bench.fake_peer", "tcp", FAKE, options={"fault": fault})


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """Has an environment for fakes: this very one."""
    python = python_of(fake("any"), tmp_path)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "utf-8")
    python.chmod(0o755)
    done = python.parents[1] / "kvserve-peer.json"
    done.write_text(json.dumps(asdict(FAKE)), "utf-8")
    return tmp_path


async def measured(work_dir: Path, *recipes: Recipe, rounds: int = 2) -> PeersReport:
    root = work_dir / "root"
    root.mkdir()
    called: list[str] = []
    settings = PeersSettings(recipes, TINY, rounds, work_dir, root)
    report = await bench_peers(settings, called.append)
    assert len(called) <= steps(settings)
    assert not list(root.iterdir()), "a benchmark must leave nothing behind"
    return report


async def test_a_peer_beside_kvserve(work_dir: Path) -> None:
    report = await measured(work_dir, fake("twin"))
    assert report.absent == []
    assert [(peer.name, peer.version) for peer in report.present] == [("twin", "fake 1.0")]
    names = [row.case.name for row in report.rows]
    ours = [f"kvserve_{way}_{{}}" for way in ("stream", "by_layer_sequential")]
    by_plane = {plane: [name.format(plane) for name in ours] for plane in ("shm", "tcp", "grpc")}
    twin = ["twin_layers", "twin_chunks"]
    ceilings = ["tcp_files", "tcp_constant", "memcpy"]
    assert names == [*by_plane["shm"], *by_plane["tcp"], *twin, *by_plane["grpc"], *ceilings]
    rows = {row.case.name: row for row in report.rows}
    # First and last in each of two rounds.
    assert len(rows["kvserve_stream_tcp"].case.gb_per_s) == 4
    assert len(rows["twin_layers"].case.gb_per_s) == 2
    against = rows["kvserve_stream_tcp"].case.gb_per_s_median
    row = rows["twin_layers"]
    assert row.of_kvserve == pytest.approx(row.case.gb_per_s_median / against)
    assert row.case.server is not None
    assert row.case.first_layer_ms_median > 0
    assert set(row.case.ratios) == set(ceilings)
    assert rows["memcpy"].of_kvserve is None
    assert report.to_json()["unit"]["size_bytes"] == TINY.size_bytes
    json.dumps(report.to_json())


async def test_who_cannot_take_part_is_in_the_report_with_the_reason(work_dir: Path) -> None:
    nowhere = SystemNeed("made-up-package", program="no-such-program")
    no_program = Recipe("far", "far", "tests.bench.fake_peer", "tcp", FAKE, system=(nowhere,))
    faults = ("start", "wrong bytes", "breaks", "dies")
    report = await measured(work_dir, no_program, *(fake(fault[0], fault) for fault in faults))
    reasons = {missing.name: missing.reason for missing in report.absent}
    assert "apt-get install made-up-package" in reasons["far"]
    assert "RuntimeError: the port is taken" in reasons["s"]
    assert "layer 1 is not what was stored" in reasons["w"]
    # Both had already been checked; one way's failure ends the other's too.
    for name, why in (("b", "the lease is over"), ("d", "ended or did not answer")):
        assert why in reasons[f"{name}_layers"]
        assert f"{name}_chunks" in reasons
    assert not {"far", "s", "w", "b", "d"} & {row.case.name[0] for row in report.rows}
    shown = StringIO()
    print_peers(Console(file=shown, width=200), report)
    for missing in report.absent:
        assert f"no figures  {missing.title}: " in shown.getvalue()


async def test_table_and_chart(work_dir: Path) -> None:
    report = await measured(work_dir, fake("twin"), rounds=1)
    shown = StringIO()
    print_peers(Console(file=shown, width=100), report)
    for row in report.rows:
        assert row.case.label in shown.getvalue()
    chart = peers_chart(report)
    assert [row.is_ours for row in chart.rows[:2]] == [True, True]
    ElementTree.fromstring(render_svg(chart))


class Fails(Case):
    name = label = "fails"
    may_fail = True

    async def run(self) -> Timing:
        raise ServerFault("no")


async def test_a_case_that_may_fail_is_asked_once() -> None:
    case = Fails()
    samples = await run_rounds([case], repeats=3, warm_ups=0, step=lambda _: None)
    assert samples == {"fails": []}
    assert case.failure == "no"
    case = Fails()
    case.may_fail = False
    with pytest.raises(ServerFault, match="no"):
        await run_rounds([case], repeats=1, warm_ups=0, step=lambda _: None)


def test_recipes_have_one_name_and_exact_versions() -> None:
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES)
    for recipe in RECIPES:
        for package in (*recipe.environment.packages, *recipe.environment.alone):
            assert package.count("==") == 1, package
        assert (Path(__file__).parents[2] / f"{recipe.module.replace('.', '/')}.py").is_file()


def test_peers_are_chosen_by_name() -> None:
    assert chosen("all") == list(RECIPES)
    assert [recipe.name for recipe in chosen("flight,redis")] == ["redis", "flight"]
    for names in ("", "redis,memcached"):
        with pytest.raises(typer.BadParameter):
            chosen(names)


def test_a_failed_install_says_why(tmp_path: Path) -> None:
    there_is_none = Environment("none", (str(tmp_path / "none.whl"),))
    recipe = Recipe("none", "none", "tests.bench.fake_peer", "tcp", there_is_none)
    with pytest.raises(NotInstalled, match=r"none\.whl"):
        install(recipe, tmp_path, with_apt=False)
    assert not (python_of(recipe, tmp_path).parents[1] / "kvserve-peer.json").exists()


async def test_real_redis(tmp_path: Path) -> None:
    (recipe,) = chosen("redis")
    if shutil.which("redis-server") is None or not python_of(recipe, WORK_DIR).exists():
        pytest.skip(f"redis-server or {WORK_DIR}/venvs/redis is missing: run the benchmark once")
    report = await bench_peers(PeersSettings([recipe], TINY, 1, WORK_DIR, tmp_path), lambda _: None)
    assert report.absent == []
    assert {"redis_layers", "redis_chunks"} < {row.case.name for row in report.rows}
