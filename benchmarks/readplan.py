"""Time to the first layer and in all, by the plan of reads, with a latency for each read.

    python benchmarks/readplan.py --plot readplan.svg --check

`kvserve/bench/readplan.py` says what is compared. `--check`: exit status 1 if the server's plan is
worse than the better of the two simple ones by more than a tenth, at any latency, on either time.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from kvserve.bench.plot import readplan_chart, render_svg
from kvserve.bench.readplan import LATENCIES_MS, RATIO_MAX, ReadReport, ReadSettings, bench_readplan
from kvserve.bench.unit import WorkUnit
from kvserve.config import StoreConfig


def _arguments() -> argparse.Namespace:
    unit = WorkUnit()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=unit.chunk_count)
    parser.add_argument("--layers", type=int, default=unit.layer_count)
    parser.add_argument("--slice-bytes", type=int, default=unit.slice_size_bytes)
    parser.add_argument("--repeats", type=int, default=9, help="measured rounds")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=LATENCIES_MS)
    parser.add_argument("--threads", type=int, default=StoreConfig().io_threads)
    parser.add_argument("--root", type=Path, help="where the chunk files go; default: temp")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="write a bar chart to this SVG file")
    parser.add_argument("--check", action="store_true", help="exit status 1 if the bar is missed")
    return parser.parse_args()


def _print(report: ReadReport) -> None:
    for row in report.times:
        sys.stdout.write(
            f"{row.latency_ms:5g} ms  {row.plan:24}"
            f"  first layer {row.first_layer_median_ms:8.1f} ms"
            f"  total {row.total_median_ms:8.1f} ms\n"
        )
    for it in report.ratios():
        sys.stdout.write(
            f"{it.latency_ms:5g} ms  ours to the better of the two: first layer "
            f"{it.first_layer:.2f}, total {it.total:.2f} (at most {RATIO_MAX:.2f})\n"
        )


def main() -> int:
    arguments = _arguments()
    settings = ReadSettings(
        WorkUnit(arguments.chunks, arguments.layers, arguments.slice_bytes),
        arguments.repeats,
        tuple(arguments.latency_ms),
        arguments.threads,
    )
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-", dir=arguments.root) as directory:
        report = asyncio.run(bench_readplan(settings, Path(directory), lambda _: None))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report.to_json(), indent=2) + "\n", "utf-8")
    if arguments.plot is not None:
        arguments.plot.write_text(render_svg(readplan_chart(report)), "utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    else:
        _print(report)
    return int(arguments.check and not all(it.passed for it in report.ratios()))


if __name__ == "__main__":
    sys.exit(main())
