"""Explained variance of a critic where there is none; its numbers are in the golden records."""

import math

import torch

from proxima.core import TokenRewards
from proxima.core.value import explained_variance, value_metrics


def test_what_does_not_vary_is_left_out():
    rewards = TokenRewards(
        reward=torch.tensor([1.0, 1.0]),
        loss_mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 1, 2]),
        value=torch.zeros(2),
        group=torch.tensor([0, 0]),
    )
    assert value_metrics(rewards, torch.ones(2)) == {"returns/mean": 1.0}
    assert math.isnan(explained_variance(torch.tensor([0.0, 1.0]), torch.ones(2), rewards.loss_mask))
