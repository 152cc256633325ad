"""Figures of `proxima plot`: colours as variables, deterministic text."""

import re

from proxima.core import Cppo
from proxima.view.chart import svg_file
from proxima.view.palette import CELLS, PALETTE, cell_colors
from proxima.view.threshold_plot import EXAMPLE, ThresholdFigure


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
