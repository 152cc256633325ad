"""Figures of `proxima plot`: round ticks, colours as variables, deterministic text."""

import re

import pytest

from proxima.core.surrogate import Cppo
from proxima.view.chart import chart_axes, new_figure, svg_file
from proxima.view.palette import CELLS, PALETTE, cell_colors
from proxima.view.threshold_plot import EXAMPLE, ThresholdFigure


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0", "0.5", "1"]),
        (-0.03, 0.017, ["-0.04", "-0.02", "0", "0.02"]),
        (1, 40, ["0", "20", "40"]),
        (0, 9e6, ["0", "5,000,000", "10,000,000"]),
    ],
)
def test_the_axis_ends_at_round_numbers_that_span_the_values(low, high, expected):
    with new_figure((360, 170), "a") as figure:
        axes = chart_axes(figure, [1, 1], (low, high))
        assert [label.get_text() for label in axes.get_yticklabels()] == expected
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1"]
    least, most = axes.get_ylim()
    assert least <= low <= high <= most


def test_colours_are_variables_for_both_schemes_and_the_text_is_deterministic():
    def svg():
        return svg_file(ThresholdFigure.of(EXAMPLE, Cppo()))

    drawn = svg().partition("</style>")[2]
    assert svg() == svg() and "var(--b)" in drawn and "var(--muted)" in drawn and not re.search(r"#[0-9a-f]{6}", drawn)
    assert "http" not in drawn and "font-family" not in drawn and "date" not in drawn
    css = svg().partition("<style>")[2].partition("</style>")[0]
    assert all(css.count(f"--{name}:") == 2 for name in PALETTE) and "prefers-color-scheme: dark" in css


def test_cells_have_the_colours_of_surrogates():
    css = cell_colors()
    assert len(CELLS) == 8 and all(f"--{name}: light-dark({', '.join(PALETTE[name])});" in css for name in CELLS)
