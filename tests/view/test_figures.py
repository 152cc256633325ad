"""What figures draw: panels that lie inside and apart, and curves, areas and bars of the numbers that they show."""

from itertools import pairwise

import numpy as np
import pytest

from proxima.core import Cppo
from proxima.view.chart import light
from proxima.view.comparison_files import ComparisonFigure
from proxima.view.token_plots import EXAMPLE, ThresholdFigure
from tests.experiments.runs import comparison, curve, make_sweep


@pytest.mark.slow
def test_the_panels_of_a_comparison_are_alike_and_beside_one_another(tmp_path):
    cells = {
        name: {seed: (curve([0.1, 0.5, last], reward=0.1 * seed), {}) for seed in (1, 2, 3)}
        for name, last in (("grpo", 0.8), ("cppo", 0.9))
    }
    compared = comparison(make_sweep(tmp_path, cells))
    drawing = ComparisonFigure(compared, "mine")
    width, height = drawing.size
    with drawing.opened(light) as figure:
        boxes = [axes.get_position() for axes in figure.axes]
        assert len(boxes) == len(drawing.curves) == 2
        edges = [(round(box.x0 * width, 6), round(box.x1 * width, 6)) for box in boxes]
        assert [b[0] - a[0] for a, b in pairwise(edges)] == [width / 2] and edges[0][0] == 52
        assert len({right - left for left, right in edges}) == 1
        assert edges[0][1] < edges[1][0] - 40 and edges[1][1] == width - 14  # room for the numbers of an axis
        assert all(0 < box.y0 < box.y1 < 1 for box in boxes)
        for axes, key in zip(figure.axes, drawing.curves, strict=True):
            bands = [cell.band(key) for cell in compared.cells]
            drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]
            assert drawn == [(list(band.x), list(band.mean)) for band in bands]
            assert len(axes.collections) == sum(bool(band.low) for band in bands)
        lowest = min(box.y0 for box in boxes) * height
        names = [text.get_text() for text in figure.texts]
        assert [name.split()[1] for name in names] == [cell.name for cell in compared.cells]
        places = [text.get_position()[1] * height for text in figure.texts]
        assert places == sorted(places, reverse=True) and 0 < places[-1] < places[0] < lowest


@pytest.mark.slow
def test_a_threshold_is_drawn_with_its_two_parts_and_the_tokens_that_each_masks():
    drawing = ThresholdFigure.of(EXAMPLE, Cppo())
    delta = drawing.spec.delta
    position = np.arange(1, len(drawing.weighted) + 1)
    with drawing.opened(light) as figure:
        (axes,) = figure.axes
        areas = {area.get_label(): area.get_paths()[0].vertices for area in axes.collections}
        for label, low, high in (("kept", 0.0, None), ("spent before", None, delta)):
            bound = np.maximum(drawing.allowed, 0)
            lows = np.full_like(bound, low) if low is not None else bound
            highs = np.full_like(bound, high) if high is not None else bound
            corners = {tuple(np.round(pair, 5)) for pair in areas[label].tolist()}
            expected = [(x, y) for side in (lows, highs) for x, y in zip(position, side, strict=True)]
            assert {tuple(np.round(pair, 5)) for pair in expected} == corners, label
        level = [
            line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2
        ]
        assert level == [0, delta]
        curves = {line.get_label(): line.get_ydata() for line in axes.lines if len(line.get_ydata()) == len(position)}
        assert np.array_equal(curves["threshold c, the smaller one"], drawing.allowed)
        assert np.array_equal(curves["δ + δ_b W − S"], drawing.prefix)
        bars = {bars.get_label(): bars for bars in axes.containers}
        drawn = {
            label: {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in of}
            for label, of in bars.items()
        }
        flat, masked = drawing.weighted > delta, drawing.masked
        parts = (~masked, masked & flat, masked & ~flat)
        assert all(part.any() for part in parts)
        for part, of in zip(parts, drawn.values(), strict=True):
            assert of == dict(zip(position[part].tolist(), drawing.weighted[part].tolist(), strict=True))
        (remark,) = figure.texts
        width, height = drawing.size
        x, y = remark.get_position()
        assert remark.get_text() == drawing.remark
        assert x * width == axes.get_position().x0 * width and 0 < y * height < axes.get_position().y0 * height - 20
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert left < 1 and right > len(position)
        assert low <= min(0, drawing.allowed.min()) and high > max(delta, drawing.weighted.max())
