"""The bars of `kvserve bench concurrency`: what fails and what passes."""

import pytest

from kvserve.bench.concurrency import CrowdReport, crowd_bars, scaling


def row(
    clients: int, gb_per_s: float, *, workers: int = 1, peak: float = 1.0, slowest: float = 1.0
) -> CrowdReport:
    return CrowdReport(
        name="",
        label="",
        plane="tcp",
        workers=workers,
        clients=clients,
        is_ceiling=False,
        gb_per_s=[gb_per_s],
        gb_per_s_median=gb_per_s,
        gb_per_s_best=gb_per_s,
        of_peak=gb_per_s / peak,
        of_fewest_workers=1.0,
        slowest_of_fastest=slowest,
        server_cpu_s_a_gib=0.0,
        client_cpu_s_a_gib=0.0,
        server_cores=1.0,
        client_cores=0.5,
        server_peak_bytes=0,
    )


@pytest.mark.parametrize(
    ("speeds", "passed"),
    [
        ((1.0, 1.0, 1.0), True),
        ((1.0, 0.86, 0.9), True),
        ((1.0, 0.84, 0.9), False),
        ((0.3, 1.0, 0.9), True),
        ((0.3, 1.0, 0.5), False),
    ],
)
def test_only_a_fall_after_the_peak_counts(speeds: tuple[float, ...], passed: bool) -> None:
    """One client alone need not reach what several do."""
    rows = [row(clients, speed) for clients, speed in zip((1, 4, 16), speeds, strict=True)]
    throughput, _ = crowd_bars(rows)
    assert throughput.passed is passed


@pytest.mark.parametrize(("slowest", "passed"), [(0.5, True), (0.49, False)])
def test_a_client_that_starves(slowest: float, passed: bool) -> None:
    _, fairness = crowd_bars([row(1, 1.0), row(4, 1.0, slowest=slowest)])
    assert fairness.passed is passed
    assert "with 4 clients" in fairness.figure


def test_scaling_is_peak_against_peak() -> None:
    rows = [
        row(1, 0.5),
        row(4, 1.0),
        row(1, 1.5, workers=2, peak=1.5),
        row(4, 1.2, workers=2, peak=1.5),
    ]
    (line,) = scaling(rows, cpu_count=2)
    assert line == (
        "tcp: 2 workers at best 1.50 GB/s, 1.50 of 1 worker, where 1.50 of 2 cores were busy: "
        "1.00 with the server, 0.50 with the clients"
    )
