"""The metrics that TRL's online trainers report, from the padded rows of a record (T3, T5, T9, T19)."""

import math
from typing import Any

import torch
from torch import Tensor

from proxima.core.metrics import SumCount, k3
from proxima_peers.verify.record import Record, Tracked

LEAST_LOG_WEIGHT = math.log(1e-8)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def loss_token_mean(values: Tensor, mask: Tensor) -> float:
    """The mean over the loss tokens, or over all rows, including empty ones, if there is one value per row ([B, 1])."""
    if values.shape[1] == 1 and mask.shape[1] != 1:
        inside = torch.ones_like(values, dtype=torch.bool)
    else:
        inside = mask
    return SumCount.over(values, inside).value


def epsilons(p: Tracked) -> tuple[float, float]:
    """The clip range below and above 1; `epsilon_high` is `epsilon_low` unless given."""
    low = p.get("epsilon_low", 0.2)
    high = p.get("epsilon_high")
    if high is None:
        high = low
    return low, high


def clip_shares(p: Tracked, gap: Tensor, advantage: Tensor, mask: Tensor) -> dict[str, float]:
    """Shares of the tokens whose `gap` leaves [−ε_low, ε_high] on the side of their advantage, and the extremes of
    these shares over the rows; a row without tokens has no share (T9)."""
    fall, rise = epsilons(p)
    low = (gap < -fall) & (advantage < 0)
    high = (gap > rise) & (advantage > 0)

    def of_rows(x: Tensor) -> Tensor:
        if x.shape[1] == 1 and mask.shape[1] != 1:
            return x[:, 0].double()
        return (x & mask).sum(1).double() / mask.sum(1)

    low_rows = of_rows(low)
    high_rows = of_rows(high)
    return {
        "clip_ratio/low_mean": loss_token_mean(low, mask),
        "clip_ratio/high_mean": loss_token_mean(high, mask),
        "clip_ratio/region_mean": loss_token_mean(low | high, mask),
        "clip_ratio/low_min": float(low_rows.nan_to_num(nan=torch.inf).min()),
        "clip_ratio/high_max": float(high_rows.nan_to_num(nan=-torch.inf).max()),
    }


def _rows(record: Record) -> tuple[Tensor, Tensor, Tensor]:
    """Mask [B, T], log-ratio [B, T] with 0 at padding, advantages [B, 1] or [B, T]."""
    mask = record.mask
    current = record.tensor("logp")
    before = record.tensor("behavior_logp") if record.has("behavior_logp") else current
    advantage = record.tensor("advantages")
    if advantage.dim() == 1:
        advantage = advantage[:, None]
    return mask, torch.where(mask, current - before, 0.0), advantage


def _common(record: Record, mask: Tensor, ratio: Tensor | float = 1.0) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if record.has("entropies"):
        numbers["entropy"] = loss_token_mean(record.tensor("entropies"), mask)
    if record.has("reference_logp"):
        gap = torch.where(mask, record.tensor("reference_logp") - record.tensor("logp"), 0.0)
        numbers["kl"] = loss_token_mean(k3(gap) * ratio, mask)
    return numbers


def grpo_numbers(record: Record, sampler: Tensor | None) -> dict[str, Any]:
    """GRPOTrainer. `sampler` [B, T] or [B, 1]: ratios that vespo multiplies into its weight, padding included (T7)."""
    p = record.params
    args = {**p, **p.section("args")}
    kind = p.get("loss_type", "dapo")
    mask, log_ratio, advantage = _rows(record)
    level = p.get("importance_sampling_level", "token")
    if level == "token":
        ratio = log_ratio.exp()
    else:
        ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    if level == "sequence_token":
        ratio = ratio.expand_as(log_ratio)
    corrected = args.get("use_bias_correction_kl", True)
    numbers = _common(record, mask, ratio if corrected else 1.0)  # the ratio before `delta` (T5)
    if kind in CLIPPED:
        bounded = ratio
        if args.get("delta") is not None:  # T3
            bounded = ratio.clamp(max=args["delta"])
        numbers |= clip_shares(p, bounded - 1, advantage, mask)
    elif kind == "cispo":
        capped = (ratio > p.get("epsilon_high", 0.2)) & (advantage > 0)  # T2
        numbers["cispo_clip_ratio"] = loss_token_mean(capped, mask)
    elif kind == "vespo":
        total = log_ratio.clamp(-20, 20).sum(1, keepdim=True)
        if sampler is not None:
            total = total + sampler.log().clamp(LEAST_LOG_WEIGHT, 20).sum(1, keepdim=True)
        numbers["vespo/phi_seq_mean"] = loss_token_mean(_phi(total.clamp(LEAST_LOG_WEIGHT, 20), advantage, args), mask)
    return numbers


def _phi(log_weight: Tensor, advantage: Tensor, args: dict[str, Any]) -> Tensor:
    """VESPO's weight of each row; its parameters pass through float32, like sapo's temperature (T6)."""
    up = advantage >= 0
    gain = torch.where(up, float(args.get("vespo_k_pos", 2.0)), float(args.get("vespo_k_neg", 3.0))).double()
    decay = torch.where(up, float(args.get("vespo_lambda_pos", 3.0)), float(args.get("vespo_lambda_neg", 2.0))).double()
    decay = decay.clamp(min=1e-4)
    return (decay + gain * log_weight - decay * log_weight.exp()).exp()


def gmpo_numbers(record: Record) -> dict[str, Any]:
    """GMPOTrainer: clipped where the log-ratio leaves [−ε_low, ε_high] on the side of the advantage."""
    p = record.params
    mask, log_ratio, advantage = _rows(record)
    return _common(record, mask) | clip_shares(p, log_ratio, advantage, mask)


def rloo_numbers(record: Record) -> dict[str, Any]:
    """RLOOTrainer: one ratio per row, that of the whole row."""
    p = record.params
    mask, log_ratio, advantage = _rows(record)
    ratio = log_ratio.sum(1, keepdim=True).exp()
    return _common(record, mask) | clip_shares(p, ratio - 1, advantage, mask)


def dppo_numbers(record: Record, keep: Tensor) -> dict[str, Any]:
    """TRL 1.3's DPPOTrainer; `keep` [B, T] bool, the tokens within the divergence bound."""
    mask, _, advantage = _rows(record)
    far = (record.tensor("logp").exp() - record.tensor("behavior_logp").exp()).abs()
    dropped = mask & ~keep
    return _common(record, mask) | {
        "prob_diff/mean": loss_token_mean(far, mask),
        "prob_diff/max": float(far[mask].max()),
        "prob_diff/min": float(far[mask].min()),
        "advantages/mean": advantage.mean(),
        "advantages/std": advantage.std(),
        "mask_ratio/negative_adv_mean": loss_token_mean(dropped & (advantage < 0), mask),
        "mask_ratio/positive_adv_mean": loss_token_mean(dropped & (advantage > 0), mask),
        "mask_ratio/overall_mean": loss_token_mean(dropped, mask),
    }
