"""KL in the reward: numbers by hand, what lies outside the loss, and the coefficient that follows the KL."""

import math
from dataclasses import replace

import pytest
import torch

from proxima.core.reward_kl import AdaptiveCoefficient, RewardKl

NAN = math.nan
CU = torch.tensor([0, 3, 7, 8])
MASK = torch.tensor(
    [1, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool
)  # a hole, padding, and a completion without a loss token
OLD = torch.tensor([-1.0, -2.0, -0.5, -1.0, NAN, -3.0, NAN, -1.0])
REFERENCE = torch.tensor([-1.5, -1.0, -0.5, -3.0, -1.0, -2.0, NAN, NAN])
SCORE = torch.tensor([1.0, -2.0, 0.5])


def shaped(spec):
    return spec(SCORE, OLD, REFERENCE, MASK, CU)


def test_k3_may_be_clamped():
    rewards = shaped(RewardKl(1.0, "k3", limit=0.5))
    assert rewards.reward.tolist() == pytest.approx(
        [0.5 - math.exp(-0.5), -0.5, 1.0, -0.5, 0.0, -2.5, 0.0, 0.0], abs=1e-6
    )


def test_the_coefficient_of_an_adaptive_run_stands_in_for_the_start_value():
    spec = RewardKl(0.1, adaptive=AdaptiveCoefficient(target=0.5, horizon=100))
    later = replace(spec, coefficient=0.2)
    assert shaped(later).paid.tolist() == pytest.approx((2 * shaped(spec).paid).tolist())
    assert later.after(kl=5.0, samples=10).coefficient == pytest.approx(0.2 * 1.02)
    assert later.after(kl=0.45, samples=10).coefficient == pytest.approx(0.2 * 0.99)
    for kl, factor in ((0.0, 0.8), (5.0, 1.2)):  # however many completions a step has, beta keeps its sign
        assert later.after(kl, samples=600).coefficient == pytest.approx(0.2 * factor)
    assert RewardKl(0.1).after(kl=5.0, samples=10) == RewardKl(0.1)
