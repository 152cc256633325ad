"""Losses of the difference between chosen and rejected: smoothing, divergences, overflow."""

import math

import pytest
import torch

from proxima.core.preference import PREFERENCES
from tests.core.preference.pairs import pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_discopop_is_finite_where_exp_overflows(dtype: torch.dtype) -> None:
    """exp(-x) σ(x/τ) is exp((1/τ - 1) x) for x -> -inf, but inf · 0 as a product: from x = -89 in float32."""
    for x in (-88.0, -100.0, -2000.0):
        chosen = torch.tensor([x * 10], dtype=dtype, requires_grad=True)
        loss = PREFERENCES["discopop"]()(pairs(chosen, torch.zeros(1, dtype=dtype)))
        assert float(loss.detach()) == pytest.approx(-x)  # -log σ(x), as the second term vanishes
        assert float(torch.autograd.grad(loss.sum(), chosen)[0]) == pytest.approx(-0.1)
    wide = PREFERENCES["discopop"](tau=2.0)(pairs([-10.0], [0.0]))  # x = -1
    assert float(wide) == pytest.approx(math.log1p(math.e) / (1 + math.exp(-0.5)) + math.e / (1 + math.exp(0.5)))


def test_sigmoid_smooths() -> None:
    x = 0.1 * 2
    smoothed = 0.9 * math.log1p(math.exp(-x)) + 0.1 * math.log1p(math.exp(x))
    assert float(PREFERENCES["sigmoid"](label_smoothing=0.1)(pairs([-1.0], [-3.0]))) == pytest.approx(smoothed)


def test_alpha_divergence_has_its_limit() -> None:
    p, spec = pairs([-1.0, -40.0], [-3.0, -2.0]), PREFERENCES["sigmoid"]
    reverse_kl = spec()(p)
    assert spec(divergence="alpha", alpha=1.0)(p).tolist() == reverse_kl.tolist()
    for alpha in (1 - 1e-9, 1 + 1e-9):
        assert spec(divergence="alpha", alpha=alpha)(p).tolist() == pytest.approx(reverse_kl.tolist(), rel=1e-6)


@pytest.mark.parametrize("divergence", [{"divergence": "forward_kl"}, {"divergence": "alpha", "alpha": 0.0}])
def test_a_divergence_is_finite_where_exp_overflows(divergence) -> None:
    """u = e^-200 counts as e^-80: 1 - 1/u is finite in float32, as is beta times it."""
    loss = PREFERENCES["sigmoid"](**divergence)(pairs([-200.0], [0.0]))
    assert float(loss) == pytest.approx(0.1 * math.exp(80), rel=1e-5)
