"""The drawings: places of points, round ticks, gaps, stacking."""

import math
import re

import pytest

from proxima.view.chart import Frame, Series, _inside, bar_chart, line_chart, running_mean, ticks


def points_of(svg):
    return [[tuple(map(float, p.split(","))) for p in found.split()] for found in re.findall(r'points="([^"]+)"', svg)]


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0.0, 1.0, 5, [0, 0.5, 1.0]),
        (0.13, 0.97, 6, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.03, 0.017, 4, [-0.04, -0.02, 0.0, 0.02]),
        (1, 40, 5, [0, 10, 20, 30, 40]),
        (3, 3, 3, [0, 2, 4, 6]),
        (0, 0, 3, [-0.5, 0.0, 0.5]),
        (0, 9e6, 4, [0, 5e6, 1e7]),
    ],
)
def test_ticks(low, high, most, expected):
    assert ticks(low, high, most) == pytest.approx(expected)


def test_points_stand_where_the_values_are():
    svg = line_chart([Series(name="a", points=[(1, 0.0), (2, 0.5), (3, 1.0)])], label="A by step", unit_interval=True)
    frame = Frame(x_low=1, x_high=3, y_low=0, y_high=1)
    assert points_of(svg) == [[(46, 148), (198, 78), (350, 8)]]
    assert (frame.x(2), frame.y(0.5)) == (198, 78)
    assert 'aria-label="A by step"' in svg and 'data-from="1"' in svg and 'data-to="3"' in svg


def test_nothing_but_zeros_stand_on_the_ground():
    svg = line_chart([Series(name="a", points=[(1, 0.0), (2, 0.0)])], label="A", zero=True)
    assert points_of(svg) == [[(46, 148), (350, 148)]] and ">-" not in svg


def test_gaps_and_lonely_points():
    svg = line_chart(
        [Series(name="a", points=[(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, math.nan), (6, 4.0), (7, 4.0)])],
        label="A",
    )
    assert [len(p) for p in points_of(svg)] == [2, 2]
    assert svg.count("<circle") == 1
    assert line_chart([Series(name="a", points=[(1, None)])], label="A") == ""
    assert bar_chart([], label="B") == ""


def test_running_mean():
    points = [(float(i), float(v)) for i, v in enumerate([0, 3, 6, 0, 0, 9])]
    assert [v for _, v in running_mean(points)] == [1.5, 3, 3, 2, 3, 4.5]
    assert running_mean([(0.0, 1.0), (1.0, None), (2.0, 3.0)]) == [(0.0, 1.0), (1.0, None), (2.0, 3.0)]


def test_bars_stack_and_are_averaged():
    series = [Series(name="a", points=[(1, 1.0), (2, 3.0)]), Series(name="b", points=[(1, 1.0), (2, 1.0)], color="red")]
    svg = bar_chart(series, label="B")
    heights = [float(h) for h in re.findall(r'<rect .*?height="([\d.]+)"', svg)]
    assert heights == pytest.approx([35, 105, 35, 35])  # 4 is the full 140
    tops = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', svg)]
    assert tops == pytest.approx([113, 43, 78, 8])
    many = bar_chart([Series(name="a", points=[(i, float(i % 2)) for i in range(200)])], label="B", most=50)
    assert many.count("<rect") == 50


def test_whiskers():
    svg = line_chart([Series(name="h", points=[(0, 0.5)], spread=[(0.25, 0.75)])], label="H", unit_interval=True)
    assert re.search(r'class="whisker" stroke="var\(--a\)" x1="46.00" x2="46.00" y1="113.00" y2="43.00"', svg)


def test_a_band_is_cut_where_its_line_leaves_the_axis():
    """From 0.5 to 2.5 the upper line passes 1 a quarter of the way; it comes back the same way."""
    assert _inside([0.0, 4.0, 8.0], [0.5, 2.5, 0.5], 0.0, 1.0) == [
        (0.0, 0.5),
        (1.0, 1.0),
        (4.0, 1.0),
        (7.0, 1.0),
        (8.0, 0.5),
    ]
    assert _inside([0.0, 4.0], [2.0, -2.0], 0.0, 1.0) == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.0), (4.0, 0.0)]
    assert _inside([0.0, 4.0], [0.25, 0.75], 0.0, 1.0) == [(0.0, 0.25), (4.0, 0.75)]
