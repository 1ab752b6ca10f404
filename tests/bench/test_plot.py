"""The chart: well-formed, readable in light and dark, and true to its numbers."""

from xml.etree import ElementTree

import pytest

from kvserve.bench.plot import Chart, Row, render_svg

SVG = "{http://www.w3.org/2000/svg}"
CHART = Chart(
    title="fetch <64 & more>",
    axis="GB/s",
    legend='bar: "median"',
    rows=[Row("kvserve", 1.0, 1.5, True), Row("memcpy & <co>", 4.0, 4.5, False)],
)


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(render_svg(chart))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_labels_values_and_unit_are_there() -> None:
    found = texts(parsed(CHART))
    for wanted in (CHART.title, CHART.axis, CHART.legend, "kvserve", "memcpy & <co>"):
        assert wanted in found
    assert "1.00 (1.50)" in found
    assert "4.00 (4.50)" in found


def test_light_and_dark() -> None:
    style = parsed(CHART).find(f"{SVG}style")
    assert style is not None
    assert "@media (prefers-color-scheme: dark)" in (style.text or "")


def test_bars_are_as_long_as_their_values() -> None:
    bars = {
        bar.get("class"): float(bar.get("width", "0"))
        for bar in parsed(CHART).iter(f"{SVG}rect")
        if bar.get("class") != "page"
    }
    assert bars["other"] == pytest.approx(4 * bars["ours"], abs=0.5)


def test_the_tick_is_right_of_the_bar_and_inside_the_picture() -> None:
    root = parsed(CHART)
    width = float(root.get("width", "0"))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("class") != "page"]
    ticks = [line for line in root.iter(f"{SVG}line") if line.get("class") == "tick"]
    assert len(bars) == len(ticks) == len(CHART.rows)
    for bar, tick in zip(bars, ticks, strict=True):
        end = float(bar.get("x", "0")) + float(bar.get("width", "0"))
        assert end < float(tick.get("x1", "0")) < width


@pytest.mark.parametrize("largest", [0.0, 1e-6, 0.03, 0.8, 1.0, 7.9, 8.1, 9.99, 19.2, 12345.0])
def test_any_scale(largest: float) -> None:
    root = parsed(Chart("t", "a", "l", [Row("row", largest / 2, largest, True)]))
    grid = [line for line in root.iter(f"{SVG}line") if line.get("class") == "grid"]
    assert 2 <= len(grid) <= 11


def test_no_rows() -> None:
    assert texts(parsed(Chart("empty", "a", "l", [])))
