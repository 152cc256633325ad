"""The metrics that verl's policy losses report: shares of clipped tokens and its `ppo_kl`, k1 of the log-ratio (P3)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.divergence import DIVERGENCES
from proxima.core.metrics import Metrics, SumCount
from proxima.core.ratio import LOG_RATIO_LIMIT, masked_log_ratio, masked_ratio
from proxima.core.surrogate import Cispo, ClipCov, Dppo, GeoMean, Gspo, KlCov, PpoClip, Sapo
from proxima.data import PolicyBatch

CLAMPED = (PpoClip, Dppo, Sapo, Cispo)  # verl bounds these log-ratios at ±20 before it averages them


@torch.no_grad()
def actor_numbers(spec: Any, b: PolicyBatch) -> Metrics:
    """What verl reports for our `spec`, under its bare names, over the loss mask of `b`."""
    mask = b.loss_mask
    log_ratio = masked_log_ratio(b)
    kl = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) if isinstance(spec, CLAMPED) else log_ratio
    none = SumCount.over(torch.zeros_like(mask), mask)
    numbers: Metrics = {
        "ppo_kl": SumCount.over(kl.abs() if isinstance(spec, KlCov) else -kl, mask)
    }  # kl_cov: mean |log-ratio| (P9)
    numbers |= {"pg_clipfrac": none, "pg_clipfrac_lower": none}
    if isinstance(spec, PpoClip | Gspo):
        own = spec(b).metrics
        both: Any = own["clip_fraction_low"] + own["clip_fraction_high"]  # type: ignore[operator]  # shares of the same tokens
        numbers |= {"pg_clipfrac": replace(both, count=both.count / 2), "pg_clipfrac_lower": own["clip_fraction_dual"]}
        ratio, advantage = masked_ratio(b), b.masked("advantage")
        bounded = ratio.clamp(1 - spec.epsilon_low, 1 + spec.epsilon_high)
        if bool(((ratio - bounded).abs().clamp(max=1e-12) < 1e-12)[ratio != bounded].any()):
            # On the very edge what counts is whether the products with the advantage round to the same number.
            numbers["pg_clipfrac"] = SumCount.over(-advantage * bounded > -advantage * ratio, mask)
    elif isinstance(spec, ClipCov):
        numbers["pg_clipfrac"] = spec(b).metrics["selected_fraction"]
    elif isinstance(spec, Cispo):
        numbers["pg_clipfrac"] = SumCount.over(~spec(b).keep, mask)
    elif isinstance(spec, GeoMean):  # tokens outside the range on either side, by the sign of A
        far = log_ratio != log_ratio.clamp(-spec.epsilon_low, spec.epsilon_high)
        advantage = b.masked("advantage")
        numbers["pg_clipfrac"] = SumCount.over(far & (advantage > 0), mask)
        numbers["pg_clipfrac_lower"] = SumCount.over(far & (advantage < 0), mask)
    elif isinstance(spec, Dppo):
        valid = _valid(spec, b)
        cap = float("inf") if spec.ratio_cap is None else spec.ratio_cap
        numbers["pg_clipfrac"] = SumCount.over(~valid, mask)
        numbers["pg_clipfrac_lower"] = SumCount.over(valid & (masked_ratio(b) > cap), mask)
    return numbers


def _valid(spec: Dppo, b: PolicyBatch) -> Tensor:
    """[N] bool: verl's keep mask, in which A = 0 is a negative advantage (P4)."""
    log_q, log_p = b.masked("log_prob"), b.masked("behavior_log_prob")
    far = DIVERGENCES[spec.divergence](log_p, log_q)
    low = spec.delta if spec.delta_low is None else spec.delta_low
    rises, falls = (far <= spec.delta) | (log_q <= log_p), (far <= low) | (log_q >= log_p)
    return torch.where(b.masked("advantage") > 0, rises, falls)
