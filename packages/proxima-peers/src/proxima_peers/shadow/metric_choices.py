"""Reported metrics: which statistic of which tokens, and over what it is averaged."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from proxima.core.metrics import k2, k3
from proxima.core.surrogate.clip import clip_bounds
from proxima_peers.shadow.aggregate_choices import (
    DENOMINATOR,
    LONGEST_ALLOWED,
    LONGEST_PRESENT,
    MEAN,
    OVER,
    PADDED_WIDTH,
    SUM,
    TOKEN_SUMS,
    count_masks,
    factor_tables,
)
from proxima_peers.shadow.choices import Convention, TriedConvention
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.loss_choices import stated_centre

STATISTIC = "statistic"
CENTRE = "against"
# names that peers report them under, after the last "/", and ours
NAMES = {
    "pg_clipfrac": "clip_fraction",
    "clip_ratio": "clip_fraction",
    "region_mean": "clip_fraction",
    "clip_fraction": "clip_fraction",
    "low_mean": "clip_fraction",
    "high_mean": "clip_fraction",
    "pg_clipfrac_lower": "clip_fraction",
    "ppo_kl": "approx_kl",
    "approx_kl": "approx_kl",
    "kl": "reference_kl",
    "kl_loss": "reference_kl",
    "reference_kl": "reference_kl",
    "entropy": "entropy",
    "ratio_mean": "ratio",
    "ratio": "ratio",
    "reward": "reward",
    "reward_mean": "reward",
    "advantage_mean": "advantage",
    "weight_mean": "weight",
}
KLS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": k2,
    "k3": lambda d: k3(-d),
    "k3 of the other direction": k3,
    "−k1": lambda d: -d,
    "|k1|": torch.abs,
}
PER_TOKEN = (LONGEST_ALLOWED, LONGEST_PRESENT, PADDED_WIDTH, TOKEN_SUMS, SUM)  # no mean of a statistic


def metric_statistics(dump: Dump, name: str, advantage: Tensor | None) -> Iterator[tuple[Convention, Tensor]]:
    """The statistics that a metric may be, [B, T] each, the usual one first; none for an unknown name."""
    kind = NAMES.get(name.rpartition("/")[2])
    mask = dump["mask"]
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    if kind in ("clip_fraction", "approx_kl", "ratio"):
        centres = [centre for centre in ("old", "rollout") if f"{centre}_log_prob" in dump]
        for centre in sorted(centres, key=lambda name: name != stated_centre(dump)):
            gap = torch.where(mask, dump["log_prob"] - dump[f"{centre}_log_prob"], 0.0)
            against = {CENTRE: centre}
            if kind == "ratio":
                yield against | {STATISTIC: "the ratio"}, gap.exp()
            elif kind == "approx_kl":
                for said, estimate in KLS.items():
                    yield against | {STATISTIC: f"{said} of π_old against π"}, estimate(-gap)
            elif advantage is not None:
                yield from ((against | {STATISTIC: said}, hit) for said, hit in _clips(dump, gap, advantage))
    elif kind == "reference_kl" and "reference_log_prob" in dump:
        gap = torch.where(mask, dump["log_prob"] - dump["reference_log_prob"], 0.0)
        before = dump.arrays.get("old_log_prob", dump["log_prob"])
        moved = torch.where(mask, dump["log_prob"] - before, 0.0)
        answer = (moved.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
        for times, ratio in (("", 1.0), (", times the ratio", moved.exp()), (", times the answer's ratio", answer)):
            for said, estimate in KLS.items():
                yield {STATISTIC: f"{said} of π against the reference{times}"}, estimate(gap) * ratio
    elif kind == "entropy" and "entropy" in dump:
        yield {STATISTIC: "the entropy"}, torch.where(mask, dump["entropy"], 0.0)
    elif kind == "reward" and "reward" in dump:
        yield {STATISTIC: "the reward"}, dump["reward"][:, None] + nothing
    elif kind == "advantage" and advantage is not None:
        yield {STATISTIC: "the advantage"}, torch.where(mask, advantage, 0.0)
    elif kind == "weight" and "weight" in dump:
        yield {STATISTIC: "the weight"}, torch.where(mask, dump["weight"], 0.0)


def _clips(dump: Dump, gap: Tensor, advantage: Tensor) -> Iterator[tuple[str, Tensor]]:
    spec = dump.settings.surrogate
    low = getattr(spec, "epsilon_low", None)
    high = getattr(spec, "epsilon_high", None)
    if low is None or high is None:
        return
    mask = dump["mask"]
    levels = {
        "the token": gap,
        "the answer": (gap * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1),
    }
    for level, of_level in levels.items():
        ratio = of_level.exp().expand_as(gap)
        dual = getattr(spec, "dual_clip", None)
        lower, upper = clip_bounds(ratio, advantage, low, high, None)
        below = ratio < lower
        above = ratio > upper
        shares = {
            "clipped on either side": below | above,
            "clipped below": below,
            "clipped above": above,
            "outside the range, whatever A is": (ratio < 1 - low) | (ratio > 1 + high),
            "above the number, A > 0": (ratio > high) & (advantage > 0),
        }
        for bound, said in ((dual, "beyond the bound where A < 0"), (3.0, "beyond 3 where A < 0")):
            if bound is not None:
                shares[said] = (ratio > bound) & (advantage < 0)
        for said, hit in shares.items():
            yield f"{said}, ratio of {level}", hit.double()


def metric_candidates(dump: Dump, name: str, advantage: Tensor | None) -> Iterator[TriedConvention]:
    """All conventions of a metric; none for an unknown one, or one that needs an array that the dump lacks."""
    statistics = list(metric_statistics(dump, name, advantage))
    counted = count_masks(dump)
    for convention, values in statistics:
        for counts, mask in counted.items():
            rows = torch.where(mask, values, 0.0).sum(1)
            size = torch.where(mask, values, 0.0).abs().sum(1)
            for factors in factor_tables(dump, counts, mask):
                if factors.convention[MEAN] not in PER_TOKEN:
                    made = {**convention, **factors.convention}
                    yield TriedConvention(made, (rows * factors.factor).sum(), (size * factors.factor).sum())


def stated_metric(dump: Dump, name: str, advantage: Tensor | None, stated: Convention) -> Convention:
    """The usual statistic, over the loss tokens of the batch."""
    first = next((convention for convention, _ in metric_statistics(dump, name, advantage)), {})
    return {**first, MEAN: "of the tokens", OVER: stated[OVER], DENOMINATOR: stated[DENOMINATOR]}
