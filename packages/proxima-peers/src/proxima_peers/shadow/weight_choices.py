"""Weights from the engine's policy to the trainer's, and which of the answer's tokens are in the loss."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import GroupStatistics
from proxima.core.correction.importance import Importance
from proxima.core.correction.rejection import Rejection
from proxima.core.loss import apply_corrections
from proxima.data import UserError
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.shadow.choices import Convention, TriedConvention
from proxima_peers.shadow.dump import Dump

LEVEL = "weight of"
BOUND = "bound"
LOWER = "lower bound"
TOWARDS = "numerator"
NORMALISED = "divided by their mean"
LEVELS = {
    "token": "the token",
    "sequence": "the answer, the product of its tokens",
    "geometric": "the answer, the geometric mean of its tokens",
}
BOUNDS = {"truncate": "capped", "clip": "0 outside", "clamp": "moved to the nearest bound", "none": "none"}
NUMERATORS = {"old": "the policy before the update", "current": "the policy in the update"}
YES_NO = {False: "no", True: "yes"}

MASK = "tokens in the loss"
MASKS = {
    "all": "all of the answers",
    "truncated": "without answers cut at the limit",
    "uniform": "without groups of equal rewards",
    "both": "without either",
}
REJECTED = "rejected"


def stated_weight(spec: Any) -> Convention:
    """What a correction says on these axes."""
    if not isinstance(spec, Importance):
        return {}
    towards = "current" if spec.towards == "current" else "old"
    return {
        LEVEL: LEVELS[spec.level],
        BOUND: BOUNDS[spec.bound],
        LOWER: f"{spec.floor:g}",
        TOWARDS: NUMERATORS[towards],
        NORMALISED: YES_NO[spec.normalise],
    }


def weight_tables(dump: Dump) -> Iterator[tuple[Convention, Tensor]]:
    """All conventions of the weights, each with its [B, T], 0 outside the loss. Nothing without the engine's
    log-probs."""
    if "rollout_log_prob" not in dump:
        return
    given = dump.settings.correction
    bounds: list[tuple[str, float, float | None]] = [("none", 1.0, None)]
    if isinstance(given, Importance):
        bounds.append(("truncate", given.upper, None))
        for lower in dict.fromkeys((given.floor, 1 / given.upper, 0.0)):
            if lower <= given.upper:
                bounds += [("clip", given.upper, lower), ("clamp", given.upper, lower)]
    for level, towards in product(LEVELS, _numerators(dump)):
        for (bound, upper, least), normalise in product(bounds, (False, True)):
            made: dict[str, Any] = {"level": level, "bound": bound, "upper": upper, "lower": least}
            chosen = {LEVEL: LEVELS[level], BOUND: BOUNDS[bound], TOWARDS: NUMERATORS[towards]}
            if least is not None:
                chosen[LOWER] = f"{least:g}"
            chosen[NORMALISED] = YES_NO[normalise]
            spec = Importance(**made, normalise=normalise)
            yield chosen, _weights(dump, spec, towards)


def _numerators(dump: Dump) -> Iterable[str]:
    """The policies of the dump that may be compared with the engine's."""
    return NUMERATORS if "old_log_prob" in dump else ("current",)


def _compared(dump: Dump, mask: Tensor, towards: str) -> PolicyBatch:
    """The batch in which a correction compares the policy `towards` with the engine's."""
    before = dump["old_log_prob"] if towards == "old" else dump["log_prob"]
    return dump.batch(mask, dump["log_prob"], behavior_log_prob=dump["rollout_log_prob"], proximal_log_prob=before)


def _weights(dump: Dump, spec: Any, towards: str) -> Tensor:
    b = _compared(dump, dump.loss_mask, towards)
    weight = apply_corrections(b, [spec])[0].weight
    assert weight is not None
    return weight.double().view(dump.shape)


def weight_candidates(dump: Dump) -> Iterator[TriedConvention]:
    """All conventions, with the weights of the loss tokens, [tokens in the loss]."""
    mask = dump.loss_mask
    for convention, weight in weight_tables(dump):
        yield TriedConvention(convention, weight[mask], 10 * weight[mask].abs())


def stated_mask() -> Convention:
    return {MASK: MASKS["all"], REJECTED: "none"}


def mask_tables(dump: Dump) -> Iterator[tuple[Convention, Tensor]]:
    """All conventions of the loss mask, each with its [B, T] bool."""
    mask = dump["mask"]
    taken = {"all": mask}
    if "truncated" in dump:
        taken["truncated"] = mask & ~dump["truncated"][:, None]
    if "reward" in dump and "group" in dump:
        differing = mask & ~GroupStatistics.of(dump.outcomes()).uniform[:, None]
        taken |= {"uniform": differing, "both": taken.get("truncated", mask) & differing}
    for name, of_rows in taken.items():
        yield {MASK: MASKS[name], REJECTED: "none"}, of_rows
        for said, keep in _rejections(dump, of_rows):
            yield {MASK: MASKS[name], REJECTED: said}, keep


def _rejections(dump: Dump, mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tokens that the stated bounds keep, at each level."""
    given = dump.settings.correction
    if not isinstance(given, Rejection) or "rollout_log_prob" not in dump:
        return
    for towards in _numerators(dump):
        b = _compared(dump, mask, towards)
        for level, reduce in (("token", "mean"), ("sequence", "mean"), ("sequence", "sum"), ("sequence", "max")):
            for inverted in (False, True):
                lower = given.lower
                upper = given.upper
                if inverted:
                    if given.statistic != "ratio" or not lower or not upper:
                        continue
                    lower, upper = 1 / upper, 1 / lower
                try:
                    options: Any = {"level": level, "reduce": reduce}
                    spec = Rejection(statistic=given.statistic, upper=upper, lower=lower, **options)
                except UserError:
                    continue
                said = "tokens" if level == "token" else f"answers, by the {reduce} of their tokens"
                if inverted:
                    said += ", bounds of the reciprocal"
                kept = spec(b).keep & b.loss_mask
                yield f"{said}, {NUMERATORS[towards]}", kept.view(dump.shape)


def mask_candidates(dump: Dump) -> Iterator[TriedConvention]:
    """All conventions, with the mask as 0 and 1, [B * T]."""
    for convention, mask in mask_tables(dump):
        value = mask.double().flatten()
        yield TriedConvention(convention, value, torch.zeros_like(value))
