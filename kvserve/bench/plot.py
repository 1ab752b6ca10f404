"""A horizontal bar chart as an SVG: no script, no font, light and dark by itself. Pure.

The bar is the median, the tick the best; for latencies, the 50th and the 99th percentile. Rows of
kvserve have the accent colour, ceilings are grey; of `metadata`, what a server knows and what not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape

from kvserve.bench.concurrency import ConcurrencyReport
from kvserve.bench.lookup import LookupReport
from kvserve.bench.metadata import MetadataReport
from kvserve.bench.planes import GeometriesReport
from kvserve.bench.readplan import OURS, ReadReport
from kvserve.bench.report import TransferReport, mib

_ROW_PX, _BAR_PX = 34, 18
_CHAR_PX = 7.4
_PLOT_PX, _VALUE_PX, _MARGIN_PX, _TOP_PX, _BOTTOM_PX = 420, 150, 16, 58, 50

# Plain colours in classes, no CSS variables: renderers that are no browsers know only those.
_STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
    .title { font-size: 15px; font-weight: 600; }
    .quiet { fill: #59636e; font-size: 12px; }
    .page { fill: #ffffff; }
    .grid { stroke: #d1d9e0; stroke-width: 1; }
    .ours { fill: #0969da; }
    .other { fill: #8c959f; }
    .tick { stroke: #1f2328; stroke-width: 2.5; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .quiet { fill: #9198a1; }
      .page { fill: #0d1117; }
      .grid { stroke: #3d444d; }
      .ours { fill: #4493f8; }
      .other { fill: #6e7681; }
      .tick { stroke: #f0f6fc; }
    }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One bar with its tick, both in the chart's unit."""

    label: str
    bar: float
    tick: float
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """`axis` names the quantity with its unit, `legend` what bar and tick are."""

    title: str
    axis: str
    legend: str
    rows: Sequence[Row]


def transfer_chart(report: TransferReport) -> Chart:
    unit = report.unit
    return Chart(
        title=f"kvserve {report.benchmark}: {unit.chunk_count} chunks x {unit.layer_count} layers "
        f"x {unit.slice_size_bytes / 1024:g} KiB",
        axis="GB/s (10⁹ bytes a second), more is better",
        legend=f"bar: median of {report.repeats}; tick: best",
        rows=[
            Row(case.label, case.gb_per_s_median, case.gb_per_s_best, not case.is_ceiling)
            for case in report.cases
        ],
    )


def geometries_chart(report: GeometriesReport) -> Chart:
    """Whole prefixes only: the rows of a request for each layer are left to the table."""
    repeats = next(iter(report.geometries.values())).repeats
    return Chart(
        title=f"kvserve {report.benchmark}: slices of {_slices(report)}",
        axis="GB/s (10⁹ bytes a second), more is better",
        legend=f"bar: median of {repeats}; tick: best",
        rows=[
            Row(
                f"{name}: {case.label}",
                case.gb_per_s_median,
                case.gb_per_s_best,
                not case.is_ceiling,
            )
            for name, of_one in report.geometries.items()
            for case in of_one.cases
            if "by_layer" not in case.name
        ],
    )


def _slices(report: GeometriesReport) -> str:
    units = [of_one.unit for of_one in report.geometries.values()]
    return ", ".join(f"{unit.slice_size_bytes / 1024:g} KiB" for unit in units)


def concurrency_chart(report: ConcurrencyReport) -> Chart:
    return Chart(
        title=f"kvserve under many clients, {mib(report.unit.size_bytes)} a fetch",
        axis="GB/s of all clients together (10⁹ bytes a second), more is better",
        legend=f"bar: median of {report.repeats}; tick: best",
        rows=[
            Row(row.label, row.gb_per_s_median, row.gb_per_s_best, not row.is_ceiling)
            for row in report.rows
        ],
    )


def lookup_chart(report: LookupReport) -> Chart:
    load = report.load
    return Chart(
        title=f"kvserve lookup beside {load.fetches_at_once} fetches of "
        f"{mib(load.fetch_size_bytes)}",
        axis="milliseconds, less is better",
        legend="bar: 50th percentile; tick: 99th",
        rows=[
            Row(row.label, row.p50_ms, row.p99_ms, row.name.startswith("lookup"))
            for row in report.latencies
        ],
    )


def metadata_chart(report: MetadataReport) -> Chart:
    latencies = [row for size in report.sizes for row in (size.unknown, size.known)]
    return Chart(
        title=f"kvserve lookup of {report.lookup_chunks} chunks, by the size of the tree",
        axis="milliseconds, less is better",
        legend="bar: 50th percentile; tick: 99th",
        rows=[
            Row(row.label, row.p50_ms, row.p99_ms, row.name.startswith("known"))
            for row in latencies
        ],
    )


def readplan_chart(report: ReadReport) -> Chart:
    unit = report.settings.unit
    return Chart(
        title=f"kvserve cold reads: {unit.chunk_count} chunks x {unit.layer_count} layers "
        f"x {unit.slice_size_bytes / 1024:g} KiB, by the latency of a read",
        axis="milliseconds, less is better",
        legend="bar: total; tick: the first layer of all chunks",
        rows=[
            Row(
                f"{it.latency_ms:g} ms: {it.plan}",
                it.total_median_ms,
                it.first_layer_median_ms,
                it.plan == OURS,
            )
            for it in report.times
        ],
    )


def render_svg(chart: Chart) -> str:
    label_px = round(_CHAR_PX * max((len(row.label) for row in chart.rows), default=0))
    left = _MARGIN_PX + label_px + 10
    head_px = _MARGIN_PX * 2 + round(8.6 * len(chart.title))
    width = max(left + _PLOT_PX + _VALUE_PX, head_px)
    bottom = _TOP_PX + _ROW_PX * len(chart.rows)
    height = bottom + _BOTTOM_PX
    step, stop = _scale(max((max(row.bar, row.tick) for row in chart.rows), default=0.0))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"  <title>{escape(chart.title)}</title>",
        f"  <desc>{escape(_description(chart))}</desc>",
        f"  <style>{_STYLE}  </style>",
        f'  <rect class="page" width="{width}" height="{height}"/>',
        f'  <text class="title" x="{_MARGIN_PX}" y="24">{escape(chart.title)}</text>',
        f'  <text class="quiet" x="{_MARGIN_PX}" y="43">{escape(chart.legend)}</text>',
    ]
    count = round(stop / step)
    for index in range(count + 1):
        x = left + _PLOT_PX * index / count
        lines += [
            f'  <line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP_PX}" y2="{bottom}"/>',
            f'  <text class="quiet" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{index * step:g}</text>",
        ]
    lines.append(
        f'  <text class="quiet" x="{left + _PLOT_PX / 2:.1f}" y="{bottom + 36}" '
        f'text-anchor="middle">{escape(chart.axis)}</text>'
    )
    for index, row in enumerate(chart.rows):
        lines += _row(row, left, _TOP_PX + _ROW_PX * index, _PLOT_PX / stop)
    return "\n".join([*lines, "</svg>", ""])


def _row(row: Row, left: int, top: int, px_per_unit: float) -> list[str]:
    middle = top + _ROW_PX / 2
    bar_top = middle - _BAR_PX / 2
    tick = left + row.tick * px_per_unit
    end = left + max(row.bar, row.tick) * px_per_unit
    return [
        f'  <text x="{left - 10}" y="{middle + 4.5:.1f}" text-anchor="end">'
        f"{escape(row.label)}</text>",
        f'  <rect class="{"ours" if row.is_ours else "other"}" x="{left}" y="{bar_top:.1f}" '
        f'width="{row.bar * px_per_unit:.1f}" height="{_BAR_PX}" rx="2"/>',
        f'  <line class="tick" x1="{tick:.1f}" x2="{tick:.1f}" y1="{bar_top - 3:.1f}" '
        f'y2="{bar_top + _BAR_PX + 3:.1f}"/>',
        f'  <text x="{end + 9:.1f}" y="{middle + 4.5:.1f}">{row.bar:.2f} '
        f'<tspan class="quiet">({row.tick:.2f})</tspan></text>',
    ]


def _scale(largest: float) -> tuple[float, float]:
    """Distance of grid lines and end of the axis: 1, 2 or 5 times a power of ten, 4 to 10 lines."""
    if largest <= 0:
        return 1.0, 1.0
    power = 10.0 ** floor(log10(largest))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if largest <= 8 * power * part)
    lines = -int(-largest // step)
    return step, step * lines


def _description(chart: Chart) -> str:
    rows = "; ".join(f"{row.label} {row.bar:.2f} (tick {row.tick:.2f})" for row in chart.rows)
    return f"{chart.axis}. {chart.legend}. {rows}."
