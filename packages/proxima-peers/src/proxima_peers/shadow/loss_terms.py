"""The terms of the loss under each convention: whose ratio, which bounds, which weights, which KL."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxima.core import PENALTIES
from proxima.core.correction.importance import Importance
from proxima.core.loss import check_needs
from proxima.core.penalty import K1, K2, K3, Abs
from proxima.core.ratio import Level, masked_log_ratio, masked_ratio
from proxima.core.surrogate.clip import Gspo, PpoClip
from proxima.data import UserError
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.shadow.choices import ESTIMATES, Convention
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.weight_choices import weight_tables
from proxima_peers.verify.variants import beyond_limit, unclamped

CENTRE = "ratio to"
RATIO = "ratio of"
RANGE = "clip range"
DUAL = "bound where A < 0"
CLAMP = "log-ratios"
WEIGHT = "weights"
SUMMED = "summed"
KL = "KL"
KL_WEIGHT = "KL is weighted"
ENTROPY = "entropy bonus"
CENTRES = {
    "old": "the log-probs recomputed before the update",
    "rollout": "the log-probs of the engine",
    "current": "its own log-probs, so that it is 1, with their gradient",
}
RATIOS = {
    "stated": "what the surrogate says",
    "token": "the token",
    "answer": "the answer, gradient through the mean",
    "answer_token": "the answer, gradient of the token's own",
}
RANGES = {
    "epsilon": "1 − ε to 1 + ε",
    "bounds": "the numbers are the bounds themselves",
    "upper": "the upper number is the bound itself, no lower one",
    "log": "e^−ε to e^ε",
}
DUALS = {
    "stated": "as stated",
    "none": "none",
    "three": "3, verl's default",
    "both": "of the ratio before the clip, whatever A is",
}
CLAMPS = {True: "clamped at ±20", False: "not clamped"}
SUMS = {
    "loss": "the tokens in the loss",
    "mask": "all tokens of the answers",
    "all": "all positions, padding with its values",
}
NO_WEIGHT, GIVEN_WEIGHT, GEOMETRIC_WEIGHT = (
    "none",
    "those of the dump, each token's",
    "those of the dump, geometric mean",
)
SMOOTH = " with the gradient of k2"
NO_KL = "none"
STATED_KL = "as stated"
TIMES: dict[str, Level | None] = {"": None, " times the ratio": "token", " times the answer's ratio": "sequence"}
YES_NO = {False: "no", True: "yes"}


Made = tuple[Tensor, Tensor]  # a term and its derivative by the log-probs, [B, T] each, 0 where it is not summed


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the loss under a convention. Of its tokens only the rows' sums are kept: there are many terms.

    Args:
        rows: [B] each: the sum, the sum of magnitudes, and the same of the derivative.
        make: computes the term and its derivative again, [B, T].
    """

    convention: Convention
    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    make: Callable[[], Made]

    @classmethod
    def of(cls, convention: Convention, made: Made, make: Callable[[], Made]) -> "Term":
        token, slope = made
        return cls(convention, (token.sum(1), token.abs().sum(1), slope.sum(1), slope.abs().sum(1)), make)


def update_batch(dump: Dump, mask: Tensor, leaf: Tensor, centre: str, advantage: Tensor) -> PolicyBatch:
    before = {"old": "old_log_prob", "rollout": "rollout_log_prob", "current": "log_prob"}[centre]
    fields = {"proximal_log_prob": dump[before].detach(), "advantage": advantage}
    behavior = next((name for name in ("rollout_log_prob", "old_log_prob") if name in dump), before)
    fields["behavior_log_prob"] = dump[behavior]
    for theirs, ours in (("reference_log_prob", "reference_log_prob"), ("token", "token"), ("entropy", "entropy")):
        if theirs in dump:
            fields[ours] = dump[theirs]
    return dump.batch(mask, leaf, **fields)


def _specs(dump: Dump) -> Iterator[tuple[Convention, Any]]:
    """The stated surrogate under all conventions of its ratio and bounds."""
    given = dump.settings.surrogate
    levels: list[tuple[str, Any]] = [("stated", given)]
    if isinstance(given, PpoClip):
        bounds: dict[str, Any] = {
            "epsilon_low": given.epsilon_low,
            "epsilon_high": given.epsilon_high,
            "dual_clip": given.dual_clip,
        }
        levels += [("answer", Gspo(form="sequence", **bounds)), ("answer_token", Gspo(form="token", **bounds))]
    elif isinstance(given, Gspo):
        low = given.epsilon_low
        high = given.epsilon_high
        levels.append(("token", PpoClip(low, high, given.dual_clip)))
        if given.form == "sequence":
            levels.append(("answer_token", Gspo(low, high, "token", given.dual_clip)))
        else:
            levels.append(("answer", Gspo(low, high, "sequence", given.dual_clip)))
    for level, spec in levels:
        for name, fields in _ranges(spec).items():
            for dual, more in _duals(spec).items():
                try:
                    changed = _with(spec, fields, more)
                except UserError:
                    continue  # such bounds are none
                yield {RATIO: RATIOS[level], RANGE: RANGES[name], DUAL: DUALS[dual]}, changed


def _with(spec: Any, fields: dict[str, float], dual: float | str | None) -> Any:
    changed = replace(spec, **fields) if fields else spec
    if dual == "stated":
        return changed
    if dual == "both":  # the lower of both bounds acts where A > 0, the given one where A < 0
        limit = changed.dual_clip
        high = min(changed.epsilon_high, limit - 1)
        return replace(changed, epsilon_high=high, dual_clip=max(limit, 1 + changed.epsilon_high))
    return replace(changed, dual_clip=dual)


def _ranges(spec: Any) -> dict[str, dict[str, float]]:
    """Fields of the surrogate under each reading of its range."""
    ranges: dict[str, dict[str, float]] = {"epsilon": {}}
    if not (hasattr(spec, "epsilon_low") and hasattr(spec, "epsilon_high")):
        return ranges
    low = spec.epsilon_low
    high = spec.epsilon_high
    ranges["bounds"] = {"epsilon_low": 1 - low, "epsilon_high": high - 1}
    ranges["upper"] = {"epsilon_low": 1.0, "epsilon_high": high - 1}
    if high < 20:
        ranges["log"] = {"epsilon_low": 1 - math.exp(-low), "epsilon_high": math.expm1(high)}
    return ranges


def _duals(spec: Any) -> dict[str, Any]:
    if not hasattr(spec, "dual_clip"):
        return {"stated": "stated"}
    duals: dict[str, Any] = {"stated": "stated"}
    if spec.dual_clip != 3.0:
        duals["three"] = 3.0
    if spec.dual_clip is not None:
        duals |= {"none": None, "both": "both"}
    return duals


def weight_name(convention: Convention) -> str:
    """The choice of weights that the dump does not have, but its settings can make."""
    return ", ".join(f"{axis} {choice}" for axis, choice in convention.items())


def weights_of(dump: Dump) -> dict[str, Tensor | None]:
    """The weights that may multiply the policy's term: those of the dump, or all that its settings can make."""
    if "weight" in dump:
        return {GIVEN_WEIGHT: dump["weight"], GEOMETRIC_WEIGHT: dump["weight"], NO_WEIGHT: None}
    weights: dict[str, Tensor | None] = {NO_WEIGHT: None}
    if isinstance(dump.settings.correction, Importance):
        for convention, weight in weight_tables(dump):
            weights[weight_name(convention)] = weight
    return weights


def policy_terms(
    dump: Dump, advantage: Tensor, mask: Tensor, summed: str, centre: str, weights: dict[str, Tensor | None]
) -> Iterator[Term]:
    """The policy's term under all conventions; nothing if the surrogate needs a tensor that the dump lacks.

    Args:
        mask: [B, T] bool, what is summed, by the name `summed`.
        centre: the denominator of the ratio.
        weights: [B, T] each, by name, from `weights_of`; None: no weight.
    """
    begun = {SUMMED: SUMS[summed], CENTRE: CENTRES[centre]}
    b = update_batch(dump, mask, dump["log_prob"], centre, advantage)
    far = beyond_limit(masked_log_ratio(b))
    clamps = (True, False) if far else (True,)
    for convention, spec in _specs(dump):
        for clamped in clamps:
            surrogate = partial(_surrogate, dump, advantage, mask, centre, spec, clamped=clamped)
            try:
                token, slope, unit = surrogate()
            except ValueError:
                return  # it needs a tensor that the dump lacks
            chosen = begun | convention
            if far:
                chosen[CLAMP] = CLAMPS[clamped]
            for name, weight in weights.items():
                if name == GEOMETRIC_WEIGHT and unit == "token":
                    continue
                weighted = partial(_weighted, name, weight, mask)
                again = partial(_again, surrogate, weighted)
                yield Term.of(chosen | {WEIGHT: name}, weighted((token, slope, unit)), again)


def _again(surrogate: Callable[[], tuple[Tensor, Tensor, str]], weighted: Callable[..., Made]) -> Made:
    return weighted(surrogate())


def _surrogate(
    dump: Dump, advantage: Tensor, mask: Tensor, centre: str, spec: Any, *, clamped: bool
) -> tuple[Tensor, Tensor, str]:
    """The surrogate's loss, its derivative by the log-probs, [B, T] each, and its unit."""
    leaf = dump["log_prob"].clone().requires_grad_()
    b = update_batch(dump, mask, leaf, centre, advantage)
    check_needs(spec, b)
    if clamped:
        out = spec(b)
    else:
        with unclamped():
            out = spec(b)
    (slope,) = torch.autograd.grad(out.loss.sum(), leaf)
    return out.loss.detach().double().view(mask.shape), slope.double(), out.unit


def _weighted(name: str, weight: Tensor | None, mask: Tensor, made: tuple[Tensor, Tensor, str]) -> Made:
    """The term with its weights. One number of an answer, at each of its tokens, has the derivative of its mean."""
    token, slope, unit = made
    if weight is None:
        return token, slope
    if name == GEOMETRIC_WEIGHT:
        chosen = _geometric(weight, mask)
    else:
        chosen = torch.where(mask, weight, 0.0)
    if unit == "sequence":
        return token * chosen, slope * chosen.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return token * chosen, slope * chosen


def _geometric(weight: Tensor, mask: Tensor) -> Tensor:
    """[B, T] the geometric mean of the answer's positive weights at each of those tokens, 0 elsewhere."""
    kept = mask & (weight > 0)
    total = torch.where(kept, weight, 1.0).log().sum(1, keepdim=True)
    return torch.where(kept, (total / kept.sum(1, keepdim=True).clamp(min=1)).exp(), 0.0)


def stated_penalty(spec: Any) -> str:
    """The name of a penalty; `as stated` for one that the table does not have."""
    if spec is None:
        return NO_KL
    for name, (kind, more) in ESTIMATES.items():
        for fields, times in ({}, ""), ({"straight_through": True}, SMOOTH), ({"unbiased": True}, " times the ratio"):
            if spec == PENALTIES[kind](spec.coefficient, **more, **fields):
                return f"{name}{times}"
    return STATED_KL


def kl_terms(dump: Dump, mask: Tensor, centre: str) -> Iterator[Term]:
    """The penalty under all conventions; only `none` if none is stated, or the dump lacks a tensor that it needs."""
    yield Term.of({KL: NO_KL}, _nothing(mask), partial(_nothing, mask))
    given = dump.settings.penalty
    if given is None:
        return
    kinds: dict[str, tuple[Any, Level | None]] = {}
    if stated_penalty(given) == STATED_KL:
        kinds[STATED_KL] = given, None
    if isinstance(given, K1 | K2 | K3 | Abs) and given.towards == "reference":
        for name, (kind, more) in ESTIMATES.items():
            for times, level in TIMES.items():
                kinds[f"{name}{times}"] = PENALTIES[kind](given.coefficient, **more), level
            kinds[f"{name}{SMOOTH}"] = PENALTIES[kind](given.coefficient, straight_through=True, **more), None
    choices = (False, True) if "weight" in dump else (False,)
    for said, (spec, level) in kinds.items():
        for weighted in choices:
            make = partial(_penalty, dump, mask, centre, spec, level, weighted=weighted)
            try:
                made = make()
            except ValueError:
                return
            yield Term.of({KL: said, KL_WEIGHT: YES_NO[weighted]}, made, make)


def _nothing(mask: Tensor) -> Made:
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return nothing, nothing


def _penalty(dump: Dump, mask: Tensor, centre: str, spec: Any, level: Level | None, *, weighted: bool) -> Made:
    leaf = dump["log_prob"].clone().requires_grad_()
    b = update_batch(dump, mask, leaf, centre, torch.zeros(mask.shape, dtype=torch.float64))
    value = spec(b)
    if level is not None:
        value = value * masked_ratio(b, level)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    token = value.detach().double().view(mask.shape)
    slope = slope.double()
    if not weighted:
        return token, slope
    weight = torch.where(mask, dump["weight"], 0.0)
    return token * weight, slope * weight


def entropy_terms(dump: Dump, mask: Tensor) -> Iterator[Term]:
    yield Term.of({ENTROPY: YES_NO[False]}, _nothing(mask), partial(_nothing, mask))
    if dump.settings.entropy_coefficient and "entropy" in dump:
        bonus = torch.where(mask, -dump.settings.entropy_coefficient * dump["entropy"], 0.0)
        made = (bonus, torch.zeros_like(bonus))
        yield Term.of({ENTROPY: YES_NO[True]}, made, lambda: made)
