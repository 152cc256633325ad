"""Figures from results."""

import pytest

from evidence.figure import Panel, draw


@pytest.mark.slow
def test_a_figure_is_the_same_at_each_drawing(tmp_path):
    lines = {name: ([1, 2, 3], [level, 0.5, 0.2], [0.1, 0.0, 0.1]) for name, level in (("cppo", 0.1), ("none", 0.3))}
    panels = [Panel(title=f"panel {i}", x="updates", y="share", lines=lines, log=i == 1) for i in range(4)]
    for name in ("a", "b"):
        draw(tmp_path / f"{name}.svg", panels)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert text.count("panel ") == 4 and "cppo" in text
