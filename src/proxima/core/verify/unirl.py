"""UniRL's packed losses and its normalisers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage import Grpo
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSumNorm, TokenMean
from proxima.core.loss import policy_loss
from proxima.core.surrogate import Cppo, Dppo, Drpo, Gspo, PpoClip, Spo
from proxima.core.verify.record import Attempt, Check, Record, as_tensor
from proxima.data import Outcomes, PolicyBatch


def surrogate_of(p: dict[str, Any]) -> Any:
    """Our spec for the options of a UniRL algorithm, told apart by the names of its fields."""
    if "cppo_delta" in p:
        return Cppo(p["cppo_delta"], p["cppo_w_min"], p["cppo_delta_b"])
    if "dppo_delta" in p:
        return Dppo("binary_tv", p["dppo_delta"])
    if "drpo_epsilon" in p:
        return (Drpo if p.get("penalty_mu_weighted", True) else Spo)(p["drpo_epsilon"])
    return None


def losses(record: Record) -> Iterator[Attempt]:
    """algorithms/*.py: compute_loss_and_backward"""
    p = record.params
    rows = [as_tensor(row) for row in record.inputs["logp"]]
    lengths = torch.tensor([len(row) for row in rows])
    leaf = torch.cat(rows).requires_grad_()
    advantage = as_tensor(record.inputs["advantages"]).repeat_interleave(lengths)
    mask = torch.ones_like(leaf, dtype=torch.bool)
    if record.has("loss_mask"):
        mask = torch.cat([as_tensor(row) for row in record.inputs["loss_mask"]]) != 0
    behavior = torch.cat([as_tensor(row) for row in record.inputs["behavior_logp"]])
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    b = PolicyBatch(log_prob=leaf, behavior_log_prob=behavior, advantage=advantage, loss_mask=mask, cu_seqlens=edges)
    spec = surrogate_of(p)
    low: Any = p.get("clip_range")
    high: Any = p.get("clip_range_high", low)
    if spec is None and "GSPO" in record.source:
        spec = Gspo(low, high, "sequence")
    elif spec is None:
        spec = PpoClip(low, high)
    mode = p.get("loss_agg_mode", "seq-mean-token-mean")
    makers: dict[str, Any] = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
    aggregate: Any = SequenceMeanTokenSumNorm(p["horizon"]) if mode == "seq-mean-token-sum-norm" else makers[mode]()
    loss = policy_loss(b, surrogate=spec, aggregate=aggregate, check=False)
    yield None, _checks(record, leaf, loss.value, loss.keep)
    yield "U3", _checks(record, leaf, loss.numerator / len(leaf), loss.keep)
    if isinstance(spec, (Cppo, Dppo)):  # the authors' probabilities and mask are float32: a token on the edge may fall the other way
        single = {"log_prob": b.log_prob.detach().float(), "behavior_log_prob": behavior.float(), "advantage": advantage.float()}
        keep = spec(replace(b, **single, proximal_log_prob=behavior.float())).keep
        ratio = (leaf - behavior).clamp(-20, 20).exp()
        value = aggregate(torch.where(keep, -advantage * ratio, 0.0), b) / aggregate.denominator(mask, edges)
        yield "float32", _checks(record, leaf, value, keep)


def _checks(record: Record, leaf: Tensor, value: Tensor, keep: Tensor) -> list[Check]:
    (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
    checks = [Check("loss", value.detach(), record.expected["loss"], **record.tolerance())]
    theirs = torch.cat([as_tensor(row) for row in record.expected["grad_logp"]])
    checks.append(Check("grad_logp", gradient, theirs, **record.tolerance()))
    if "keep" in record.expected:
        own = torch.cat([as_tensor(row) for row in record.expected["keep"]])
        checks.append(Check("keep", keep.double(), own))
    return checks


def normalizers(record: Record) -> Iterator[Attempt]:
    """normalizers.normalize_grouped, normalize_global: (r − mean) / (std + ε), ddof = 1."""
    p = record.params
    reward = as_tensor(record.inputs["rewards"])
    group = torch.zeros(len(reward), dtype=torch.long)
    for label, members in enumerate(record.inputs.get("group_indices") or []):
        group[members] = label
    if p.get("trim_outliers_ratio"):
        return  # statistics without the extremes: nothing of ours
    epsilon = p.get("epsilon", 1e-8)
    scale: Any = "batch" if p.get("use_global_std") else "group"
    ours = Grpo(scale, epsilon)(Outcomes.of(reward, group))
    if p.get("clip_max") is not None:
        ours = ours.clamp(-p["clip_max"], p["clip_max"])
    yield None, [Check("advantages", ours, record.expected["advantages"], 1e-7, 1e-9)]
