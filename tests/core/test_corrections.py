"""Corrections by hand: weights, rejections, statistics, presets and what the statistics mean."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from proxima.core import (
    Gspo,
    Importance,
    MismatchGuard,
    PpoClip,
    Reinforce,
    Rejection,
    TokenMean,
    TokenSum,
    health,
    mismatch_metrics,
    policy_loss,
    precompute,
)
from proxima.core.correction.importance import CapFloor
from proxima.core.correction.rejection import OffPolicySequence, SecondMoment, TopEntropy
from proxima.core.loss import needs_precompute
from proxima.core.metrics import QuantileSketch
from proxima.core.token_reasons import TokenReasons
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import make_batch
from tests.core.batches import packed


def of_ratios(*sequences: list[float], current: list[float] | None = None, **more: Any) -> PolicyBatch:
    """Tokens whose proximal policy is `ratio` times as likely as the behavior policy; the current policy is the
    proximal one."""
    ratio = torch.tensor([r for s in sequences for r in s], dtype=torch.float64)
    behavior = torch.full_like(ratio, -8.0)
    proximal = behavior + ratio.log()
    columns = {"behavior_log_prob": behavior, "proximal_log_prob": proximal, "advantage": torch.ones_like(ratio)}
    columns["log_prob"] = proximal if current is None else behavior + torch.tensor(current, dtype=torch.float64).log()
    return packed([*map(len, sequences)], **columns | more)


def metric(spec: Any, b: PolicyBatch, name: str) -> float:
    return spec(b).metrics[f"correction/{name}"].value


def test_bounds_are_inclusive_and_keep_their_side() -> None:
    b = of_ratios([0.21, 4.9, 0.19, 5.1])
    assert CapFloor()(b).weight.tolist() == pytest.approx([0.21, 4.9, 0, 0])
    assert Importance(bound="clamp", upper=5, lower=0.2)(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.2, 5])
    assert Importance(bound="none")(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.19, 5.1])
    assert Importance(bound="truncate", upper=5, lower=1.0)(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.19, 5])
    assert Importance(bound="clip", upper=1.0, lower=1.0)(of_ratios([1.0, 0.99, 1.01])).weight.tolist() == [1, 0, 0]


def test_a_catastrophic_token_beyond_the_safety_clamp_still_vetoes() -> None:
    """exp(−30) would be exp(−20) after the clamp, both below 1e-4; the test is on the unclamped ratio."""
    assert Importance(veto=1e-12)(of_ratios([math.exp(-30), 1.0])).weight.tolist() == [0, 0]


def test_metrics_only_leaves_loss_and_gradient_alone() -> None:
    b = make_batch([5, 3], seed=1, proximal="recompute")
    plain = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean())
    measured = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=Importance(apply=False, veto=0.98))
    assert torch.equal(plain.value, measured.value) and torch.equal(plain.keep, measured.keep)
    assert measured.metrics["correction/rollout_is_veto_fraction"].value > 0


def test_an_upper_bound_below_1_has_a_lower_one_beside_it() -> None:
    """Without it the interval is [1 / upper, upper], which is empty, and refused."""
    b = of_ratios([0.4, 0.6, 1.0])
    assert Importance(bound="clip", upper=0.5, lower=0.0)(b).weight.tolist() == pytest.approx([0.4, 0, 0])
    assert Importance(upper=0.5)(b).weight.tolist() == pytest.approx([0.4, 0.5, 0.5])
    assert Rejection(upper=0.5, lower=0.0)(b).keep.tolist() == [True, False, False]
    assert Rejection(statistic="k1", upper=0.5)(b).keep.tolist() == [False, False, True]  # -log .6 is .51


def test_weights_in_the_batch_count_without_a_correction() -> None:
    b = of_ratios([1.0, 1.0], [1.0, 1.0])
    weight = torch.tensor([0.5, 2.0, 0.0, math.nan], dtype=torch.float64)  # NaN: outside the loss
    b = replace(
        b, weight=weight, loss_mask=torch.tensor([True, True, True, False]), log_prob=b.log_prob.requires_grad_()
    )
    loss = policy_loss(b, surrogate=PpoClip(), aggregate=TokenSum())
    assert float(loss.numerator.detach()) == -2.5 and loss.keep.tolist() == [True, True, False, False]
    assert torch.autograd.grad(loss.numerator, b.log_prob)[0].tolist() == [-0.5, -2.0, 0.0, 0.0]
    ready = precompute(of_ratios([0.5, 1.5], [3.0]), surrogate=PpoClip(), correction=Importance()).batch
    assert float(policy_loss(ready, surrogate=PpoClip(), aggregate=TokenSum()).numerator) == -0.5 - 1.5 - 2


def test_a_sequence_loss_takes_the_geometric_mean_of_its_kept_weights() -> None:
    b = of_ratios([0.5, 2.0, 7.0])
    loss = policy_loss(
        b,
        surrogate=Gspo(1, 9, "sequence"),
        aggregate=TokenMean(),
        correction=Importance(bound="clip", upper=5, lower=0.5),
    )
    assert float(loss.value) == pytest.approx(
        -(1.0 + 1.0 + 0) / 3
    )  # √(.5 · 2) = 1 on the two kept, the third rejected but counted
    plain = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=Importance(upper=2))
    assert float(plain.value) == pytest.approx(-(0.5 + 2 + 2) / 3)


@pytest.mark.parametrize(("rejected", "value"), [("count", -2 / 4), ("drop", -1.0)])
def test_what_a_rejected_token_does_to_the_denominator(rejected: str, value: float) -> None:
    b = of_ratios([1.0, 9.0], [1.0, 8.0])
    loss = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=Rejection(rejected=rejected))  # type: ignore[arg-type]
    assert float(loss.value) == pytest.approx(value)
    assert loss.metrics["correction/rejected_fraction"].value == pytest.approx(0.5)


def test_second_moment_drops_the_largest_until_the_mean_is_small() -> None:
    b = of_ratios([math.exp(0.1), math.exp(-0.3), math.exp(2.0)], [1.0])
    assert SecondMoment(0.04)(b).keep.int().tolist() == [1, 1, 0, 1]  # (.01 + .09 + 0)/3 < .04
    assert SecondMoment(0.03)(b).keep.int().tolist() == [1, 0, 0, 1]
    assert SecondMoment(1e-12)(of_ratios([2.0, 3.0])).keep.int().tolist() == [1, 0]  # at least one


def test_off_policy_sequences_are_dropped_only_when_they_are_pushed_down() -> None:
    advantage = torch.tensor([-1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    b = of_ratios([1.0, 1.0], [1.0], [1.0], current=[math.exp(-1.2), 1.0, math.exp(-9), 0.9], advantage=advantage)
    assert OffPolicySequence(0.5)(b).keep.int().tolist() == [0, 0, 1, 1]
    reasons = TokenReasons(batch=b, surrogate=Reinforce(), corrections=[OffPolicySequence(0.5)])
    what = "the mean of log μ - log π over the sequence, and A < 0"
    assert reasons.reason(0) == f"masked: OffPolicySequence: 0.6 > 0.5, {what}"
    level = replace(b, behavior_log_prob=b.log_prob.detach().clone())
    assert OffPolicySequence(0.0)(b).keep.int().tolist() == [0, 0, 1, 0]
    assert bool(OffPolicySequence(0.0)(level).keep.all())  # the threshold itself is kept


def test_a_missing_next_policy_is_named() -> None:
    source = "Importance needs `next_log_prob`, which the batch lacks: `proximal: next` does"
    how = {"surrogate": PpoClip(), "aggregate": TokenMean(), "correction": Importance(towards="next")}
    with pytest.raises(ValueError, match=source):
        policy_loss(of_ratios([2.0]), **how)


def test_who_needs_preparing() -> None:
    assert not needs_precompute(PpoClip(), [Importance(), Rejection()])
    assert needs_precompute(PpoClip(), [Importance(normalise=True)]) and needs_precompute(
        PpoClip(), [Rejection(rejected="drop")]
    )
    assert needs_precompute(PpoClip(), [TopEntropy()])


def test_health_says_what_to_do() -> None:
    values = {
        "correction/rollout_is_eff_sample_size": 0.5,
        "correction/rollout_is_veto_fraction": 0.01,
        "mismatch/rollout_is_mean": 1.8,
    }
    verdicts = {v.metric: v for v in health(values)}
    assert [v.level for v in verdicts.values()] == ["watch", "ok", "act"]
    assert "50.0% of the batch is left" in verdicts["correction/rollout_is_eff_sample_size"].sentence
    assert "lower `correction.upper`" in verdicts["correction/rollout_is_eff_sample_size"].sentence
    assert "same weights" in verdicts["mismatch/rollout_is_mean"].sentence
    assert health({}) == []
    share = {"correction/rejected_fraction": 0.8, "correction/top_entropy_masked_fraction": 0.8}
    assert [(v.level, v.value) for v in health(share)] == [("ok", 0.0)]  # it was asked to reject them
    assert health({**share, "correction/top_entropy_masked_fraction": 0.1})[0].level == "act"
    levels = [health({"mismatch/rollout_is_mean": mean})[0].level for mean in (1.05, 0.95, 0.8, 0.4)]
    assert levels == ["ok", "ok", "watch", "act"]


def test_health_judges_engine_against_trainer_by_the_limits_of_the_guard() -> None:
    values = {"mismatch/k3_kl": 0.02, "mismatch/rollout_is_catastrophic_seq_fraction": 0.0}
    assert [v.level for v in health(values)] == ["watch", "ok"]
    assert [health({"mismatch/k3_kl": kl})[0].level for kl in (0.0099, 0.0101)] == ["ok", "watch"]
    assert [v.level for v in health(values, MismatchGuard(max_k3_kl=0.015))] == ["act", "ok"]
    assert "decoupled_token_is" in health(values)[0].sentence
    on_purpose = health(values, known_mismatch="engine.weights=int8")[0].sentence
    assert on_purpose.endswith(": expected with engine.weights=int8.")
    assert "int8" not in health({"correction/rejected_fraction": 0.9}, known_mismatch="engine.weights=int8")[0].sentence
    assert "2 policy versions old" in health({**values, "age/max": 2})[0].sentence
    corrected = {**values, "correction/rollout_is_mean": 1.0}
    for sentence in (health(corrected)[0].sentence, health({**corrected, "age/max": 2})[0].sentence):
        assert "already" in sentence and "correct for it" not in sentence and "decoupled_token_is" not in sentence


def measured(b: PolicyBatch) -> dict[str, float]:
    return {name.removeprefix("mismatch/"): metric.value for name, metric in mismatch_metrics(b).items()}


@pytest.mark.parametrize("proximal", ["behavior", "recompute", "loglinear"])
def test_the_mismatch_knows_neither_proximal_policy_nor_correction(proximal: str) -> None:
    b = make_batch([7, 3, 0, 9], seed=3, proximal=proximal)
    want = measured(make_batch([7, 3, 0, 9], seed=3, proximal="recompute"))
    here = measured(replace(b, log_prob=make_batch([7, 3, 0, 9], seed=3, proximal="recompute").log_prob))
    assert here == pytest.approx(want, nan_ok=True)
    assert all(math.isfinite(here[name]) for name in ("k3_kl", "training_ppl", "rollout_is_seq_std"))


def test_the_mismatch_of_nothing_has_every_key() -> None:
    empty, some = make_batch([0, 0]), make_batch([4])
    assert mismatch_metrics(empty).keys() == mismatch_metrics(some).keys()
    assert all(math.isnan(m.value) for m in mismatch_metrics(empty).values())
    with pytest.raises(ValueError, match="lacks: the engine supplies it"):
        mismatch_metrics(replace(some, behavior_log_prob=None))


def test_a_sketch_is_symmetric_and_its_ends_hold_what_is_beyond() -> None:
    x = torch.tensor([1e-9, 1e-3, 0.7, 19.0, 1e6], dtype=torch.float64)
    assert torch.equal(QuantileSketch.histogram(-x), QuantileSketch.histogram(x).flip(0))
    ends = QuantileSketch.histogram(torch.tensor([-1e6, 1e6], dtype=torch.float64))
    assert ends[0] == 1 and ends[-1] == 1 and ends.sum() == 2
    for sign in (1, -1):
        median = QuantileSketch(QuantileSketch.histogram(sign * x[2:3]), 0.5).value
        assert median == pytest.approx(math.exp(sign * 0.7), rel=0.01)  # of a ratio


def test_the_percentiles_of_ratios_of_which_each_is_another() -> None:
    rho = torch.arange(101, dtype=torch.float64) / 100
    ratios = measured(packed(log_prob=rho - 2, behavior_log_prob=torch.full_like(rho, -2)))
    found = {percent: math.log(ratios[f"rollout_is_p{percent}"]) for percent in (25, 50, 75, 95, 99)}
    assert found == pytest.approx({percent: percent / 100 for percent in found}, rel=0.006)


def test_the_guard_names_its_limit() -> None:
    """What it rejects, and when, is in the worked examples of the mismatch."""
    assert MismatchGuard().exceeded({"mismatch/k3_kl": 0.01}) is None
    over = MismatchGuard(max_k3_kl=0.005).exceeded({"mismatch/k3_kl": 0.01})
    assert over == "mismatch/k3_kl is 0.01, above algorithm.mismatch.max_k3_kl=0.005"


def test_lag_is_blamed_for_rejections_only_where_there_is_some():
    rejected = {"correction/rejected_fraction": 0.9}
    assert (
        "max_lag" not in health(rejected)[0].sentence and "max_lag" not in health(rejected | {"age/max": 0})[0].sentence
    )
    assert health(rejected | {"age/max": 2})[0].sentence.endswith("of the correction, or lower runtime.max_lag.")
