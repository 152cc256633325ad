"""`proxima plot` as a user types it."""

import sys

import pytest

from proxima.core import Dppo, PpoClip
from proxima.view.surrogate_plot import parse_surrogate


@pytest.mark.slow
def test_several_kinds_in_one_figure(proxima, here):
    code, out, err = proxima("plot", "surrogate", "ppo_clip", "cppo", "dppo,delta=.05,divergence=binary_kl")
    assert (code, out, err) == (0, "surrogate.svg\n", "")
    text = (here / "surrogate.svg").read_text()
    for name in ("ppo_clip", "cppo", "dppo,delta=.05,divergence=binary_kl"):
        assert f">{name}</text>" in text
    assert "cppo: token 11 of 21, all the others have moved by |π − μ| = 0.045." in text


@pytest.mark.slow
def test_options(proxima, here):
    which = ("--only", "weight", "--over", "probability")
    where = ("--behavior-probability", 0.1, 0.7)
    assert proxima("plot", "surrogate", "cppo", "--out", "a.svg", *which, *where) == (0, "a.svg\n", "")
    text = (here / "a.svg").read_text()
    assert "One token, μ = 0.1, 0.7, A = ±1" in text
    assert text.count(">gradient weight, A &gt; 0<") == 2 and ">loss" not in text and "ratio π / μ" not in text


def test_fields(proxima):
    assert parse_surrogate("ppo_clip,epsilon_high=0.28,dual_clip=10") == PpoClip(epsilon_high=0.28, dual_clip=10.0)
    assert parse_surrogate("proxima.core.surrogate.cppo:Dppo,delta=.inf") == Dppo(delta=float("inf"))


@pytest.mark.slow
def test_a_bitmap(proxima, here):
    assert proxima("plot", "threshold", "--out", "a.png") == (0, "a.png\n", "")
    assert (here / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_error_names_the_extra(proxima, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = proxima("plot", "surrogate", "cppo")
    assert (code, out) == (2, "") and not (here / "surrogate.svg").exists()
    assert err == "error: a figure needs the package matplotlib; pip install 'proxima-rl[plot]'\n"
