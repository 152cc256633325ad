"""Rejection by total variation and binary KL, worked by hand; and which tokens move back."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from proxima.core import PpoClip, Rejection, TokenMean, policy_loss
from proxima.core.token_reasons import TokenReasons
from proxima.data.policy_batch import PolicyBatch
from tests.core.batches import of_probabilities


def of_tokens(*tokens: tuple[float, float, float]) -> PolicyBatch:
    """Tokens of (μ, π_prox, A); the current policy is the proximal one."""
    mu, pi, advantage = zip(*tokens, strict=True)
    b = of_probabilities(pi, mu, advantage)
    return replace(b, proximal_log_prob=b.log_prob)


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def kept(b: PolicyBatch, **fields: Any) -> list[int]:
    return Rejection(**fields)(b).keep.int().tolist()


RARE = (0.001, 0.003, 1.0)


def test_both_bounds_are_inclusive() -> None:
    b = of_tokens((0.5, 0.25, 1.0), (0.25, 0.5, 1.0))  # |pi - mu| = 1/4
    assert kept(b, statistic="tv", upper=0.25) == kept(b, statistic="tv", upper=0.9, lower=0.25) == [1, 1]
    assert kept(b, statistic="tv", upper=0.2) == kept(b, statistic="tv", upper=0.9, lower=0.3) == [0, 0]


def test_an_enormous_ratio_is_a_finite_statistic() -> None:
    b = replace(of_tokens(RARE), behavior_log_prob=torch.tensor([-900.0], dtype=torch.float64))
    assert Rejection(statistic="ratio_tv", upper=1.0).values(b).tolist() == pytest.approx([math.expm1(20)])


@pytest.mark.parametrize(("mu", "pi"), [(0.999, 0.9), (0.9, 0.999)])
def test_binary_kl_is_the_larger_of_both_directions(mu: float, pi: float) -> None:
    """kl(.999‖.9) is .100, kl(.9‖.999) is .366: a bound between them rejects the token whichever policy is surer."""
    smaller, larger = sorted((kl(mu, pi), kl(pi, mu)))
    assert smaller < 0.1 < 0.36 < larger
    b = of_tokens((mu, pi, 1.0))
    assert kept(b, statistic="binary_kl") == [0]
    assert kept(b, statistic="binary_kl", upper=larger * (1 + 1e-9)) == [1]
    assert kept(b, statistic="binary_kl", upper=larger * (1 - 1e-9)) == [0]


def test_a_token_that_moves_back_is_kept() -> None:
    """A and log r of opposite sign, or one of them 0; all others of the sequence go."""
    away, back = (0.4, 0.7, 1.0), (0.4, 0.7, -1.0)
    lower_away, lower_back = (0.7, 0.4, -1.0), (0.7, 0.4, 1.0)
    b = of_tokens(away, back, lower_away, lower_back, (0.4, 0.7, 0.0), (0.5, 0.5, 1.0))
    sequence = {"level": "sequence", "statistic": "tv", "upper": 0.1}
    assert kept(b, **sequence) == [0] * 6
    assert kept(b, **sequence, keep_returning=True) == [0, 1, 0, 1, 1, 1]
    assert kept(b, statistic="ratio", upper=1.2, keep_returning=True) == [0, 1, 0, 1, 1, 1]
    assert kept(b, statistic="tv", upper=0.5, keep_returning=True) == [1] * 6


def test_returning_is_measured_towards_the_policy_that_is_compared() -> None:
    b = of_tokens((0.4, 0.7, 1.0))
    b = replace(b, log_prob=b.log_prob + math.log(0.2 / 0.7))  # the proximal policy is above μ, the current one below
    spec: dict[str, Any] = {"statistic": "tv", "upper": 0.1, "keep_returning": True}
    assert kept(b, **spec) == [0] and kept(b, **spec, towards="current") == [1]


def test_the_advantage_is_read_only_if_it_decides() -> None:
    assert "advantage" not in Rejection(statistic="binary_kl").needs
    assert "advantage" in Rejection(statistic="binary_kl", keep_returning=True).needs


def test_certain_and_impossible_tokens_are_finite() -> None:
    """Log-probs of 0 and of −80: clamped, where a peer's float32 gives NaN."""
    certain = torch.tensor([0.0, -80.0], dtype=torch.float64)
    b = replace(of_tokens(*[RARE] * 2), log_prob=certain, behavior_log_prob=certain.flip(0))
    for statistic in ("tv", "ratio_tv", "binary_kl"):
        spec = Rejection(statistic=statistic, upper=0.5, towards="current")  # type: ignore[arg-type]
        assert bool(spec.values(b).isfinite().all()) and spec(b).keep.tolist() == [False, False]


def test_the_usual_bounds() -> None:
    assert [Rejection(statistic=s).ceiling for s in ("binary_kl", "ratio", "k3")] == [0.1, 2.0, 2.0]  # type: ignore[arg-type]
    assert Rejection("sequence", "tv", "sum", upper=3.0).floor == -math.inf


def test_a_reason_says_that_the_token_moves_away() -> None:
    b = of_tokens((0.4, 0.7, 1.0), (0.4, 0.7, -1.0))
    spec = Rejection(statistic="tv", upper=0.1, keep_returning=True)
    reasons = TokenReasons(batch=b, surrogate=PpoClip(), corrections=[spec])
    masked = "masked: Rejection: 0.3 > 0.1, tv of the token, and the update moves the token away"
    assert reasons.reason(0) == masked
    assert reasons.reason(1).startswith("kept")
    loss = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=spec)
    assert loss.keep.tolist() == reasons.keep.tolist() == [False, True]
