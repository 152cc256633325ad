"""From advantages to the loss and its gradient: whose ratio, which bounds, which weights, which KL, which mean."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from proxima.core.correction.importance import Importance
from proxima.core.loss import policy_loss
from proxima.core.penalty import K1, K2, K3, Abs
from proxima.core.ratio import masked_log_ratio, masked_ratio
from proxima.core.surrogate.clip import Gspo, PpoClip
from proxima.data import UserError
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.shadow.aggregate_choices import Factors, count_masks, factor_tables, stated_mean
from proxima_peers.shadow.choices import ATOL, Convention, Match, Search, covered, ranked
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.weight_choices import weight_tables
from proxima_peers.verify.variants import beyond_limit, unclamped

CENTRE, RATIO, RANGE, DUAL, CLAMP = "ratio to", "ratio of", "clip range", "bound where A < 0", "log-ratios"
WEIGHT, SUMMED, KL, KL_WEIGHT, ENTROPY = "weights", "summed", "KL", "KL is weighted", "entropy bonus"
CENTRES = {
    "old": "the log-probs recomputed before the update",
    "rollout": "the log-probs of the engine",
    "current": "its own log-probs: 1, with their gradient",
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
ESTIMATES: dict[str, Any] = {"none": None, "k1": K1, "k2": K2, "k3": K3, "k3 up to 10": K3, "|k1|": Abs}
TIMES = {"": "", " times the ratio": "token", " times the answer's ratio": "sequence"}
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


def stated_loss(dump: Dump) -> Convention:
    """What the settings say on all axes."""
    given = dump.settings
    penalty = given.penalty
    kinds = {K1: "k1", K2: "k2", K3: "k3", Abs: "|k1|"}
    kl = kinds.get(type(penalty), "none")
    if kl == "k3" and penalty.limit == 10.0:
        kl = "k3 up to 10"
    if kl != "none" and penalty.unbiased:
        kl += " times the ratio"
    return stated_mean(dump) | {
        CENTRE: CENTRES[stated_centre(dump)],
        RATIO: RATIOS["stated"],
        RANGE: RANGES["epsilon"],
        DUAL: DUALS["stated"],
        CLAMP: CLAMPS[True],
        SUMMED: SUMS["loss"],
        WEIGHT: GIVEN_WEIGHT if "weight" in dump else NO_WEIGHT,
        KL: kl,
        KL_WEIGHT: YES_NO[False],
        ENTROPY: YES_NO[given.entropy_coefficient != 0 and "entropy" in dump],
    }


def stated_centre(dump: Dump) -> str:
    """The stated centre of the ratio, or the first that the dump has."""
    there = [name for name in ("old", "rollout") if f"{name}_log_prob" in dump]
    return dump.settings.centre or (there[0] if there else "current")


def our_loss(dump: Dump, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """The loss as stated, [], and its derivative by the log-probs, [B, T].

    Raises:
        UserError: a stated spec needs a tensor that the dump lacks.
    """
    leaf = dump["log_prob"].clone().requires_grad_()
    b = _batch(dump, dump.loss_mask, leaf, stated_centre(dump), advantage)
    if "weight" in dump:
        b = replace(b, weight=dump["weight"].flatten())
    given = dump.settings
    correction = None if "weight" in dump else given.correction
    specs = {"surrogate": given.surrogate, "aggregate": given.aggregate}
    value = policy_loss(b, **specs, correction=correction, penalty=given.penalty, check=False).value
    if given.entropy_coefficient and "entropy" in dump:
        entropy = torch.where(dump.loss_mask, dump["entropy"], 0.0).flatten()
        denominator = given.aggregate.denominator(b.loss_mask, b.cu_seqlens).clamp(min=1)
        value = value - given.entropy_coefficient * given.aggregate(entropy, b) / denominator
    (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope


def _batch(dump: Dump, mask: Tensor, leaf: Tensor, centre: str, advantage: Tensor) -> PolicyBatch:
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
    levels = [("stated", given)]
    if isinstance(given, PpoClip):
        bounds = {"epsilon_low": given.epsilon_low, "epsilon_high": given.epsilon_high, "dual_clip": given.dual_clip}
        levels += [("answer", Gspo(form="sequence", **bounds)), ("answer_token", Gspo(form="token", **bounds))]
    elif isinstance(given, Gspo):
        levels.append(("token", PpoClip(given.epsilon_low, given.epsilon_high, given.dual_clip)))
        other = "token" if given.form == "sequence" else "sequence"
        name = "answer" if other == "sequence" else "answer_token"
        levels.append((name, Gspo(given.epsilon_low, given.epsilon_high, other, given.dual_clip)))  # type: ignore[arg-type]
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
    low, high = spec.epsilon_low, spec.epsilon_high
    ranges["bounds"] = {"epsilon_low": 1 - low, "epsilon_high": high - 1}
    ranges["upper"] = {"epsilon_low": 1.0, "epsilon_high": high - 1}
    if high < 20:
        ranges["log"] = {"epsilon_low": 1 - math.exp(-low), "epsilon_high": math.expm1(high)}
    return ranges


def _duals(spec: Any) -> dict[str, Any]:
    if not hasattr(spec, "dual_clip"):
        return {"stated": "stated"}
    duals: dict[str, Any] = {"stated": "stated", "three": 3.0}
    if spec.dual_clip is not None:
        duals |= {"none": None, "both": "both"}
    return duals


def _weights(dump: Dump) -> dict[str, Tensor | None]:
    """The weights that may multiply the policy's term: those of the dump, or all that its settings can make."""
    if "weight" in dump:
        return {GIVEN_WEIGHT: dump["weight"], GEOMETRIC_WEIGHT: dump["weight"], NO_WEIGHT: None}
    weights: dict[str, Tensor | None] = {NO_WEIGHT: None}
    if isinstance(dump.settings.correction, Importance):
        for convention, weight in weight_tables(dump):
            weights[", ".join(f"{axis} {choice}" for axis, choice in convention.items())] = weight
    return weights


def _policy_terms(dump: Dump, advantage: Tensor, mask: Tensor, summed: str, centre: str) -> Iterator[Term]:
    begun = {SUMMED: SUMS[summed], CENTRE: CENTRES[centre]}
    b = _batch(dump, mask, dump["log_prob"], centre, advantage)
    far = beyond_limit(masked_log_ratio(b))
    for convention, spec in _specs(dump):
        for clamped in (True, False) if far else (True,):
            surrogate = partial(_surrogate, dump, advantage, mask, centre, spec, clamped=clamped)
            try:
                token, slope, unit = surrogate()
            except ValueError:
                return  # it needs a tensor that the dump lacks
            chosen = begun | convention | ({CLAMP: CLAMPS[clamped]} if far else {})
            for name, weight in _weights(dump).items():
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
    b = _batch(dump, mask, leaf, centre, advantage)
    with nullcontext() if clamped else unclamped():
        out = spec(b)
    (slope,) = torch.autograd.grad(out.loss.sum(), leaf)
    return out.loss.detach().double().view(mask.shape), slope.double(), out.unit


def _weighted(name: str, weight: Tensor | None, mask: Tensor, made: tuple[Tensor, Tensor, str]) -> Made:
    """The term with its weights. One number of an answer, at each of its tokens, has the derivative of its mean."""
    token, slope, unit = made
    if weight is None:
        return token, slope
    chosen = _geometric(weight, mask) if name == GEOMETRIC_WEIGHT else torch.where(mask, weight, 0.0)
    if unit == "sequence":
        return token * chosen, slope * chosen.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return token * chosen, slope * chosen


def _geometric(weight: Tensor, mask: Tensor) -> Tensor:
    """[B, T] the geometric mean of the answer's positive weights at each of those tokens, 0 elsewhere."""
    kept = mask & (weight > 0)
    total = torch.where(kept, weight, 1.0).log().sum(1, keepdim=True)
    return torch.where(kept, (total / kept.sum(1, keepdim=True).clamp(min=1)).exp(), 0.0)


def _kl_terms(dump: Dump, mask: Tensor, centre: str) -> Iterator[Term]:
    """The penalty under all conventions; only `none` if none is stated."""
    yield Term.of({KL: "none"}, _nothing(mask), partial(_nothing, mask))
    given = dump.settings.penalty
    kinds = isinstance(given, K1 | K2 | K3 | Abs)
    if not kinds or given.towards != "reference" or "reference_log_prob" not in dump:
        return
    for name, kind in ESTIMATES.items():
        if kind is None:
            continue
        more = {"limit": 10.0} if name == "k3 up to 10" else {}
        spec = kind(given.coefficient, **more)
        for times, level in TIMES.items():
            for weighted in (False, True) if "weight" in dump else (False,):
                make = partial(_penalty, dump, mask, centre, spec, level, weighted=weighted)
                yield Term.of({KL: f"{name}{times}", KL_WEIGHT: YES_NO[weighted]}, make(), make)


def _nothing(mask: Tensor) -> Made:
    nothing = torch.zeros(mask.shape, dtype=torch.float64)
    return nothing, nothing


def _penalty(dump: Dump, mask: Tensor, centre: str, spec: Any, level: str, *, weighted: bool) -> Made:
    leaf = dump["log_prob"].clone().requires_grad_()
    b = _batch(dump, mask, leaf, centre, torch.zeros(mask.shape, dtype=torch.float64))
    value = spec(b)
    if level:
        value = value * masked_ratio(b, level)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    token, slope = value.detach().double().view(mask.shape), slope.double()
    weight = torch.where(mask, dump["weight"], 0.0) if weighted else torch.ones_like(token)
    return token * weight, slope * weight


def _entropy_terms(dump: Dump, mask: Tensor) -> Iterator[Term]:
    yield Term.of({ENTROPY: YES_NO[False]}, _nothing(mask), partial(_nothing, mask))
    if dump.settings.entropy_coefficient and "entropy" in dump:
        bonus = torch.where(mask, -dump.settings.entropy_coefficient * dump["entropy"], 0.0)
        made = (bonus, torch.zeros_like(bonus))
        yield Term.of({ENTROPY: YES_NO[True]}, made, lambda: made)


@dataclass(frozen=True)
class Family:
    """The terms that can be added up, and the factors that they can have: one position of the mask and of the centre.

    Args:
        policy, kl, entropy: the conventions of each term.
        factors: those of the mean.
    """

    policy: list[Term]
    kl: list[Term]
    entropy: list[Term]
    factors: list[Factors]

    def sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[P, K, E, F] each: loss and magnitude; [P, K, E, F] the sum of its derivative, and its magnitude."""
        policy, kl, entropy = (_stacked(terms) for terms in (self.policy, self.kl, self.entropy))
        factor = torch.stack([each.factor for each in self.factors])
        out = []
        for i in range(4):
            rows = policy[i][:, None, None] + kl[i][None, :, None] + entropy[i][None, None]
            out.append(rows @ factor.T)
        return out[0], out[1], out[2], out[3]

    def parts(self, index: tuple[int, ...]) -> tuple[Term, Term, Term, Factors]:
        p, k, e, f = index
        return self.policy[p], self.kl[k], self.entropy[e], self.factors[f]

    def convention(self, index: tuple[int, ...]) -> Convention:
        policy, kl, entropy, factors = self.parts(index)
        merged: dict[str, str] = {}
        for each in (policy.convention, kl.convention, entropy.convention, factors.convention):
            merged |= each
        return merged

    def slope(self, index: tuple[int, ...]) -> Tensor:
        """[B, T] the derivative by the log-probs."""
        policy, kl, _, factors = self.parts(index)
        return (_slope(policy) + _slope(kl)) * factors.factor[:, None]


@lru_cache(maxsize=4)  # matches that follow one another share their terms
def _slope(term: Term) -> Tensor:
    return term.make()[1]


def _stacked(terms: list[Term]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*(term.rows for term in terms), strict=True)]


def families(dump: Dump, advantage: Tensor) -> Iterator[Family]:
    """All conventions of the loss, one family after the other."""
    counted = count_masks(dump)
    factors = {name: list(factor_tables(dump, name, mask)) for name, mask in counted.items()}
    names = ("log_prob", "old_log_prob", "rollout_log_prob", "reference_log_prob", "weight", "entropy")
    everywhere = all(bool(dump[name].isfinite().all()) for name in names if name in dump)
    everywhere = everywhere and bool(advantage.isfinite().all())
    centres = [name for name in ("old", "rollout") if f"{name}_log_prob" in dump] + ["current"]
    stated = stated_centre(dump)
    for summed, mask in counted.items():
        if summed != "loss" and not everywhere:
            continue  # padding without values is in no mean
        wider = [name for name, other in counted.items() if not bool((mask & ~other).any())]
        denominators = [factor for name in wider for factor in factors[name]]
        for centre in sorted(centres, key=lambda name: name != stated):
            policy = list(_policy_terms(dump, advantage, mask, summed, centre))
            if policy:
                kl, entropy = list(_kl_terms(dump, mask, centre)), list(_entropy_terms(dump, mask))
                yield Family(policy, kl, entropy, denominators)


@dataclass(frozen=True)
class LossSearch:
    """The conventions that give the loss, those that give the gradient, and those that give both."""

    loss: Search
    gradient: Search
    both: Search


def search_loss(dump: Dump, advantage: Tensor) -> LossSearch:
    """Try all conventions of the loss on the trainer's loss and gradient, as far as the dump has them."""
    return search_families(dump, families(dump, advantage))


def search_families(dump: Dump, table: Iterable[Family]) -> LossSearch:
    """`search_loss` in a table that is already made."""
    stated = stated_loss(dump)
    theirs = dump.get("loss")
    given = dump.get("grad_log_prob")
    gradient = None if given is None else given.nan_to_num()
    loss, slope, both, values, spans = [], [], [], [], []
    for family in table:
        value, scale, sums, magnitude = family.sums()
        values.append(value.flatten())
        spans.append((ATOL + dump.rtol * scale).flatten())
        fit = torch.zeros(value.shape, dtype=torch.bool)
        if theirs is not None:
            fit = (value - theirs).abs() <= ATOL + dump.rtol * scale.maximum(theirs.abs())
            loss += [Match.of(family.convention(at), stated) for at in map(tuple, fit.nonzero().tolist())]
        if gradient is not None:
            total = gradient.sum()
            near = (sums - total).abs() <= ATOL + 10 * dump.rtol * magnitude.maximum(gradient.abs().sum())
            for at in map(tuple, near.nonzero().tolist()):
                if same_gradient(family.slope(at), gradient, dump):
                    match = Match.of(family.convention(at), stated)
                    slope.append(match)
                    both += [match] if bool(fit[at]) else []
    every = torch.cat(values) if values else torch.zeros(0)
    tried, chance = len(every), covered(every, torch.cat(spans)) if spans else 0.0
    return LossSearch(Search(ranked(loss), tried, chance), Search(ranked(slope), tried), Search(ranked(both), tried))


def same_gradient(ours: Tensor, theirs: Tensor, dump: Dump) -> bool:
    """True if each token's derivative is theirs, within the rounding of the largest."""
    allowed = ATOL + 5 * dump.rtol * theirs.abs().max()
    return bool(((ours - theirs).abs() <= allowed).all())
