"""Scalar heads, penalties, gradient weights, proximal interpolation."""

import math

import numpy as np
import pytest
import torch

from proxima.core import PpoClip, ValueLoss, gradient_weight, interpolated_proximal
from proxima.core.penalty import K1, K2, K3, Abs, EntropyBonus
from tests.core.batches import packed


def test_value_loss_is_clipped_around_the_rollouts_estimate() -> None:
    value = torch.tensor([1.0, 0.1, math.nan]).requires_grad_()
    mask = torch.tensor([True, True, False])
    loss, metrics = ValueLoss(0.2)(value, torch.zeros(3), torch.tensor([2.0, 0.0, 5.0]), mask)
    assert loss.tolist() == pytest.approx([0.5 * 1.8**2, 0.005, 0])  # clipped to .2: farther from 2, so it counts
    assert metrics["value_clip_fraction"].value == 0.5
    assert torch.autograd.grad(loss.sum(), value)[0].tolist() == pytest.approx([0, 0.1, 0])
    assert ValueLoss(math.inf, "huber", delta=1.0)(
        torch.tensor([3.0]), torch.zeros(1), torch.zeros(1), torch.tensor([True])
    )[0].tolist() == [2.5]


def test_kl_with_a_limit_and_what_an_unbiased_one_needs() -> None:
    b = packed(log_prob=torch.tensor([-1.0]), reference_log_prob=torch.tensor([-1.5]))
    assert K3(1.0, limit=0.05)(b).tolist() == pytest.approx([0.05])
    for kind in (K1, K2, K3, Abs):
        assert kind(unbiased=True).needs == {"proximal_log_prob", "reference_log_prob"}


def test_an_entropy_bonus_needs_a_gradient() -> None:
    log_prob = torch.tensor([-1.0], requires_grad=True)
    with pytest.raises(ValueError, match="carries no gradient"):
        EntropyBonus(0.1)(packed(log_prob=log_prob, entropy=torch.tensor([0.7])))


def test_a_gradient_weight_divides_by_the_advantage() -> None:
    log_prob = torch.full((4,), math.log(0.25), dtype=torch.float64)
    with pytest.raises(ValueError, match="an advantage is 0"):
        gradient_weight(PpoClip(), log_prob, log_prob, torch.zeros(4).double())


def test_a_version_from_the_future_is_refused() -> None:
    policy = torch.full((2,), -1.0)
    with pytest.raises(ValueError, match="policy_version 5 is later than current_version 4"):
        interpolated_proximal(policy, policy, torch.tensor([5, 4]), 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 2e-6)])
@pytest.mark.parametrize("kind", ["loglinear", "linear"])
def test_the_share_of_a_proximal_policy_is_as_precise_as_the_log_probs(kind, dtype, tolerance) -> None:
    now, versions = 12, np.arange(-1, 13)
    draw = np.random.default_rng(9)
    mu, pi = (-draw.gamma(1.5, 2.0, len(versions)) for _ in range(2))
    age = now - versions
    share = np.where((versions >= 0) & (age > 0), (age - 1) / np.maximum(age, 1), 0.0)  # 1/2, 2/3, 3/4 ...
    between = np.log(np.exp(mu) + share * (np.exp(pi) - np.exp(mu)))
    expected = mu + share * (pi - mu) if kind == "loglinear" else between
    inputs = (torch.tensor(x, dtype=dtype) for x in (mu, pi))
    ours = interpolated_proximal(*inputs, torch.tensor(versions), now, kind)
    assert ours.dtype == dtype and np.abs(ours.numpy() / expected - 1).max() <= tolerance
