"""Surrogates: worked examples and limits."""

import math

import pytest
import torch

from proxima.core import Cispo, Cppo, Dppo, Drpo, PpoClip, Spo
from proxima.core.divergence import divergence
from proxima.laws.batches import make_batch
from tests.core.batches import of_probabilities


def test_cispo_has_no_lower_bound_from_one_on() -> None:
    b = make_batch([6, 3], seed=1, spread=1.0)
    one, ten = (Cispo(low, 0.2)(b) for low in (1.0, 10.0))
    assert torch.equal(one.loss, ten.loss) and torch.equal(one.keep, ten.keep)


@pytest.mark.parametrize("seed", range(5))
def test_limits(seed: int) -> None:
    b = make_batch([6, 1, 0, 9, 3], seed=seed, spread=1.0)
    plain = PpoClip(epsilon_low=1.0, epsilon_high=math.inf)(b).loss
    for spec in (
        Cppo(delta=math.inf, delta_b=math.inf),
        Dppo(delta=math.inf),
        Drpo(epsilon=math.inf),
        Spo(epsilon=math.inf),
    ):
        assert torch.equal(spec(b).loss, plain) and torch.equal(spec(b).keep, b.loss_mask)
    for kind in ("binary_tv", "binary_kl"):
        limit = Cppo(delta=0.1, w_min=1.0, delta_b=math.inf, divergence=kind)(b)
        assert torch.equal(limit.keep, Dppo(delta=0.1, divergence=kind)(b).keep)
        assert 0 < int(limit.keep.sum()) < int(b.loss_mask.sum())


def test_capped_dppo_has_the_gradient_of_the_ratio_form_below_its_cap() -> None:
    for cap, slope in ((20.0, -2.0), (1.5, -1.5)):
        b = of_probabilities([0.2], [0.1])
        b.log_prob.requires_grad_()
        Dppo(delta=0.5, ratio_cap=cap)(b).loss.sum().backward()
        assert b.log_prob.grad.tolist() == pytest.approx([slope])


def test_binary_kl_of_a_certain_token_is_finite() -> None:
    b = of_probabilities([1.0, 0.5], [0.5, 1.0])
    keep = Dppo(divergence="binary_kl", delta=0.05)(b).keep
    assert keep.tolist() == [False, True]


def test_a_token_tied_with_the_kth_has_a_bucket_of_its_own() -> None:
    """μ .4 .4 .2, π .2 .7 .1; the engine broke the tie for token 3, and token 5 was sampled."""
    ids = {"token": torch.tensor([5, 3]), "top_k": torch.tensor([[3], [3]])}
    top = {"behavior_top_k_log_prob": torch.tensor([[0.4], [0.4]]), "top_k_log_prob": torch.tensor([[0.2], [0.2]])}
    b = of_probabilities([0.7, 0.2], [0.4, 0.4], **ids, **{name: x.double().log() for name, x in top.items()})
    assert divergence(b, "topk_tv").tolist() == pytest.approx([0.5 * (0.2 + 0.3 + 0.1), 0.2])
    assert divergence(b, "topk_kl").tolist() == pytest.approx(
        [0.4 * math.log(2) + 0.4 * math.log(4 / 7) + 0.2 * math.log(2), 0.4 * math.log(2) + 0.6 * math.log(0.75)]
    )
