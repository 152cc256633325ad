"""policy_loss: validation, metrics and penalties."""

import math
from dataclasses import replace

import pytest
import torch

from proxima.core import PENALTIES, Dppo, PpoClip, Reinforce, TokenMean, TokenSum, policy_loss
from proxima.data import NoFieldError
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import make_batch
from tests.core.batches import packed


def two_tokens(**changes: torch.Tensor) -> PolicyBatch:
    fields = {
        "log_prob": torch.tensor([-0.5, -1.0]),
        "behavior_log_prob": torch.tensor([-0.5, -1.5]),
        "advantage": torch.tensor([1.0, -1.0]),
        "cu_seqlens": torch.tensor([0, 1, 2]),
    }
    return packed(**fields | changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("log_prob", float("nan"), r"PolicyBatch\.log_prob: nan at token 1 of sequence 1, 1 such"),
        ("behavior_log_prob", 0.3, r"behavior_log_prob: 0\.3.* at token 1 of sequence 1.*finite and at most 0"),
        ("behavior_log_prob", -float("inf"), r"behavior_log_prob: -inf at token 1"),
        ("reference_log_prob", float("nan"), r"reference_log_prob: nan at token 1"),
        ("advantage", float("inf"), r"advantage: inf at token 1 .*mask the token out of the loss"),
    ],
)
def test_an_impossible_value_is_refused_with_its_position(field: str, value: float, message: str) -> None:
    sound, wrong = (
        two_tokens(**{field: torch.tensor([-0.1, last])}, cu_seqlens=torch.tensor([0, 2])) for last in (-0.1, value)
    )
    with pytest.raises(ValueError, match=message):
        policy_loss(PolicyBatch.cat([sound, wrong]), surrogate=PpoClip(), aggregate=TokenMean())


@pytest.mark.parametrize("field", ["log_prob", "behavior_log_prob", "proximal_log_prob", "reference_log_prob"])
def test_a_log_prob_a_rounding_error_above_zero_is_accepted(field: str) -> None:
    """Up to 1e-4 nats, and no farther."""

    def loss_at(value: float) -> float:
        batch = two_tokens(**{field: torch.tensor([value, -1.0])})
        return float(policy_loss(batch, surrogate=PpoClip(), aggregate=TokenMean()).value)

    assert loss_at(0.9e-4) == pytest.approx(loss_at(0.0), abs=1e-3)
    with pytest.raises(ValueError, match=rf"{field}: 0\.0001.* at token 0 of sequence 0"):
        loss_at(1.1e-4)


def test_a_measured_divergence_replaces_the_top_k_that_it_needs() -> None:
    """Stored rollouts have the divergence alone."""
    spec = Dppo(divergence="topk_tv", delta=0.2)
    b = two_tokens(log_prob=torch.tensor([-0.4, -1.6]), top_k_divergence=torch.tensor([0.1, 0.3]))
    assert policy_loss(b, surrogate=spec, aggregate=TokenMean()).keep.tolist() == [True, False]
    source = "Dppo needs `behavior_top_k_log_prob`, which the batch lacks: the engine does, with top-k"
    with pytest.raises(NoFieldError, match=source):
        policy_loss(replace(b, top_k_divergence=None), surrogate=spec, aggregate=TokenMean())


def test_without_a_proximal_policy_there_are_no_ratio_metrics() -> None:
    b = packed(log_prob=torch.tensor([-1.0]), advantage=torch.ones(1))
    loss = policy_loss(b, surrogate=Reinforce(), aggregate=TokenMean())
    assert float(loss.value) == 1.0 and set(loss.metrics) == {"masked_fraction"}


def test_the_kl_to_the_reference_is_measured_under_any_penalty() -> None:
    b = two_tokens(log_prob=torch.tensor([-1.0, -1.0]), reference_log_prob=torch.tensor([-1.0, -1.5]))
    k1, k3 = PENALTIES["k1"](0.1), PENALTIES["k3"](0.1)
    losses = [policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), penalty=p) for p in (None, k1, k3)]
    for loss in losses:
        assert loss.metrics["reference_kl/mean"].value == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)


def test_an_extreme_ratio_stays_finite() -> None:
    b = replace(
        make_batch([3], garbage=False, not_sampled=0, out_of_loss=0, dtype=torch.float32), behavior_log_prob=None
    )
    b = replace(b, proximal_log_prob=torch.full((3,), -500.0))
    loss = policy_loss(b, surrogate=PpoClip(), aggregate=TokenSum())
    assert loss.metrics["ratio_max"].value == pytest.approx(4.851652e8, rel=1e-6)
    loss.numerator.backward()
    assert bool(loss.numerator.isfinite())
