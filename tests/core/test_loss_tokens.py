"""Means of corrections are over the loss tokens, neither all sampled ones nor only those that are kept; and weights of
positions."""

import math

import pytest
import torch

from proxima.core import Cppo, Importance, Reinforce
from proxima.core.correction.rejection import Rejection
from proxima.core.token_reasons import TokenReasons
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import make_batch
from tests.core.batches import packed

RATIOS = torch.tensor([2.0, 0.5, 4.0, 9.0]).log()


def batch(mask):
    """Ratios 2, 1/2, 4 and 9 of the proximal to the behavior policy; all four tokens were sampled."""
    log_prob, all_four = torch.full((4,), -1.0), torch.ones(4)
    columns = {"proximal_log_prob": log_prob, "behavior_log_prob": log_prob - RATIOS, "advantage": all_four}
    return packed(log_prob=log_prob, loss_mask=torch.tensor(mask).bool(), sampled=all_four.bool(), **columns)


def test_a_geometric_weight_is_the_mean_over_loss_tokens():
    weight = Importance(level="geometric", bound="none")(batch([1, 1, 1, 0])).weight
    assert weight.tolist() == pytest.approx([math.cbrt(4.0)] * 3 + [0.0])


def test_weights_are_normalised_by_the_mean_over_all_loss_tokens():
    weight = Importance(bound="clip", upper=5.0, lower=1.0, normalise=True)(batch([1, 1, 1, 0])).weight
    assert weight.tolist() == pytest.approx([1.0, 0.0, 2.0, 0.0])  # 2, 0, 4 by their mean, 2


def test_sequence_weights_are_normalised_by_the_mean_over_all_sequences():
    """Ratios 2 and 9, of which the second is rejected; a third sequence has no loss token."""
    rho = torch.tensor([[2.0, 1.0], [3.0, 3.0], [7.0, 7.0]]).log()
    columns = {"log_prob": rho - 9, "proximal_log_prob": rho - 9, "behavior_log_prob": rho * 0 - 9}
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    b = PolicyBatch.from_padded(mask, sampled=torch.ones_like(mask), advantage=torch.ones(3), **columns)
    weight = Importance("sequence", "clip", 5.0, 1.0, normalise=True)(b).weight
    assert weight.tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0, 0.0])  # 2 by the mean of 2 and 0


def test_catastrophic_tokens_are_loss_tokens_below_the_veto():
    metrics = Importance(veto=0.6)(batch([1, 1, 1, 0])).metrics  # of 2, 1/2 and 4
    assert metrics["correction/rollout_is_catastrophic_token_fraction"].value == 1 / 3


def test_the_weights_of_corrections_multiply():
    pair = (Importance(upper=3.0), Importance(bound="clip", upper=5.0, lower=1.0))
    reasons = TokenReasons(batch=batch([1, 1, 1, 1]), surrogate=Reinforce(), corrections=pair)
    assert reasons.weight.tolist() == pytest.approx([2.0 * 2.0, 0.0, 3.0 * 4.0, 0.0])
    one = TokenReasons(batch=batch([1, 1, 1, 1]), surrogate=Reinforce(), corrections=(pair[0], Rejection(upper=5.0)))
    assert one.weight.tolist() == pytest.approx([2.0, 0.5, 3.0, 0.0])


def test_weights_of_positions_do_not_depend_on_the_default_dtype():
    b, spec = make_batch([6, 9], seed=1, spread=1.0), Cppo()
    expected = spec.threshold(b)
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = spec.threshold(b)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, expected, strict=True))
