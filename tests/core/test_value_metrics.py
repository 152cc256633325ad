"""Explained variance of a critic, beside that of the mean of the prompt's other completions."""

import math

import pytest
import torch

from proxima.core.advantage import TokenRewards
from proxima.core.value import explained_variance, value_metrics


def test_explained_variance_by_hand():
    target, mask = torch.tensor([0.0, 1.0, 0.0, 1.0, 9.0]), torch.tensor([True] * 4 + [False])
    assert explained_variance(target, target, mask) == 1
    assert explained_variance(torch.full_like(target, 7.0), target, mask) == 0
    assert explained_variance(1 - target, target, mask) == pytest.approx(-3)
    assert math.isnan(explained_variance(target, torch.ones(5), mask))


def test_the_baseline_has_not_seen_the_completion():
    """Two prompts of two completions, right and wrong: the mean of the others foretells the opposite. And a prompt of
    one completion has no baseline."""
    rewards = TokenRewards(
        reward=torch.tensor([0.0, 1.0, 0.0, 0.0, 5.0, 1.0, 0.0]).double(),
        loss_mask=torch.tensor([True, True, True, True, False, True, True]),
        cu_seqlens=torch.tensor([0, 2, 4, 6, 7]),
        value=torch.tensor([0.5, 1.0, 0.5, 0.0, 9.0, 0.5, 0.0]),
        group=torch.tensor([3, 3, 8, 9]),
    )
    metrics = value_metrics(rewards, torch.tensor([1.0, 1.0, 0.0, 0.0, 7.0, 2.0, 2.0]))
    target = torch.tensor([1.0, 1, 0, 0, 1, 0]).double()
    error = target - torch.tensor([0.5, 1, 0.5, 0, 0.5, 0]).double()
    assert metrics["value/explained_variance"] == pytest.approx(float(1 - error.var() / target.var()))
    assert metrics["value/explained_variance_prompt_mean"] == pytest.approx(-3)
    assert metrics["returns/mean"] == pytest.approx(1.0)


def test_what_does_not_vary_is_left_out():
    rewards = TokenRewards(
        reward=torch.tensor([1.0, 1.0]),
        loss_mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 1, 2]),
        value=torch.zeros(2),
        group=torch.tensor([0, 0]),
    )
    assert value_metrics(rewards, torch.ones(2)) == {"returns/mean": 1.0}
