"""From advantages to the loss and its gradient: the sum of its terms, times the factors of its mean."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from proxima.core.loss import policy_loss
from proxima_peers.shadow.aggregate_choices import Factors, count_masks, factor_tables, stated_mean
from proxima_peers.shadow.choices import ATOL, Convention, Found, Match, covered, ranked
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.loss_terms import (
    CENTRE,
    CENTRES,
    CLAMP,
    CLAMPS,
    DUAL,
    DUALS,
    ENTROPY,
    GIVEN_WEIGHT,
    KL,
    KL_WEIGHT,
    NO_WEIGHT,
    RANGE,
    RANGES,
    RATIO,
    RATIOS,
    SUMMED,
    SUMS,
    WEIGHT,
    YES_NO,
    Term,
    entropy_terms,
    kl_terms,
    policy_terms,
    stated_penalty,
    update_batch,
    weight_name,
    weights_of,
)
from proxima_peers.shadow.weight_choices import stated_weight, weight_tables


def stated_loss(dump: Dump) -> Convention:
    """What the settings say on all axes."""
    given = dump.settings
    return stated_mean(dump) | {
        CENTRE: CENTRES[stated_centre(dump)],
        RATIO: RATIOS["stated"],
        RANGE: RANGES["epsilon"],
        DUAL: DUALS["stated"],
        CLAMP: CLAMPS[True],
        SUMMED: SUMS["loss"],
        WEIGHT: _stated_weight(dump),
        KL: stated_penalty(given.penalty),
        KL_WEIGHT: YES_NO[False],
        ENTROPY: YES_NO[given.entropy_coefficient != 0 and "entropy" in dump],
    }


def _stated_weight(dump: Dump) -> str:
    if "weight" in dump:
        return GIVEN_WEIGHT
    stated = stated_weight(dump.settings.correction)
    if not stated:
        return NO_WEIGHT
    for convention, _ in weight_tables(dump):
        if all(stated[axis] == choice for axis, choice in convention.items()):
            return weight_name(convention)
    return NO_WEIGHT


def stated_centre(dump: Dump) -> str:
    """The stated centre of the ratio, or the first that the dump has."""
    if dump.settings.centre:
        return dump.settings.centre
    for name in ("old", "rollout"):
        if f"{name}_log_prob" in dump:
            return name
    return "current"


def our_loss(dump: Dump, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """The loss as stated, [], and its derivative by the log-probs, [B, T].

    Raises:
        UserError: a stated spec needs a tensor that the dump lacks.
    """
    leaf = dump["log_prob"].clone().requires_grad_()
    b = update_batch(dump, dump.loss_mask, leaf, stated_centre(dump), advantage)
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


@dataclass(frozen=True)
class LossTable:
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
        policy = _stacked(self.policy)
        kl = _stacked(self.kl)
        entropy = _stacked(self.entropy)
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


def loss_tables(dump: Dump, advantage: Tensor) -> Iterator[LossTable]:
    """All conventions of the loss, one family after the other."""
    counted = count_masks(dump)
    factors = {name: list(factor_tables(dump, name, mask)) for name, mask in counted.items()}
    names = ("log_prob", "old_log_prob", "rollout_log_prob", "reference_log_prob", "weight", "entropy")
    everywhere = all(bool(dump[name].isfinite().all()) for name in names if name in dump)
    everywhere = everywhere and bool(advantage.isfinite().all())
    centres = [name for name in ("old", "rollout") if f"{name}_log_prob" in dump] + ["current"]
    stated = stated_centre(dump)
    weights = weights_of(dump)
    for summed, mask in counted.items():
        if summed != "loss" and not everywhere:
            continue  # padding without values is in no mean
        wider = [name for name, other in counted.items() if not bool((mask & ~other).any())]
        denominators = [factor for name in wider for factor in factors[name]]
        for centre in sorted(centres, key=lambda name: name != stated):
            policy = list(policy_terms(dump, advantage, mask, summed, centre, weights))
            if policy:
                kl = list(kl_terms(dump, mask, centre))
                entropy = list(entropy_terms(dump, mask))
                yield LossTable(policy, kl, entropy, denominators)


@dataclass(frozen=True)
class FoundLoss:
    """The conventions that give the loss, those that give the gradient, and those that give both."""

    loss: Found
    gradient: Found
    both: Found


def search_loss(dump: Dump, advantage: Tensor) -> FoundLoss:
    """Try all conventions of the loss on the trainer's loss and gradient, as far as the dump has them."""
    return search_tables(dump, loss_tables(dump, advantage))


def search_tables(dump: Dump, table: Iterable[LossTable]) -> FoundLoss:
    """`search_loss` in a table that is already made."""
    stated = stated_loss(dump)
    theirs = dump.get("loss")
    given = dump.get("grad_log_prob")
    gradient = None if given is None else given.nan_to_num()
    loss = []
    slope = []
    both = []
    values = []
    spans = []
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
                    if bool(fit[at]):
                        both.append(match)
    tried = sum(map(len, values))
    chance = 0.0
    if values and theirs is not None:
        chance = covered(torch.cat(values), torch.cat(spans), theirs)
    return FoundLoss(Found(ranked(loss), tried, chance), Found(ranked(slope), tried), Found(ranked(both), tried))


def same_gradient(ours: Tensor, theirs: Tensor, dump: Dump) -> bool:
    """True if each token's derivative is theirs, within the rounding of the largest."""
    allowed = ATOL + 5 * dump.rtol * theirs.abs().max()
    return bool(((ours - theirs).abs() <= allowed).all())
