"""Grouped products of experts: those of a loop over experts, in the precision that autocast asks for."""

import pytest
import torch

from proxima.model.moe import IN_AUTOCAST, stacked_experts
from proxima.model.policy import Policy
from tests.model.families import make
from tests.model.rows import MIXED, loaded, rows, trained


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "Qwen3-Next"])
def test_they_are_those_of_a_loop(family):
    grouped, loop = (make(family) for _ in range(2))
    policies = [Policy(grouped), Policy(loop)]
    loop.model.set_experts_implementation("eager")
    (log_prob, ours), (expected, theirs) = (trained(policy, rows(*MIXED)) for policy in policies)
    torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * size, msg=name)


def test_they_follow_autocast():
    given = loaded("qwen3_moe")
    policy = Policy(given, compute_dtype=torch.bfloat16)
    (first, *others) = stacked_experts(given.model)
    assert len(others) == 1 and first.config._experts_implementation == IN_AUTOCAST
    hidden, choices, weights = torch.randn(6, 32), torch.tensor([[0, 3]] * 6), torch.full((6, 2), 0.5)
    plain = first(hidden, choices, weights)
    with policy.autocast():
        lowered = first(hidden, choices, weights)
    half = first.to(torch.bfloat16)(hidden.bfloat16(), choices, weights)
    assert torch.equal(lowered.bfloat16(), half) and not torch.equal(lowered, plain)
    torch.testing.assert_close(lowered, plain, rtol=0.05, atol=0.05 * float(plain.detach().abs().max()))


def test_a_dense_model_has_none():
    assert not list(stacked_experts(loaded("llama").model))
