"""Curves of surrogates: the numbers against formulas done by hand, and the figures as files."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from proxima.core import Cppo, Dppo, Drpo, Gspo, PpoClip, Reinforce
from proxima.core.surrogate import SURROGATES
from proxima.core.surrogate.whole_batch import ClipCov, KlCov, M2po
from proxima.view.chart import svg_file, write_figure
from proxima.view.surrogate_plot import POINTS, curve, draw, remark_on


def at(c, x):
    """Loss and weight at the point nearest to x."""
    i = int((c.x - x).abs().argmin())
    return float(c.x[i]), float(c.loss[i]), float(c.weight[i])


def test_ppo_clip_over_the_ratio():
    up, down = (curve(PpoClip(), "ratio", 0.3, sign) for sign in (1, -1))
    r, loss, weight = at(up, 1.1)
    assert loss == pytest.approx(-r) and weight == pytest.approx(r)
    assert at(up, 1.5)[1:] == (pytest.approx(-1.2), 0.0)  # clipped at 1.2
    r, loss, weight = at(down, 2.0)
    assert loss == pytest.approx(r) and weight == pytest.approx(r)  # no clip for A < 0 and r > 1
    assert at(down, 0.5)[1:] == (pytest.approx(0.8), 0.0)


@pytest.mark.slow
def test_at_the_behavior_policy_every_weight_but_a_pulls_is_one():
    for kind, cls in SURROGATES.items():
        for sign in (1, -1):
            x, _, weight = at(curve(cls(), "ratio", 0.3, sign), 1.0)
            assert x == 1.0, kind
            assert weight == pytest.approx(1.0), kind


def test_drpo_over_the_probability_is_its_docstrings_gradient():
    c = curve(Drpo(epsilon=0.2), "probability", 0.3, 1)
    ratio = c.x / 0.3
    torch.testing.assert_close(c.weight, ratio * (1 - (ratio - 1).sign() * (c.x - 0.3).abs() / 0.2))
    assert float(c.x[-1]) == pytest.approx(0.999)


def test_the_ratio_ends_where_the_probability_does():
    assert float(curve(PpoClip(), "ratio", 0.8, 1).x[-1]) == pytest.approx(0.999 / 0.8)
    assert float(curve(PpoClip(), "ratio", 0.1, 1).x[-1]) == pytest.approx(2.5)


def last_kept(c):
    return max(x for x, w in zip(c.x.tolist(), c.weight.tolist(), strict=True) if w > 0)


def test_cppo_is_drawn_within_its_completion():
    """Ten tokens before it at .045, P90 = .045, so the budget is .04: c = .15 - .005 W and the token may move by c /
    w."""
    weights = [1 - 0.2 * t / 20 for t in range(21)]
    allowed = (0.15 - 0.005 * sum(weights[:10])) / weights[10]
    step = 2.5 * 0.3 / (POINTS - 1)
    c = curve(Cppo(), "ratio", 0.3, 1)
    assert last_kept(c) * 0.3 - 0.3 == pytest.approx(allowed, abs=step)
    assert remark_on(Cppo()) == "token 11 of 21, all the others have moved by |π − μ| = 0.045"


@pytest.mark.slow
def test_what_the_batch_decides_is_decided_as_the_remark_says():
    clip = curve(PpoClip(), "ratio", 0.3, 1)
    torch.testing.assert_close(curve(ClipCov(), "ratio", 0.3, 1).weight, clip.weight)
    pulled = curve(KlCov(coefficient=0.5), "ratio", 0.3, 1)
    r, loss, weight = at(pulled, 2.0)
    assert loss == pytest.approx(-r + 0.5 * math.log(r)) and weight == pytest.approx(r - 0.5)
    # one of four: dropped once l^2 / 4 reaches .04, so at r = exp(.4)
    step = 2.5 / (POINTS - 1)
    assert last_kept(curve(M2po(), "ratio", 0.3, 1)) == pytest.approx(math.exp(0.4), abs=step)
    assert "selected" in remark_on(KlCov()) and "four" in remark_on(M2po())


def test_sequence_level_ones_say_so():
    assert remark_on(Gspo()) == "a sequence of this one token" == remark_on(SURROGATES["vespo"]())
    assert remark_on(PpoClip()) == ""


@pytest.mark.slow
def test_the_svg_is_a_file_of_its_own(tmp_path):
    drawing = draw({"ppo_clip": PpoClip(), "a<b": Dppo()}, (0.3, 0.7))
    assert [[p.title for p in row] for row in drawing.rows] == [
        ["loss, A > 0", "loss, A < 0", "gradient weight, A > 0", "gradient weight, A < 0"]
    ] * 3
    assert [row[0].x_name for row in drawing.rows] == [
        "ratio π / μ",
        "probability π, μ = 0.3",
        "probability π, μ = 0.7",
    ]
    out = write_figure(drawing, tmp_path / "a.svg")
    text = out.read_text()
    root = ElementTree.fromstring(text)  # names are escaped, in the title too
    assert len([e for e in root.iter() if e.tag.endswith("}clipPath")]) == 12
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    assert ">ppo_clip</text>" in text and ">a&lt;b</text>" in text
    assert not re.search(r"nan|inf(?!o)", text)


def test_a_jump_interrupts_the_line():
    (row,) = draw({"dppo": Dppo(), "reinforce": Reinforce()}, quantities=["weight"], over=["ratio"]).rows
    above = row[0]
    assert [len(pieces) for pieces in above.lines] == [2, 1]
    (kept, dropped), _ = above.lines
    assert kept[-1][0] == pytest.approx(1.5, abs=0.01) and kept[-1][1] == pytest.approx(1.5, abs=0.01)
    assert dropped[0][1] == 0.0


@pytest.mark.slow
def test_a_straight_line_needs_few_points():
    text = svg_file(draw({"reinforce": Reinforce()}, quantities=["weight"], over=["ratio"]))
    assert max(data.count("L") for data in re.findall(r' d="([^"]*)"', text)) < 10


def test_a_log_is_no_jump():
    (row,) = draw({"reinforce": Reinforce()}, quantities=["loss"], over=["ratio"]).rows
    assert [len(pieces) for panel in row for pieces in panel.lines] == [1, 1]


def test_too_many_curves_are_refused():
    with pytest.raises(ValueError, match="9 surrogates given; draw 1 to 8"):
        draw({str(i): PpoClip() for i in range(9)})
