"""The stages of an update step, each recomputed from the trainer's own numbers before it, with a verdict."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from proxima.core.advantage.token import Gae
from proxima.core.correction.importance import Importance
from proxima.core.loss import apply_corrections
from proxima_peers.shadow.advantage_choices import advantage_candidates, stated_advantage
from proxima_peers.shadow.choices import ATOL, Found, TriedConvention, first_of_row, search
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.loss_choices import FoundLoss, our_loss, same_gradient, search_loss, stated_loss
from proxima_peers.shadow.metric_choices import metric_candidates, stated_metric
from proxima_peers.shadow.token_advantage_choices import (
    KL_POLICY,
    SCORED,
    rewards_of_tokens,
    shaped_rewards,
    stated_rewards,
    stated_token_advantage,
    token_advantage_candidates,
)
from proxima_peers.shadow.weight_choices import mask_candidates, stated_mask, stated_weight, weight_candidates

Verdict = Literal["same", "explained", "unexplained", "not recomputed"]

NOTHING = Found((), 0)


@dataclass(frozen=True)
class StageVerdict:
    """One number, or one number for each answer or token, of the trainer and of us.

    Args:
        name: `advantages`, `weights`, `mask`, `loss`, `metric NAME`, `gradient` or `gradient norm`.
        verdict: `same` as stated; `explained` by other conventions; `unexplained`: by none; `not recomputed`.
        ours, theirs: the number, or where they are farthest apart.
        where: which answer or token that is.
        found: the conventions that give the trainer's number.
        reason: why it was not recomputed, or what else there is to say.
    """

    name: str
    verdict: Verdict
    ours: float | None = None
    theirs: float | None = None
    where: str = ""
    found: Found = NOTHING
    reason: str = ""


def stages(dump: Dump) -> Iterator[StageVerdict]:
    """All stages in their order: advantages, weights, mask, loss, metrics, gradient, gradient norm."""
    yield _advantages(dump)
    yield _weights(dump)
    yield _mask(dump)
    advantage, reason = advantage_of(dump)
    if advantage is None:
        yield StageVerdict("loss", "not recomputed", reason=reason)
        yield from _metrics(dump, None)
        yield StageVerdict("gradient", "not recomputed", reason=reason)
    else:
        found = None
        if "loss" in dump or "grad_log_prob" in dump:
            found = search_loss(dump, advantage)
        ours, refused = _our_loss(dump, advantage)
        yield _loss(dump, ours, found, refused)
        yield from _metrics(dump, advantage)
        yield _gradient(dump, ours, found, refused)
    yield _gradient_norm(dump)


def first_disagreement(made: list[StageVerdict]) -> StageVerdict | None:
    """The first stage that is not the same; None if there is none."""
    return next((stage for stage in made if stage.verdict in ("explained", "unexplained")), None)


def advantage_of(dump: Dump) -> tuple[Tensor | None, str]:
    """[B, T] the trainer's advantages, or ours of its rewards; else None and the reason."""
    if "advantage" in dump:
        return dump["advantage"], ""
    missing = _lacks_rewards(dump)
    if missing:
        return None, f"the dump has no advantage, and {missing}"
    return _our_advantage(dump)


def _lacks_rewards(dump: Dump) -> str:
    """What the dump lacks for advantages from rewards; empty if it has all."""
    needed = ["reward"]
    if not dump.settings.advantage.per_token:
        needed.append("group")
    missing = [name for name in needed if name not in dump]
    if missing:
        return f"no {' and '.join(missing)}"
    return ""


def _our_advantage(dump: Dump) -> tuple[Tensor | None, str]:
    """[B, T] as stated; None and the reason if the dump lacks what that needs."""
    spec = dump.settings.advantage
    shaped = next(shaped_rewards(dump))
    if dump.settings.reward_kl is not None and KL_POLICY not in shaped.convention:
        return None, "the KL in the reward needs reference_log_prob, and old_log_prob or rollout_log_prob"
    try:
        if spec.per_token:
            of_tokens: Tensor = spec(rewards_of_tokens(dump, shaped))
            return of_tokens.view(dump.shape), ""
        of_answers: Tensor = spec(replace(dump.outcomes(), reward=shaped.total))
        return of_answers[:, None].expand(dump.shape).contiguous(), ""
    except ValueError as error:
        return None, f"as stated it can't be computed: {error}"


def _place(dump: Dump, row: int, at: int | None = None) -> str:
    if at is None:
        return f"answer {row}"
    place = f"answer {row}, position {at}"
    if "token" in dump:
        place += f", token {int(dump['token'][row, at])}"
    return place


def _apart(dump: Dump, ours: Tensor, theirs: Tensor, mask: Tensor) -> tuple[float, float, str]:
    """Both numbers where they are farthest apart in `mask` [B, T], and the place."""
    far = torch.where(mask, (ours - theirs).abs().nan_to_num(nan=torch.inf), -1.0)
    row, at = divmod(int(far.flatten().argmax()), mask.shape[1])
    return float(ours[row, at]), float(theirs[row, at]), _place(dump, row, at)


def _advantages(dump: Dump) -> StageVerdict:
    name = "advantages"
    mask = dump.loss_mask
    if "advantage" not in dump:
        return StageVerdict(name, "not recomputed", reason="the dump has no advantage")
    missing = _lacks_rewards(dump)
    if missing:
        return StageVerdict(name, "not recomputed", reason=f"the dump has {missing}")
    ours, reason = _our_advantage(dump)
    theirs = dump["advantage"]
    spec = dump.settings.advantage
    if spec.per_token:
        stated = stated_token_advantage(spec)
        candidates: Iterable[TriedConvention] = token_advantage_candidates(dump, spec)
        numbers = theirs[mask]
        if not stated or (isinstance(spec, Gae) and "value" not in dump):
            said = reason or "the tables have no such advantage of tokens"
            return StageVerdict(name, "not recomputed", reason=said)
    else:
        stated = stated_advantage(spec)
        some = mask.any(1)
        row = first_of_row(theirs, mask)
        uneven = mask & ((theirs - row[:, None]).abs() > ATOL + dump.rtol * row.abs()[:, None])
        if bool(uneven.any()):
            r, at = uneven.nonzero()[0].tolist()
            said = "differs within an answer, which rewards of whole answers can't give"
            mine = None if ours is None else float(ours[r, at])
            return StageVerdict(name, "unexplained", mine, float(theirs[r, at]), _place(dump, r, at), reason=said)
        candidates = _of_answers(dump, some)
        numbers = row[some]
    found = search(candidates, stated | stated_rewards(dump), numbers, dump.rtol)
    if ours is None:
        return StageVerdict(name, _verdict(False, found), found=found, reason=reason)
    apart = _apart(dump, ours, theirs, mask)
    near = abs(apart[0] - apart[1]) <= ATOL + dump.rtol * max(1.0, float(numbers.abs().max()))
    same = near or (stated and found.matches and not found.matches[0].departures)
    return StageVerdict(name, _verdict(same, found), *apart, found)


def _of_answers(dump: Dump, some: Tensor) -> Iterator[TriedConvention]:
    """The candidates of the answers with a loss token."""
    plain = False
    for shaped in shaped_rewards(dump):
        convention = shaped.convention
        if KL_POLICY not in convention:
            if plain:
                continue
            plain = True  # without a KL it does not matter which tokens have a reward
            convention = {axis: choice for axis, choice in convention.items() if axis != SCORED}
        for each in advantage_candidates(replace(dump.outcomes(), reward=shaped.total), dump.settings.advantage):
            yield TriedConvention(convention | each.convention, each.value[some], each.scale[some])


def _verdict(same: Any, found: Found) -> Verdict:
    if same:
        return "same"
    if found.matches:
        return "explained"
    return "unexplained"


def _weights(dump: Dump) -> StageVerdict:
    name = "weights"
    mask = dump.loss_mask
    if "weight" not in dump:
        return StageVerdict(name, "not recomputed", reason="the dump has no weight")
    if "rollout_log_prob" not in dump:
        return StageVerdict(name, "not recomputed", reason="the dump has no rollout_log_prob")
    spec = dump.settings.correction
    theirs = dump["weight"]
    found = search(weight_candidates(dump), stated_weight(spec), theirs[mask], dump.rtol)
    before = dump["old_log_prob"] if "old_log_prob" in dump else dump["log_prob"]
    b = dump.batch(mask, dump["log_prob"], behavior_log_prob=dump["rollout_log_prob"], proximal_log_prob=before)
    ours = torch.ones(mask.shape, dtype=torch.float64)
    if isinstance(spec, Importance):
        weight = apply_corrections(b, [spec])[0].weight
        assert weight is not None
        ours = weight.double().view(mask.shape)
    numbers = _apart(dump, ours, theirs, mask)
    near = (ours - theirs).abs() <= ATOL + 10 * dump.rtol * theirs.abs()
    return StageVerdict(name, _verdict(bool(near[mask].all()), found), *numbers, found)


def _mask(dump: Dump) -> StageVerdict:
    name = "mask"
    if "loss_mask" not in dump:
        return StageVerdict(name, "not recomputed", reason="the dump has no loss_mask beside mask")
    theirs = dump["loss_mask"].double()
    found = search(mask_candidates(dump), stated_mask(), theirs.flatten(), dump.rtol)
    same = bool((dump["loss_mask"] == dump["mask"]).all())
    numbers = _apart(dump, dump["mask"].double(), theirs, torch.ones_like(dump["mask"]))
    return StageVerdict(name, _verdict(same, found), *numbers, found)


def _our_loss(dump: Dump, advantage: Tensor) -> tuple[tuple[Tensor, Tensor] | None, str]:
    try:
        return our_loss(dump, advantage), ""
    except ValueError as error:
        return None, f"as stated it can't be computed: {error}"


def _loss(dump: Dump, ours: tuple[Tensor, Tensor] | None, found: FoundLoss | None, refused: str) -> StageVerdict:
    if "loss" not in dump or found is None:
        return StageVerdict("loss", "not recomputed", reason="the dump has no loss")
    if ours is None and not found.loss.tried:
        return StageVerdict("loss", "not recomputed", theirs=float(dump["loss"]), reason=refused)
    theirs = float(dump["loss"])
    narrowed = found.loss
    said = refused
    if found.both.matches:
        narrowed = found.both
        if len(found.both.matches) < len(found.loss.matches):
            said = "the gradient decided among them"
    if ours is None:
        return StageVerdict("loss", _verdict(False, narrowed), None, theirs, "", narrowed, said)
    value = float(ours[0])
    slope = ours[1]
    stated = bool(narrowed.matches) and not narrowed.matches[0].departures
    near = abs(value - theirs) <= ATOL + dump.rtol * abs(theirs)
    if "grad_log_prob" in dump:  # then a number that is near by chance is not the same
        near = near and same_gradient(slope, dump["grad_log_prob"].nan_to_num(), dump)
    return StageVerdict("loss", _verdict(stated or near, narrowed), value, theirs, "", narrowed, said)


def _gradient(dump: Dump, ours: tuple[Tensor, Tensor] | None, found: FoundLoss | None, refused: str) -> StageVerdict:
    name = "gradient"
    if "grad_log_prob" not in dump or found is None:
        reason = "the dump has no grad_log_prob, the derivative of the loss by the log-probs"
        return StageVerdict(name, "not recomputed", reason=reason)
    theirs = dump["grad_log_prob"].nan_to_num()
    best = found.both if found.both.matches else found.gradient
    if ours is None:
        if not best.tried:
            return StageVerdict(name, "not recomputed", reason=refused)
        return StageVerdict(name, _verdict(False, best), found=best, reason=refused)
    numbers = _apart(dump, ours[1], theirs, torch.ones_like(dump["mask"]))
    reason = ""
    if "loss" in dump and found.loss.matches and found.gradient.matches and not found.both.matches:
        reason = "not the conventions of the loss: what is reported is not what is minimised"
    same = same_gradient(ours[1], theirs, dump)
    return StageVerdict(name, _verdict(same, best), *numbers, best, reason)


def _metrics(dump: Dump, advantage: Tensor | None) -> Iterator[StageVerdict]:
    for name, value in dump.settings.metrics.items():
        candidates = list(metric_candidates(dump, name, advantage))
        if not candidates:
            reason = "nothing of ours computes it, or the dump lacks an array that it needs"
            yield StageVerdict(f"metric {name}", "not recomputed", theirs=value, reason=reason)
            continue
        stated = stated_metric(dump, name, advantage, stated_loss(dump))
        # means of float32, also of numbers in float64
        found = search(candidates, stated, torch.tensor(value, dtype=torch.float64), max(dump.rtol, 1e-6))
        ours = next(float(each.value) for each in candidates if not _departs(each.convention, stated))
        same = found.matches and not found.matches[0].departures
        yield StageVerdict(f"metric {name}", _verdict(same, found), ours, value, "", found)


def _departs(convention: Any, stated: Any) -> bool:
    return any(stated.get(axis, choice) != choice for axis, choice in convention.items())


def _gradient_norm(dump: Dump) -> StageVerdict:
    theirs = float(dump["grad_norm"]) if "grad_norm" in dump else None
    reason = "the parameters' gradient needs the model; grad_log_prob is what a dump can show of it"
    return StageVerdict("gradient norm", "not recomputed", None, theirs, reason=reason)
