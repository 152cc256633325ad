"""UniRL's packed losses and its normalisers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.conformance.by_hand import as_tensor
from proxima.core.advantage import Grpo
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean
from proxima.core.loss import policy_loss
from proxima.core.metrics import Spread, k2, k3
from proxima.core.ratio import LOG_RATIO_LIMIT
from proxima.core.segment import segment_mean
from proxima.core.surrogate import Cppo, Dppo, Drpo, Gspo, PpoClip, Spo
from proxima.data import Outcomes, PolicyBatch
from proxima.peers.verify.record import Attempt, Check, Record


def unirl_surrogate(p: dict[str, Any]) -> Any:
    """Our spec for the options of a UniRL algorithm, told apart by the names of its fields."""
    if "cppo_delta" in p:
        return Cppo(p["cppo_delta"], p["cppo_w_min"], p["cppo_delta_b"])
    if "dppo_delta" in p:
        return Dppo("binary_tv", p["dppo_delta"])
    if "drpo_epsilon" in p:
        return (Drpo if p.get("penalty_mu_weighted", True) else Spo)(p["drpo_epsilon"])
    return None


def concatenated(rows: list[Any]) -> Tensor:
    """Rows of any length one after the other."""
    return torch.cat([as_tensor(row) for row in rows])


def losses(record: Record) -> Iterator[Attempt]:
    """algorithms/*.py: compute_loss_and_backward"""
    p = record.params
    lengths = torch.tensor([len(row) for row in record.inputs["logp"]])
    leaf = concatenated(record.inputs["logp"]).requires_grad_()
    advantage = as_tensor(record.inputs["advantages"]).repeat_interleave(lengths)
    mask = torch.ones_like(leaf, dtype=torch.bool)
    if record.has("loss_mask"):
        mask = concatenated(record.inputs["loss_mask"]) != 0
    behavior = concatenated(record.inputs["behavior_logp"])
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    b = PolicyBatch(log_prob=leaf, behavior_log_prob=behavior, advantage=advantage, loss_mask=mask, cu_seqlens=edges)
    spec = unirl_surrogate(p)
    low: Any = p.get("clip_range")
    high: Any = p.get("clip_range_high", low)
    if spec is None:
        spec = Gspo(low, high, "sequence") if "GSPO" in record.source else PpoClip(low, high)
    mode = p.get("loss_agg_mode", "seq-mean-token-mean")
    makers: dict[str, Any] = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
    aggregate: Any = SequenceMeanTokenSumNorm(p["horizon"]) if mode == "seq-mean-token-sum-norm" else makers[mode]()
    loss = policy_loss(b, surrogate=spec, aggregate=aggregate, check=False)
    everywhere = spec(replace(b, loss_mask=torch.ones_like(mask))).keep  # mask and metrics ignore the loss mask (U7)
    yield None, _checks(record, b, spec, leaf, loss.value, everywhere)
    yield "U3", _checks(record, b, spec, leaf, loss.numerator / len(leaf), everywhere)
    if isinstance(spec, (Cppo, Dppo)):  # the authors' mask is computed in float32: a token on the edge may differ
        single = replace(b, log_prob=leaf.detach().float(), advantage=advantage.float())
        keep = spec(replace(single, behavior_log_prob=behavior.float(), proximal_log_prob=behavior.float())).keep
        ratio = (leaf - behavior).clamp(-20, 20).exp()
        value = aggregate(torch.where(keep, -advantage * ratio, 0.0), b) / aggregate.denominator(mask, edges)
        yield "float32", _checks(record, b, spec, leaf, value, keep)


def _checks(record: Record, b: PolicyBatch, spec: Any, leaf: Tensor, value: Tensor, keep: Tensor) -> list[Check]:
    (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
    theirs, loose = record.expected, record.tolerance()
    checks = [record.expect("loss", value.detach(), **loose)]
    checks.append(Check("grad_logp", gradient, concatenated(theirs["grad_logp"]), **loose))
    if "keep" in theirs:
        checks.append(Check("keep", keep.double(), concatenated(theirs["keep"])))
    echoed = [name for name in ("cppo_delta", "dppo_delta", "drpo_epsilon", "clip_range") if name in record.params]
    numbers = {"policy_loss": value.detach()} | {name: record.params[name] for name in echoed}
    return checks + record.checks(numbers | numbers_of(spec, b, keep), rtol=1e-6, atol=1e-9)


@torch.no_grad()
def numbers_of(spec: Any, b: PolicyBatch, keep: Tensor) -> dict[str, Any]:
    """What an algorithm of UniRL reports, over all packed tokens, or sequences for GSPO."""
    assert b.behavior_log_prob is not None
    gap = b.log_prob - b.behavior_log_prob
    numbers: dict[str, Any] = {
        "rollout_replay_logp_absdiff_mean": gap.abs().mean(),
        "rollout_replay_logp_absdiff_max": gap.abs().max(),
    }
    if isinstance(spec, (Gspo, PpoClip)):
        if isinstance(spec, Gspo):
            numbers |= _k3_numbers(b)
            some = b.cu_seqlens.diff() > 0
            gap = segment_mean(gap, torch.ones_like(b.loss_mask), b.cu_seqlens)[some].clamp(max=10.0)
        return numbers | _clip_numbers(gap, spec)
    gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = gap.exp()
    numbers |= {"ratio_mean": ratio.mean(), "ratio_max": ratio.max(), "approx_kl": k3(gap).mean()}
    if isinstance(spec, (Drpo, Spo)):
        numbers |= _pull_numbers(spec, b, ratio)
    else:
        numbers["masked_fraction"] = 1 - keep.double().mean()
    return numbers


def _clip_numbers(gap: Tensor, spec: Any) -> dict[str, Any]:
    """Of the ratio that is clipped; k2 of its log (U6)."""
    ratio = gap.exp()
    above, below = ratio - 1 > spec.epsilon_high, 1 - ratio > spec.epsilon_low
    return {
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std() if len(ratio) > 1 else 0.0,
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_fraction": (above | below).double().mean(),
        "clipfrac_gt_one": above.double().mean(),
        "clipfrac_lt_one": below.double().mean(),
        "approx_kl": k2(gap).mean(),
    }


def _k3_numbers(b: PolicyBatch) -> dict[str, Any]:
    """k3 of each token in float32."""
    assert b.behavior_log_prob is not None
    values = k3((b.log_prob.float() - b.behavior_log_prob.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    numbers: dict[str, Any] = {"k3_mean": values.mean(), "k3_max": values.max()}
    if len(values) > 1:
        numbers |= {f"k3_p{share}": torch.quantile(values, share / 100) for share in (90, 99)}
    return numbers


def _pull_numbers(spec: Any, b: PolicyBatch, ratio: Tensor) -> dict[str, Any]:
    """DRPO's penalty, and the shares of ratios beyond 1 ± ε / μ (SPO: 1 ± ε)."""
    assert b.advantage is not None and b.behavior_log_prob is not None
    weight = b.behavior_log_prob.exp() if isinstance(spec, Drpo) else torch.ones_like(ratio)
    reach = spec.epsilon / weight
    return {
        "drpo_penalty_mean": (b.advantage.abs() * weight * (ratio - 1).square() / (2 * spec.epsilon)).mean(),
        "clipfrac_upper": (ratio > 1 + reach).double().mean(),
        "clipfrac_lower": (ratio < 1 - reach).double().mean(),
    }


def normalizers(record: Record) -> Iterator[Attempt]:
    """normalizers.normalize_grouped, normalize_global: (r − mean) / (std + ε), ddof = 1."""
    p = record.params
    reward = as_tensor(record.inputs["rewards"])
    group = torch.zeros(len(reward), dtype=torch.long)
    for label, members in enumerate(record.inputs.get("group_indices") or []):
        group[members] = label
    epsilon = p.get("epsilon", 1e-8)
    scale: Any = "batch" if p.get("use_global_std") else "group"
    if p.get("trim_outliers_ratio"):
        ours = trimmed(reward, group, p["trim_outliers_ratio"], reward.std() if scale == "batch" else None, epsilon)
    else:
        ours = Grpo(scale, epsilon)(Outcomes.of(reward, group))
    if p.get("clip_max") is not None:
        ours = ours.clamp(-p["clip_max"], p["clip_max"])
    yield None, [record.expect("advantages", ours, 1e-7, 1e-9)]


def trimmed(reward: Tensor, group: Tensor, share: float, std: Tensor | None, epsilon: float) -> Tensor:
    """[S] all rewards standardised; each group's mean and deviation leave out `share` of its rewards at either end."""
    out = torch.zeros_like(reward)
    for label in group.unique():
        members = group == label
        ordered = reward[members].sort().values
        cut = int(len(ordered) * share)
        inner = ordered[cut : len(ordered) - cut] if len(ordered) > 2 and 2 * cut < len(ordered) else ordered
        spread = Spread.over(inner, torch.ones_like(inner, dtype=torch.bool), "sample_std")
        out[members] = (reward[members] - spread.mean) / ((spread.value if std is None else std) + epsilon)
    return out
