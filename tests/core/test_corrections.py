"""Corrections by hand: weights, rejections, statistics, presets and what the statistics mean."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from proxima.check.batches import make_batch
from proxima.core import (
    CORRECTION_PRESETS,
    CORRECTIONS,
    Gspo,
    Importance,
    PpoClip,
    Rejection,
    TokenMean,
    TokenSum,
    health,
    policy_loss,
    precompute,
)
from proxima.core.correction import (
    CapFloor,
    Icepop,
    MismatchGuard,
    OffPolicySequence,
    SecondMoment,
    TopEntropy,
    mismatch_metrics,
)
from proxima.core.loss import apply_corrections
from proxima.core.metrics import QuantileSketch, merge_metrics
from proxima.core.precompute import needs_precompute
from proxima.data import PolicyBatch


def of_ratios(*sequences: list[float], current: list[float] | None = None, **more: Any) -> PolicyBatch:
    """Tokens whose proximal policy is `ratio` times as likely as the behavior policy; the current policy is the
    proximal one."""
    ratio = torch.tensor([r for s in sequences for r in s], dtype=torch.float64)
    behavior = torch.full_like(ratio, -8.0)
    proximal = behavior + ratio.log()
    edges = torch.tensor([0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()])
    return PolicyBatch(
        log_prob=proximal.clone() if current is None else behavior + torch.tensor(current, dtype=torch.float64).log(),
        behavior_log_prob=behavior,
        proximal_log_prob=proximal,
        advantage=more.pop("advantage", torch.ones_like(ratio)),
        loss_mask=torch.ones(len(ratio), dtype=torch.bool),
        cu_seqlens=edges,
        **more,
    )


def metric(spec: Any, b: PolicyBatch, name: str) -> float:
    return spec(b).metrics[f"correction/{name}"].value


def test_worked_example() -> None:
    b = of_ratios([0.4, 0.8, 6.0])
    assert Importance("token")(b).weight.tolist() == pytest.approx([0.4, 0.8, 2.0])
    assert Importance("sequence", upper=10)(b).weight.tolist() == pytest.approx([1.92] * 3)
    assert Importance("geometric", upper=10)(b).weight.tolist() == pytest.approx([1.24289] * 3, rel=1e-5)
    assert metric(Importance("token"), b, "rollout_is_mean_applied") == pytest.approx(1.06667, rel=1e-5)
    assert metric(Importance("token"), b, "rollout_is_eff_sample_size_applied") == pytest.approx(0.71111, rel=1e-4)
    assert metric(Importance("token"), b, "rollout_is_eff_sample_size") == pytest.approx(
        2.4**2 / ((0.16 + 0.64 + 36) / 3)
    )
    assert metric(Importance("token"), b, "k3_kl") == pytest.approx(1.18256, rel=1e-5)
    assert Icepop()(b).weight.tolist() == pytest.approx([0, 0.8, 0]) and Icepop()(b).keep.tolist() == [
        False,
        True,
        False,
    ]


def test_bounds_are_inclusive_and_keep_their_side() -> None:
    b = of_ratios([0.21, 4.9, 0.19, 5.1])
    assert CapFloor()(b).weight.tolist() == pytest.approx([0.21, 4.9, 0, 0])
    assert Importance(bound="clamp", upper=5, lower=0.2)(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.2, 5])
    assert Importance(bound="none")(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.19, 5.1])
    assert Importance(bound="truncate", upper=5, lower=1.0)(b).weight.tolist() == pytest.approx([0.21, 4.9, 0.19, 5])
    assert Importance(bound="clip", upper=1.0, lower=1.0)(of_ratios([1.0, 0.99, 1.01])).weight.tolist() == [1, 0, 0]


def test_veto_drops_the_sequence_of_one_hopeless_token() -> None:
    b = of_ratios([1.0, 0.5e-4], [1.0, 2e-4], [1.0])
    spec = Importance(veto=1e-4)
    assert spec(b).weight.tolist() == pytest.approx([0, 0, 1, 2e-4, 1])
    assert metric(spec, b, "rollout_is_veto_fraction") == pytest.approx(1 / 3)
    assert metric(spec, b, "rollout_is_catastrophic_token_fraction") == pytest.approx(1 / 5)


def test_a_catastrophic_token_beyond_the_safety_clamp_still_vetoes() -> None:
    """exp(−30) would be exp(−20) after the clamp, both below 1e-4; the test is on the unclamped ratio."""
    assert Importance(veto=1e-12)(of_ratios([math.exp(-30), 1.0])).weight.tolist() == [0, 0]


def test_metrics_only_leaves_loss_and_gradient_alone() -> None:
    b = make_batch([5, 3], seed=1, proximal="recompute")
    plain = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean())
    measured = policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=Importance(apply=False, veto=0.98))
    assert torch.equal(plain.value, measured.value) and torch.equal(plain.keep, measured.keep)
    assert measured.metrics["correction/rollout_is_veto_fraction"].value > 0


def test_normalised_weights_have_mean_one_over_the_whole_batch_only() -> None:
    b = of_ratios([0.5, 1.5], [3.0], [1.0, 1.0, 1.0])
    assert float(Importance(normalise=True)(b).weight.mean()) == pytest.approx(1)
    per_sequence = Importance("geometric", bound="none", normalise=True)(b).weight
    assert (per_sequence[0] + per_sequence[2] + per_sequence[3]).item() == pytest.approx(3)
    ready = precompute(b, surrogate=PpoClip(), correction=Importance(normalise=True))
    alone = policy_loss(
        ready.batch.take([1]), surrogate=PpoClip(), aggregate=TokenSum(), correction=Importance(normalise=True)
    )
    assert float(alone.numerator) == pytest.approx(-2.0 * 6 / 7)  # 3 is truncated to 2, the mean of the six is 7/6


def test_an_empty_interval_is_refused() -> None:
    """`clip` without `lower` keeps [1 / upper, upper], which is empty for upper < 1: it rejected every token."""
    for make in (lambda: Importance(bound="clip", upper=0.5), lambda: Rejection(upper=0.5)):
        with pytest.raises(ValueError, match=r"^upper=0.5 must be >= 1 .* while lower is none, which is 1 / upper"):
            make()
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


@pytest.mark.parametrize(
    ("spec", "keep"),
    [
        (Rejection("token", "ratio", upper=2.0), [1, 1, 0, 1, 1]),
        (Rejection("sequence", "ratio", "sum", upper=2.0), [0, 0, 0, 1, 1]),
        (Rejection("sequence", "ratio", "mean", upper=2.0), [1, 1, 1, 1, 1]),
        (Rejection("sequence", "ratio", "max", upper=2.0), [0, 0, 0, 1, 1]),
        (Rejection("token", "k1", upper=0.5), [1, 1, 0, 1, 0]),
        (Rejection("token", "k1", upper=0.5, lower=-9), [1, 1, 1, 1, 0]),
        (Rejection("token", "k2", upper=0.12), [1, 1, 0, 1, 0]),
        (Rejection("token", "k3", upper=0.1), [1, 1, 0, 1, 0]),
        (Rejection("sequence", "k3", "max", upper=0.3), [0, 0, 0, 1, 1]),
    ],
)
def test_rejections(spec: Rejection, keep: list[int]) -> None:
    """ρ = 0, 0, log 3 | 0, log .6"""
    assert spec(of_ratios([1.0, 1.0, 3.0], [1.0, 0.6])).keep.int().tolist() == keep


def test_shares_of_rejected_sequences_leave_out_those_without_a_token() -> None:
    b = of_ratios([1.0, 5.0, 5.0], [1.0, 1.0], [], [0.1])
    token = Rejection(level="token", statistic="ratio", upper=2.0, lower=0.5)
    assert metric(token, b, "rollout_rs_token_k1_masked_fraction") == 0.5
    shares = apply_corrections(b, [token]).metrics
    assert shares["correction/rejected_fraction"].value == 3 / 6
    assert shares["correction/rejected_seq_fraction"].value == pytest.approx(2 / 3)
    assert metric(token, b, "rollout_rs_token_k1_seq_masked_fraction") == pytest.approx(2 / 3)
    whole = Rejection(level="sequence", reduce="mean", statistic="ratio", upper=2.0, lower=0.5)
    shares = {end: metric(whole, b, f"rollout_rs_seq_mean_k1_fraction_{end}") for end in ("high", "low")}
    assert shares == pytest.approx({"high": 1 / 3, "low": 1 / 3})
    assert metric(whole, b, "rollout_rs_seq_mean_k1_min") == pytest.approx(0.1)


def test_second_moment_drops_the_largest_until_the_mean_is_small() -> None:
    b = of_ratios([math.exp(0.1), math.exp(-0.3), math.exp(2.0)], [1.0])
    assert SecondMoment(0.04)(b).keep.int().tolist() == [1, 1, 0, 1]  # (.01 + .09 + 0)/3 < .04
    assert SecondMoment(0.03)(b).keep.int().tolist() == [1, 0, 0, 1]
    assert SecondMoment(1e-12)(of_ratios([2.0, 3.0])).keep.int().tolist() == [1, 0]  # at least one


def test_off_policy_sequences_are_dropped_only_when_they_are_pushed_down() -> None:
    advantage = torch.tensor([-1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    b = of_ratios([1.0, 1.0], [1.0], [1.0], current=[math.exp(-1.2), 1.0, math.exp(-9), 0.9], advantage=advantage)
    assert OffPolicySequence(0.5)(b).keep.int().tolist() == [0, 0, 1, 1]
    level = replace(b, behavior_log_prob=b.log_prob.detach().clone())
    assert OffPolicySequence(0.0)(b).keep.int().tolist() == [0, 0, 1, 0]
    assert bool(OffPolicySequence(0.0)(level).keep.all())  # the threshold itself is kept


def test_top_entropy_is_a_share_of_the_whole_batch() -> None:
    b = of_ratios([1.0] * 5, entropy=torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7], dtype=torch.float64))
    assert TopEntropy(0.4)(b).keep.int().tolist() == [0, 1, 0, 0, 1]
    assert TopEntropy(1.0)(b).keep.all()
    for share in (0.4, 1.0):
        assert TopEntropy(share)(b).weight.tolist() == TopEntropy(share)(b).keep.double().tolist()  # 1 or 0
    # The quantile of position .5 · 2 is the middle value; of .75 · 2 it is half way from the middle to the largest.
    b = of_ratios([1.0] * 3, entropy=torch.tensor([0.1, 0.9, 0.5], dtype=torch.float64))
    assert TopEntropy(0.5)(b).keep.int().tolist() == [0, 1, 1]
    assert TopEntropy(0.25)(b).keep.int().tolist() == [0, 1, 0]


def test_towards_chooses_the_numerator() -> None:
    b = of_ratios([2.0], current=[3.0], next_log_prob=torch.tensor([-8.0 + math.log(1.5)], dtype=torch.float64))
    weights = [float(Importance(bound="none", towards=x)(b).weight) for x in ("proximal", "current", "next")]  # type: ignore[arg-type]
    assert weights == pytest.approx([2.0, 3.0, 1.5])
    with pytest.raises(
        ValueError, match="Importance needs `next_log_prob`, which the batch lacks: `proximal: next` does"
    ):
        policy_loss(
            replace(b, next_log_prob=None),
            surrogate=PpoClip(),
            aggregate=TokenMean(),
            correction=Importance(towards="next"),
        )


def test_bypass_has_weight_one() -> None:
    b = make_batch([4, 2], proximal="behavior", garbage=False)
    assert Importance()(b).weight[b.loss_mask].tolist() == [1.0] * int(b.loss_mask.sum())


def test_perplexities_and_chi_square() -> None:
    b = of_ratios([1.0, 2.0], [0.5])
    names = ("training_ppl", "rollout_ppl", "ppl_ratio", "chi2_token", "chi2_seq", "kl", "log_ppl_diff_abs")
    m = {name: metric(Importance(), b, name) for name in names}
    e8 = math.exp(8)
    assert m["rollout_ppl"] == pytest.approx(e8)
    assert m["training_ppl"] == pytest.approx((e8 / math.sqrt(2) + 2 * e8) / 2)
    assert m["ppl_ratio"] == pytest.approx((1 / math.sqrt(2) + 2) / 2)
    assert m["chi2_token"] == pytest.approx((1 + 4 + 0.25) / 3 - 1) and m["chi2_seq"] == pytest.approx(
        (4 + 0.25) / 2 - 1
    )
    assert m["kl"] == pytest.approx(0.0) and m["log_ppl_diff_abs"] == pytest.approx((math.log(2) / 2 + math.log(2)) / 2)


def test_percentiles_are_exact_over_micro_batches() -> None:
    b = of_ratios(*[[float(i)] for i in range(1, 11)])
    parts = [
        Importance(upper=100)(b.take(rows)).metrics["correction/rollout_is_p25"]
        for rows in ([9, 0, 4], [1, 2, 3, 5, 6, 7, 8])
    ]
    assert (parts[0] + parts[1]).value == pytest.approx(3.25)  # type: ignore[operator]


def test_presets_are_corrections_and_their_names_verls() -> None:
    assert {"decoupled_token_is", "decoupled_seq_is_rs", "bypass_pg_is", "bypass_ppo_clip", "disabled"} <= set(
        CORRECTION_PRESETS
    )
    b = make_batch([4, 3], seed=2, garbage=False)
    for specs in CORRECTION_PRESETS.values():
        assert all(type(spec) in CORRECTIONS.values() for spec in specs)
        assert bool(policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean(), correction=specs).value.isfinite())


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
    assert [v.level for v in health(values, MismatchGuard(max_k3_kl=0.015))] == ["act", "ok"]
    assert "decoupled_token_is" in health(values)[0].sentence
    assert "2 policy versions old" in health({**values, "age/max": 2})[0].sentence
    corrected = {**values, "correction/rollout_is_mean": 1.0}
    for sentence in (health(corrected)[0].sentence, health({**corrected, "age/max": 2})[0].sentence):
        assert "already" in sentence and "correct for it" not in sentence and "decoupled_token_is" not in sentence


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Importance(upper=2, lower=3), r"lower=3 must be in \[0, upper=2\]"),
        (lambda: Importance(veto=2.0), r"veto=2.0 must be in \(0, 1\)"),
        (lambda: Importance(level="row"), "level='row' must be token, sequence or geometric"),  # type: ignore[arg-type]
        (lambda: Rejection(upper=1.0, lower=2.0), r"lower=2.0 must be <= upper=1.0"),
        (lambda: TopEntropy(0.0), r"share=0.0 must be in \(0, 1\]"),
        (lambda: MismatchGuard(measure=False, on_mismatch="stop"), "on_mismatch='stop' must be auto or warn"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()


def measured(b: PolicyBatch) -> dict[str, float]:
    return {name.removeprefix("mismatch/"): metric.value for name, metric in mismatch_metrics(b).items()}


def test_the_mismatch_is_of_the_current_policy_at_every_level() -> None:
    m = measured(of_ratios([0.4, 0.8, 6.0], current=[0.4, 0.8, 6.0]))
    assert m["rollout_is_mean"] == pytest.approx(2.4) and m["rollout_is_max"] == pytest.approx(6)
    assert m["rollout_is_eff_sample_size"] == pytest.approx(2.4**2 / ((0.16 + 0.64 + 36) / 3))
    assert m["rollout_is_sequence_mean"] == pytest.approx(1.92)
    assert m["rollout_is_geometric_mean"] == pytest.approx(1.24289, rel=1e-5)
    assert m["k3_kl"] == pytest.approx(1.18256, rel=1e-5) and m["kl"] == pytest.approx(-math.log(1.92) / 3)
    assert m["chi2_token"] == pytest.approx((0.16 + 0.64 + 36) / 3 - 1) and m["chi2_seq"] == pytest.approx(1.92**2 - 1)
    assert m["log_prob_absdiff_max"] == pytest.approx(math.log(6))
    assert m["prob_absdiff_max"] == pytest.approx(5 * math.exp(-8))
    assert m["rollout_is_p50"] == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("proximal", ["behavior", "recompute", "loglinear"])
def test_the_mismatch_knows_neither_proximal_policy_nor_correction(proximal: str) -> None:
    b = make_batch([7, 3, 0, 9], seed=3, proximal=proximal)
    want = measured(make_batch([7, 3, 0, 9], seed=3, proximal="recompute"))
    here = measured(replace(b, log_prob=make_batch([7, 3, 0, 9], seed=3, proximal="recompute").log_prob))
    assert here == pytest.approx(want, nan_ok=True)
    assert all(math.isfinite(here[name]) for name in ("k3_kl", "training_ppl", "rollout_is_seq_std"))


def test_the_mismatch_merges_over_micro_batches() -> None:
    b = make_batch([7, 3, 0, 9, 4, 1], seed=4, spread=0.05)
    parts = merge_metrics([mismatch_metrics(b.take(rows)) for rows in ([5, 1], [2], [0, 4, 3])])
    assert {name: m.value for name, m in parts.items()} == pytest.approx(
        {name: m.value for name, m in mismatch_metrics(b).items()}, nan_ok=True, rel=1e-9
    )


def test_the_mismatch_of_nothing_has_every_key() -> None:
    empty, some = make_batch([0, 0]), make_batch([4])
    assert mismatch_metrics(empty).keys() == mismatch_metrics(some).keys()
    assert all(math.isnan(m.value) for m in mismatch_metrics(empty).values())
    with pytest.raises(ValueError, match="lacks: the engine supplies it"):
        mismatch_metrics(replace(some, behavior_log_prob=None))


def test_the_mismatch_by_position_and_probability() -> None:
    behavior = torch.tensor([0.0005, 0.05, 0.3, 0.95], dtype=torch.float64).log()
    b = replace(of_ratios([1.0] * 4), behavior_log_prob=behavior, log_prob=behavior + torch.tensor([0, 0, 0.1, -0.2]))
    m = measured(b)
    assert [m[f"position_{i}_of_4/log_prob_absdiff"] for i in (1, 2, 3, 4)] == pytest.approx([0, 0, 0.1, 0.2])
    assert m["probability_0.9_1/log_prob_absdiff"] == pytest.approx(0.2)
    assert m["probability_0.1_0.5/k3_kl"] == pytest.approx(math.expm1(0.1) - 0.1)
    assert m["probability_0_0.001/token_fraction"] == 0.25 and m["probability_0.5_0.9/token_fraction"] == 0
    assert math.isnan(m["probability_0.5_0.9/k3_kl"])


def test_sequences_with_a_catastrophic_token_are_counted() -> None:
    first, second = [1.0, 0.5e-4, 0.5e-4], [1.0, 1.5e-4]
    b = of_ratios(first, second, [1.0], [3.0], current=[*first, *second, 1.0, 3.0])
    assert measured(b)["rollout_is_catastrophic_seq_fraction"] == 0.25
    assert measured(b)["rollout_is_catastrophic_token_fraction"] == 2 / 7  # w < 1e-4


def test_quantiles_of_the_mismatch_are_within_one_percent_of_the_log_ratio() -> None:
    rho = 0.02 * torch.randn(5001, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    m = measured(of_ratios(rho.exp().tolist(), current=rho.exp().tolist()))
    for name, q in (("p25", 0.25), ("p75", 0.75), ("p95", 0.95), ("p99", 0.99)):
        assert math.log(m[f"rollout_is_{name}"]) == pytest.approx(float(rho.quantile(q)), rel=0.02)


def test_a_sketch_is_symmetric_and_its_ends_hold_what_is_beyond() -> None:
    x = torch.tensor([1e-9, 1e-3, 0.7, 19.0, 1e6], dtype=torch.float64)
    assert torch.equal(QuantileSketch.histogram(-x), QuantileSketch.histogram(x).flip(0))
    ends = QuantileSketch.histogram(torch.tensor([-1e6, 1e6], dtype=torch.float64))
    assert ends[0] == 1 and ends[-1] == 1 and ends.sum() == 2
    for sign in (1, -1):
        assert QuantileSketch.over(sign * x[2:3], 0.5).value == pytest.approx(
            math.exp(sign * 0.7), rel=0.01
        )  # of a ratio


def test_the_guard_rejects_what_brings_the_step_above_its_limit_and_only_then() -> None:
    close, far, hopeless = [1.0, 1.0, 1.01, 1.0], [1.0, 3.0], [1.0] * 7 + [0.5e-4]

    def rejects(*sequences: list[float], **limits: float) -> list[int]:
        return MismatchGuard(on_mismatch="reject", **limits).rejects(of_ratios(*sequences)).int().tolist()

    assert rejects(close, close) == [0, 0]
    assert rejects(close, far, [], close) == [0, 1, 0, 0]
    assert rejects(*[close] * 20, far) == [0] * 21  # the step as a whole is within the limit
    assert rejects(close, hopeless, max_k3_kl=100.0) == [0, 1]
    assert rejects(close, hopeless, max_k3_kl=100.0, max_catastrophic=0.6) == [0, 0]
    assert MismatchGuard().exceeded({"mismatch/k3_kl": 0.01}) is None
    over = MismatchGuard(max_k3_kl=0.005).exceeded({"mismatch/k3_kl": 0.01})
    assert over == "mismatch/k3_kl is 0.01, above algorithm.mismatch.max_k3_kl=0.005"
