"""Figures of `proxima plot`: colours that every program reads, deterministic text."""

import re

import pytest

from proxima.core import Cppo
from proxima.view.chart import CELLS, PALETTE, cell_colors, svg_file
from proxima.view.token_plots import EXAMPLE, ThresholdFigure


@pytest.mark.slow
def test_colours_are_plain_with_dark_rules_and_the_text_deterministic():
    def svg():
        return svg_file(ThresholdFigure.of(EXAMPLE, Cppo()))

    drawn = svg().partition("</style>")[2]
    assert svg() == svg() and not re.search("var\\(|currentColor|foreignObject|#fe00", svg())
    assert {*re.findall(r"#[0-9a-f]{6}", drawn)} <= {light for light, _ in PALETTE.values()}
    assert f"fill: {PALETTE['muted'][0]}" in drawn and f"stroke: {PALETTE['b'][0]}" in drawn
    assert "http" not in drawn and "font-family" not in drawn and "date" not in drawn
    css = svg().partition("<style>")[2].partition("</style>")[0]
    replaced = f'[style*="stroke: {PALETTE["b"][0]}"]{{stroke:{PALETTE["b"][1]}!important}}'
    assert css.startswith("@media (prefers-color-scheme: dark) {") and replaced in css


def test_cells_have_the_colours_of_surrogates():
    css = cell_colors()
    assert len(CELLS) == 8 and all(f"--{name}: light-dark({', '.join(PALETTE[name])});" in css for name in CELLS)
