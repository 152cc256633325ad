"""The drawings: positions of points, round ticks, gaps, stacking, colours as variables, deterministic text."""

import math
import re

import pytest

from proxima.view.chart import PALETTE, Series, bar_chart, line_chart, palette_css

GROUP = r'<g class="{}" data-series="(\d+)">(.*?)</g>'


def paths(svg, kind):
    """The points of each path of the groups of a kind; a path's pieces are apart."""
    collected = []
    for _, group in re.findall(GROUP.format(kind), svg):
        for data in re.findall(r' d="([^"]*)"', group):
            for piece in data.split("M")[1:]:
                numbers = [float(n) for n in re.findall(r"-?[\d.]+", piece)]
                collected.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
    return collected


def data_of(svg):
    return {name: float(value) for name, value in re.findall(r'data-(\w+)="([-.\de]+)"', svg.split(">")[0])}


def tick_labels(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0", "0.5", "1"]),
        (-0.03, 0.017, ["-0.04", "-0.02", "0", "0.02"]),
        (1, 40, ["0", "20", "40"]),
        (3, 3, ["0", "2", "4", "6"]),
        (0, 9e6, ["0", "5,000,000", "10,000,000"]),
    ],
)
def test_the_axis_ends_at_round_numbers_that_span_the_values(low, high, expected):
    svg = line_chart([Series(points=[(1, low), (1, high)])], label="A")
    labels = tick_labels(svg)[1:]  # the first is the step
    data = data_of(svg)
    assert data["low"] <= low <= high <= data["high"]
    if low != high:
        assert labels == expected
    assert float(labels[0].replace(",", "")) == data["low"] and float(labels[-1].replace(",", "")) == data["high"]


def test_points_are_where_the_values_are():
    svg = line_chart([Series(points=[(1, 0.0), (2, 0.5), (3, 1.0)])], label="A by step", ends=(0.0, 1.0))
    assert paths(svg, "line") == [[(46, 148), (198, 78), (350, 8)]]
    assert 'aria-label="A by step"' in svg and 'role="img"' in svg
    expected = {"left": 46, "right": 350, "top": 8, "bottom": 148, "from": 1, "to": 3, "low": 0, "high": 1}
    assert data_of(svg) == expected


def test_zeros_alone_are_at_the_bottom():
    svg = line_chart([Series(points=[(1, 0.0), (2, 0.0)])], label="A", zero=True)
    assert paths(svg, "line") == [[(46, 148), (350, 148)]] and ">-" not in svg


def test_gaps_and_single_points():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, math.nan), (6, 4.0), (7, 4.0)]
    svg = line_chart([Series(points=points)], label="A")
    assert [len(p) for p in paths(svg, "line") if len(p) > 1] == [2, 2]
    assert svg.count("<use") == 1
    assert line_chart([Series(points=[(1, None)])], label="A") == ""
    assert bar_chart([], label="B") == ""


def test_a_single_step():
    svg = line_chart([Series(points=[(1, 0.25)])], label="A", zero=True)
    assert svg.count("<use") == 1 and data_of(svg)["from"] == 1
    assert tick_labels(svg)[0] == "1"


def test_a_smooth_series_is_drawn_twice():
    points = [(float(i), float(i % 2)) for i in range(20)]
    svg = line_chart([Series(points=points, smooth=True)], label="A")
    (raw,), (line,) = paths(svg, "raw"), paths(svg, "line")
    assert len(raw) == len(line) == 20
    assert {y for _, y in raw} == {8.0, 148.0} and max(y for _, y in line) < 148


def heights(svg):
    """(height, top) of each bar, in drawing order."""
    drawn = []
    for data, style in re.findall(r'<path d="([^"]*)" style="fill: (var[^"]*)"', svg):
        y = [float(n) for n in re.findall(r"-?[\d.]+", data)][1::2]
        drawn.append((round(max(y) - min(y), 1), round(min(y), 1), style))
    return drawn


def test_bars_stack_and_are_averaged():
    series = [Series(points=[(1, 1.0), (2, 3.0)]), Series(points=[(1, 1.0), (2, 1.0)], color="b")]
    bars = heights(bar_chart(series, label="B"))
    assert [h for h, _, _ in bars] == pytest.approx([35, 105, 35, 35])  # 4 is the full 140
    assert [top for _, top, _ in bars] == pytest.approx([113, 43, 78, 8])
    assert [color for _, _, color in bars] == ["var(--a)"] * 2 + ["var(--b)"] * 2
    many = bar_chart([Series(points=[(i, float(i % 2)) for i in range(200)])], label="B", most=50)
    assert len(heights(many)) == 50


def test_whiskers():
    svg = line_chart([Series(points=[(0, 0.5)], spread=[(0.25, 0.75)])], label="H", ends=(0.0, 1.0))
    assert paths(svg, "whisker") == [[(46, 113), (46, 43)]]
    assert re.search(GROUP.format("whisker"), svg)[2].count("stroke: var(--a)") == 1


def test_a_band_is_cut_off_at_the_edge_of_the_plot():
    series = Series(points=[(0.0, 0.5), (4.0, 0.5)], band=[(0.4, 0.6), (-2.0, 3.0)])
    svg = line_chart([series], label="B", within=(0.0, 1.0))
    (clip,) = set(re.findall(r'clip-path="url\(#([^)]+)\)"', svg))
    assert re.search(rf'<clipPath id="{clip}"><rect x="46" y="8" width="304" height="140"/>', svg)
    (band,) = paths(svg, "band")
    assert min(y for _, y in band) < 8 and max(y for _, y in band) > 148
    assert data_of(svg)["low"] == 0 and data_of(svg)["high"] == 1


def test_colours_are_variables_for_both_schemes_and_the_text_is_deterministic():
    def svg():
        return line_chart([Series(points=[(1, 0.0), (2, 1.0)], color="d", band=[(0, 1), (0, 1)])], label="A")

    assert svg() == svg()
    assert "var(--d)" in svg() and "var(--muted)" in svg() and not re.search(r"#[0-9a-f]{6}", svg())
    assert "http" not in svg() and "font-family" not in svg() and "date" not in svg()
    css = palette_css(":root")
    assert all(css.count(f"--{name}:") == 2 for name in PALETTE) and "prefers-color-scheme: dark" in css


def test_clip_paths_of_two_charts_have_two_names():
    """A chart that is not displayed must not define the clip path of one that is."""
    series = [Series(points=[(1, 0.0), (2, 1.0)], band=[(0, 1), (0, 1)])]
    first, second = (re.findall(r'<clipPath id="([^"]+)"', line_chart(series, label=label)) for label in "AB")
    assert first and second and not set(first) & set(second)
