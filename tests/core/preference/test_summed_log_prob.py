"""The log-prob of a completion."""

import math

import pytest
import torch

from proxima.core.preference.protocol import completion_log_prob, wpo_weight


def test_a_completion_without_a_token_has_a_log_prob_and_a_weight() -> None:
    log_prob, edges = torch.tensor([-1.0, -2.0, -4.0, -8.0, math.nan]), torch.tensor([0, 4, 5])
    mask = torch.tensor([False, True, True, True, False])
    assert completion_log_prob(log_prob, mask, edges, torch.tensor([1, 3]), alpha=0.5).tolist() == [-2 - 2 - 4.0, 0.0]
    weight = wpo_weight(log_prob, torch.full((5,), -0.5), mask, edges)
    assert weight.tolist() == pytest.approx([math.exp((-2 - 4 - 8) / 3 + 0.5), 1.0])
