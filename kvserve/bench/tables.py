"""Reports for people: rich tables of at most 80 columns and one line for each bar."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvserve.bench.concurrency import ConcurrencyReport
from kvserve.bench.lookup import LookupReport
from kvserve.bench.metadata import MetadataReport
from kvserve.bench.planes import GeometriesReport
from kvserve.bench.report import Bar, CaseReport, ProcessReport, TransferReport, mib

_RATIOS_MAX: Final = 4
"""Ceilings that have a column; the JSON has the ratios to all."""


def print_transfer(console: Console, report: TransferReport) -> None:
    unit = report.unit
    console.print(
        f"{report.benchmark}: {unit.chunk_count} chunks x {unit.layer_count} layers x "
        f"{unit.slice_size_bytes} bytes = {mib(unit.size_bytes)}, {report.repeats} rounds",
        style="bold",
    )
    _print_machine(console, report.machine)
    console.print(_speed_table(report.cases))
    console.print(_usage_table(report.cases))
    for growth in report.server_growth:
        console.print(
            f"fresh server, {mib(growth.payload_bytes)} of payload, {growth.label}: "
            f"memory grew by {mib(growth.growth_bytes)}"
        )
    console.print(f"bytes checked against the source: {', '.join(report.verified_cases)}")
    _print_bars(console, report.bars)


def print_geometries(console: Console, report: GeometriesReport) -> None:
    for name, of_one in report.geometries.items():
        console.print(f"geometry {name}", style="bold")
        print_transfer(console, of_one)


def print_lookup(console: Console, report: LookupReport) -> None:
    load = report.load
    console.print(
        f"lookup: {report.lookups} lookups of {report.unit.chunk_count} chunks in each phase",
        style="bold",
    )
    _print_machine(console, report.machine)
    table = _table("", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "calls")
    for row in report.latencies:
        latencies = (row.p50_ms, row.p99_ms, row.p99_9_ms, row.max_ms)
        table.add_row(row.label, *(f"{value:.2f}" for value in latencies), str(row.calls))
    console.print(table)
    console.print(
        f"load: {load.fetches_at_once} fetches of {mib(load.fetch_size_bytes)} at once from "
        f"{load.processes} process(es): {load.gb_per_s:.2f} GB/s for {load.took_s:.1f} s, "
        f"{load.fetches} ended, {load.server_cpu_s:.2f} s of server CPU"
    )
    _print_bars(console, report.bars)


def print_metadata(console: Console, report: MetadataReport) -> None:
    console.print(
        f"metadata: lookups of {report.lookup_chunks} chunks, each chunk once while it is unknown, "
        f"then {report.lookups} of known ones",
        style="bold",
    )
    _print_machine(console, report.machine)
    table = _table(
        "chunk files",
        *("ready\ns", "counted\ns", "unknown\np50 ms", "\np99 ms", "known\np50 ms", "\np99 ms"),
        *("bytes a\nknown one", "fullest\ndirectory"),
    )
    for size in report.sizes:
        rows = (size.unknown.p50_ms, size.unknown.p99_ms, size.known.p50_ms, size.known.p99_ms)
        table.add_row(
            f"{size.chunk_files:,}",
            f"{size.ready_s:.2f}",
            f"{size.counted_s:.0f}",
            *(f"{value:.2f}" for value in rows),
            f"{size.known_bytes_per_chunk:.0f}",
            f"{size.directory_entries_max:,}",
        )
    console.print(table)
    _print_bars(console, report.bars)


def print_concurrency(console: Console, report: ConcurrencyReport) -> None:
    unit = report.unit
    console.print(
        f"concurrency: {unit.chunk_count} chunks x {unit.layer_count} layers x "
        f"{unit.slice_size_bytes} bytes = {mib(unit.size_bytes)} a fetch, clients in "
        f"{report.processes} processes, {report.seconds:g} s each, {report.repeats} rounds",
        style="bold",
    )
    _print_machine(console, report.machine)
    table = _table(
        "",
        *("GB/s\nmedian", "\nbest", "of\npeak", "slowest of\nfastest"),
        *("cores busy\nserver", "\nclients", "peak\nMiB", "of fewest\nworkers"),
    )
    for row in report.rows:
        speeds = (row.gb_per_s_median, row.gb_per_s_best, row.of_peak, row.slowest_of_fastest)
        table.add_row(
            row.label,
            *(f"{value:.2f}" for value in speeds),
            f"{row.server_cores:.2f}",
            f"{row.client_cores:.2f}",
            f"{row.server_peak_bytes / (1 << 20):.0f}",
            f"{row.of_fewest_workers:.2f}",
            style="dim" if row.is_ceiling else "",
        )
    console.print(table)
    for line in report.scaling:
        console.print(line)
    _print_bars(console, report.bars)


def _speed_table(cases: Sequence[CaseReport]) -> Table:
    ceilings = [case.name for case in cases if case.is_ceiling][:_RATIOS_MAX]
    of_ceilings = ["of\n" + name.replace("_", "\n") for name in ceilings]
    table = _table("", "GB/s\nmedian", "\nbest", "layer 0\nms", "re-\nquests", *of_ceilings)
    for case in cases:
        ratios = [case.ratios.get(name) for name in ceilings]
        table.add_row(
            case.label,
            f"{case.gb_per_s_median:.2f}",
            f"{case.gb_per_s_best:.2f}",
            f"{case.first_layer_ms_median:.2f}",
            str(case.requests or ""),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            style=_style(case),
        )
    return table


def _usage_table(cases: Sequence[CaseReport]) -> Table:
    titles = ("CPU\ns a GiB", "peak\nMiB", "growth\nMiB")
    client, server = (f"client {titles[0]}", *titles[1:]), (f"server {titles[0]}", *titles[1:])
    table = _table("", *client, *server)
    for case in cases:
        client, server = _usage(case.client), _usage(case.server)
        table.add_row(case.label, *client, *server, style=_style(case))
    return table


def _usage(process: ProcessReport | None) -> tuple[str, str, str]:
    if process is None:
        return "", "", ""
    peak, growth = process.peak_bytes / (1 << 20), process.growth_bytes / (1 << 20)
    return f"{process.cpu_s_a_gib:.3f}", f"{peak:.0f}", f"{growth:.1f}"


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right")
    return table


def _style(case: CaseReport) -> str:
    return "dim" if case.is_ceiling else ""


def _print_bars(console: Console, bars: Sequence[Bar]) -> None:
    for bar in bars:
        verdict, style = ("pass", "green") if bar.passed else ("FAIL", "bold red")
        console.print(f"{verdict}  {bar.name}: {bar.figure}", style=style, markup=False)


def _print_machine(console: Console, facts: Mapping[str, Any]) -> None:
    console.print(
        f"{facts['cpu']} x{facts['cpu_count']}, {facts['file_system']}, "
        f"Python {facts['python']}, grpcio {facts['grpcio']}, "
        f"load average {facts['load_average_1m']:.2f}",
        style="dim",
        markup=False,
    )
