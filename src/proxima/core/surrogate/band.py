"""The band of each surrogate: the quantity that it measures for a token, its bounds, and its decision in words.

A band restates the rule of the surrogate for a reader, token by token; the tests compare it with the surrogate itself,
on every kind and all of its `test_fields`. Training does not load this module. A surrogate out of tree may have a
method `band(b) -> Band`; one in tree has its function in `BANDS`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.divergence import divergence
from proxima.core.loss import Surrogate
from proxima.core.padded_blocks import PaddedBlock, map_padded, prefix_sums
from proxima.core.ratio import LOG_RATIO_LIMIT, either, masked_log_ratio, masked_ratio, sequence_advantage, spread
from proxima.core.segment import segment_sum
from proxima.core.surrogate import SURROGATES
from proxima.core.surrogate.cppo import Cppo, _SampledTokens
from proxima.core.surrogate.dppo import returns_to
from proxima.data import PolicyBatch

FEWEST_DIGITS, MOST_DIGITS = 3, 9  # significant digits in a sentence; more only where two numbers would read the same
Words = Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class Band:
    """The quantity that a surrogate measures for each token and its bounds, [N] each, detached.

    Args:
        title: the title of the plot, such as `weighted divergence and its threshold`.
        value: the measured quantity; NaN where there is none. lower, upper: the bounds for the token; infinite where it
            is not bounded, as when its update moves it back.
        names: the column names of value, lower and upper; empty: not drawn.
        columns: further columns to draw, by name: the bounds regardless of direction, the prefix.
        chosen: the tokens that the whole batch selected; None: no such rule. chosen_words says what that means.
        verdict: the word for a token out of the band: `masked`, or `clipped` where it stays in the loss with a bounded
            value.
        cause: for a token out of the band, what the comparison leaves out. free: why a token is not bounded.
        note: a remark on what the band does not show.
    """

    title: str
    value: Tensor
    lower: Tensor
    upper: Tensor
    loss_mask: Tensor
    names: tuple[str, str, str] = ("", "", "")
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    chosen: Tensor | None = None
    chosen_words: str = ""
    verdict: str = "masked"
    cause: Words = lambda token: ""
    free: Words = lambda token: "nothing bounds it"
    note: str = ""

    @property
    def keep(self) -> Tensor:
        """[N] bool, equal to the surrogate's `keep`."""
        out = (self.value > self.upper) | (self.value < self.lower)
        return self.loss_mask & ~out & (True if self.chosen is None else ~self.chosen)

    def drawn(self) -> dict[str, Tensor]:
        """The columns of the band, by name."""
        own = zip(self.names, (self.value, self.lower, self.upper), strict=True)
        return {name: values for name, values in own if name} | dict(self.columns)

    def reason(self, token: int) -> str:
        """Why the surrogate kept or dropped it: `masked: 0.21 > 0.18 because …`."""
        value, lower, upper = (float(column[token]) for column in (self.value, self.lower, self.upper))
        if not bool(self.loss_mask[token]):
            return "not in the loss"
        if self.chosen is not None and bool(self.chosen[token]):
            return f"masked: {self.chosen_words}"
        if value > upper or value < lower:
            left, right = told(value, upper if value > upper else lower)
            return f"{self.verdict}: {left} {'>' if value > upper else '<'} {right}{self.cause(token)}"
        if math.isinf(lower) and math.isinf(upper):
            return f"kept: {self.free(token)}"
        left = f"{told(lower, value)[0]} <= " if math.isfinite(lower) else ""
        right = f" <= {told(upper, value)[0]}" if math.isfinite(upper) else ""
        return f"kept: {left}{told(value, upper if math.isfinite(upper) else lower)[0]}{right}"


def told(value: float, other: float) -> tuple[str, str]:
    """Format two numbers with as few digits as tell them apart."""
    for digits in range(FEWEST_DIGITS, MOST_DIGITS):
        texts = f"{value:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1] or value == other:
            return texts
    return repr(value), repr(other)


def band_of(surrogate: Surrogate, b: PolicyBatch) -> Band | None:
    """The band of each token of a batch; None for a surrogate that does not define one.

    Args:
        b: the batch as the surrogate reads it, with the `selected` of the whole batch; without it, the batch is taken
            for the whole one.
    """
    if own := getattr(surrogate, "band", None):
        band: Band = own(b)
        return band
    kinds = (SURROGATES.name_of(cls) for cls in type(surrogate).__mro__)
    make = next((BANDS[kind] for kind in kinds if kind in BANDS), None)
    return None if make is None else make(surrogate, replace(b, log_prob=b.log_prob.detach()))


def reads_proximal(surrogate: Surrogate) -> bool:
    """Return True if the band needs the proximal policy."""
    kind = SURROGATES.name_of(type(surrogate))
    return kind != "reinforce" and not (
        kind in ("cppo", "dppo", "m2po", "tv_band") and "proximal" not in vars(surrogate).values()
    )


def _unbounded(b: PolicyBatch) -> tuple[Tensor, Tensor]:
    inf = torch.full_like(b.log_prob.detach(), torch.inf)
    return -inf, inf


def _shown(b: PolicyBatch, values: Tensor) -> Tensor:
    """[N] the values, NaN outside the loss."""
    return torch.where(b.loss_mask, values.detach(), torch.nan)


def _constant(b: PolicyBatch, value: float) -> Tensor:
    return torch.full_like(b.log_prob.detach(), value)


def _direction(advantage: Tensor) -> Words:
    def words(token: int) -> str:
        raised = float(advantage[token]) > 0
        return f" and A {'> 0: the update would raise it' if raised else '< 0: the update would lower it'} further"

    return words


# ---- the clip --------------------------------------------------------------------------------------------------------


def _clip_band(spec: Any, b: PolicyBatch, ratio: Tensor, advantage: Tensor, title: str) -> Band:
    """The range of the ratio on the side to which the advantage pushes it."""
    low, high, dual = 1 - spec.epsilon_low, 1 + spec.epsilon_high, getattr(spec, "dual_clip", None)
    unbounded = _constant(b, math.inf)
    far = unbounded if dual is None else _constant(b, dual)
    upper = torch.where(advantage > 0, _constant(b, high), torch.where(advantage < 0, far, unbounded))
    lower = torch.where(advantage < 0, _constant(b, low), -unbounded)

    def cause(token: int) -> str:
        if float(advantage[token]) < 0 and float(ratio[token]) > high:
            return " and A < 0: beyond the dual clip the loss is constant"
        return _direction(advantage)(token)

    def free(token: int) -> str:
        return "the advantage is 0, so it has no gradient" if float(advantage[token]) == 0 else "nothing bounds it"

    bounds = {"lower": _constant(b, low), "upper": _constant(b, high)}
    return Band(
        title=title,
        value=_shown(b, ratio),
        lower=lower,
        upper=upper,
        loss_mask=b.loss_mask,
        names=("ratio", "", ""),
        columns=bounds if dual is None else bounds | {"dual": _constant(b, dual)},
        cause=cause,
        free=free,
    )


def _ppo_clip(spec: Any, b: PolicyBatch) -> Band:
    return _clip_band(spec, b, masked_ratio(b).detach(), b.masked("advantage"), "ratio π/π_prox and its clip range")


def _gspo(spec: Any, b: PolicyBatch) -> Band:
    ratio = masked_ratio(b, "sequence").detach()
    advantage = b.masked("advantage") if spec.form == "token" else sequence_advantage(b)
    if spec.form == "token":
        log_ratio = masked_log_ratio(b).detach()
        ratio = ratio * (log_ratio - log_ratio).exp()
    return _clip_band(spec, b, ratio, advantage, "geometric mean of the sequence's ratios and its clip range")


def _reinforce(spec: Any, b: PolicyBatch) -> Band:
    lower, upper = _unbounded(b)
    value = torch.full_like(lower, torch.nan)
    return Band(
        title="no band",
        value=value,
        lower=lower,
        upper=upper,
        loss_mask=b.loss_mask,
        free=lambda token: "this surrogate has no bound",
    )


# ---- by divergence ---------------------------------------------------------------------------------------------------


def _moved(b: PolicyBatch, centre: str) -> Words:
    """Explain why a token is kept whatever its divergence is."""
    name = "μ" if centre == "behavior" else "π_prox"

    def words(token: int) -> str:
        if float(b.masked("advantage")[token]) == 0:
            return "the advantage is 0, so it has no gradient"
        moved = float(b.masked("log_prob")[token]) - float(b.masked(f"{centre}_log_prob")[token])
        return f"the update moves it back towards {name}" if moved else f"π is {name} here"

    return words


def _dppo(spec: Any, b: PolicyBatch) -> Band:
    far = divergence(b, spec.divergence, spec.centre)
    advantage = b.masked("advantage")
    threshold = either(advantage < 0, spec.delta if spec.delta_low is None else spec.delta_low, spec.delta, far)
    lower, unbounded = _unbounded(b)
    return Band(
        title=f"divergence ({spec.divergence}) and its threshold",
        value=_shown(b, far),
        lower=lower,
        upper=torch.where(returns_to(b, spec.centre), unbounded, threshold),
        loss_mask=b.loss_mask,
        names=("divergence_measured", "", ""),
        columns={"threshold": threshold},
        cause=lambda token: ", the threshold of a token",
        free=_moved(b, spec.centre),
    )


def _tv_band(spec: Any, b: PolicyBatch) -> Band:
    far, advantage, back = divergence(b, "binary_tv"), b.masked("advantage"), returns_to(b, "behavior")
    lower, _ = _unbounded(b)

    def cause(token: int) -> str:
        if float(advantage[token]) == 0:
            return ", on either side of μ; the advantage is 0"
        return ", on either side of μ" + (": also a token that would move back" if back[token] else "")

    return Band(
        title="distance |π − μ| and the half width of the band",
        value=_shown(b, far),
        lower=lower,
        upper=_constant(b, spec.epsilon),
        loss_mask=b.loss_mask,
        names=("distance_from_behavior", "", "upper"),
        cause=cause,
    )


def _cppo(spec: Cppo, b: PolicyBatch) -> Band:
    weighted, threshold = spec.threshold(b)
    spent, granted = _prefix(spec, b)
    lower, unbounded = _unbounded(b)

    def cause(token: int) -> str:
        if float(threshold[token]) >= spec.delta:
            return ", the threshold of a token"
        left, right = told(float(spent[token]), float(granted[token]))
        return f" because the prefix had spent {left}, and was granted {right}"

    assert b.sampled is not None
    return Band(
        title="weighted divergence Z, its threshold c, and the budget of the prefix",
        value=torch.where(b.sampled, weighted, torch.nan),
        lower=lower,
        upper=torch.where(returns_to(b, spec.centre), unbounded, threshold),
        loss_mask=b.loss_mask,
        names=("weighted_divergence", "", ""),
        columns={"threshold": threshold, "prefix_spent": spent, "prefix_budget": granted},
        cause=cause,
        free=_moved(b, spec.centre),
    )


def _prefix(spec: Cppo, b: PolicyBatch) -> tuple[Tensor, Tensor]:
    """S_{t-1} and budget W_{t-1}, [N] each: the divergence that the prefix of a token has spent, and was granted; 0
    where not sampled."""
    sampled = _SampledTokens.of(b)
    far = sampled.of_batch(divergence(b, spec.divergence, spec.centre))

    def spent(block: PaddedBlock, rows: Tensor) -> Tensor:
        weighted, _ = spec._threshold(block, rows)
        return prefix_sums(weighted) - weighted

    def granted(block: PaddedBlock, rows: Tensor) -> Tensor:
        weight, _ = spec._threshold(block, torch.ones_like(rows))  # of a divergence of 1
        inside = rows if block.inside is None else torch.where(block.inside, rows, 0.0)
        prior = prefix_sums(weight) - weight
        return torch.where(prior > 0, spec._budget(block, inside)[:, None] * prior, 0.0)  # no inf · 0

    both = [map_padded(part, *sampled.rows, far, dtype=far.dtype) for part in (spent, granted)]
    return sampled.spread(both[0], 0.0), sampled.spread(both[1], 0.0)


# ---- by weight -------------------------------------------------------------------------------------------------------


def _cispo(spec: Any, b: PolicyBatch) -> Band:
    low, high = _constant(b, 1 - spec.epsilon_low), _constant(b, 1 + spec.epsilon_high)
    return Band(
        title="ratio π/π_prox and the range of its weight",
        value=_shown(b, masked_ratio(b, spec.level)),
        lower=low,
        upper=high,
        loss_mask=b.loss_mask,
        names=("ratio", "lower", "upper"),
        verdict="clipped",
        cause=lambda token: ", which is its weight: it still has a gradient",
    )


def _weighted(b: PolicyBatch, title: str, names: Mapping[str, Tensor], words: Words) -> Band:
    """The band of a surrogate that drops no token."""
    lower, upper = _unbounded(b)
    (name, value), *more = names.items()
    return Band(
        title=title,
        value=_shown(b, value),
        lower=lower,
        upper=upper,
        loss_mask=b.loss_mask,
        names=(name, "", ""),
        columns={other: _shown(b, values) for other, values in more},
        free=words,
    )


def _sapo(spec: Any, b: PolicyBatch) -> Band:
    ratio = masked_ratio(b, spec.level)
    advantage = b.masked("advantage") if spec.level == "token" else sequence_advantage(b)
    tau = either(advantage > 0, spec.tau_positive, spec.tau_negative, advantage)
    gate = ratio / (tau * (ratio - 1) / 2).cosh().square()
    return _weighted(
        b,
        "ratio π/π_prox and the weight of its gradient",
        {"ratio": ratio, "gate": gate},
        lambda t: f"no token is dropped; at the ratio {float(ratio[t]):.3g} the gate weighs it {float(gate[t]):.3g}",
    )


def _vespo(spec: Any, b: PolicyBatch) -> Band:
    log_weight, phi = spec.weights(b)
    ratio = log_weight.exp()
    return _weighted(
        b,
        "importance weight of the sequence and what it becomes",
        {"sequence_ratio": ratio, "phi": phi},
        lambda t: f"no token is dropped; the sequence's ratio {float(ratio[t]):.3g} weighs it {float(phi[t]):.3g}",
    )


def _geo_mean(spec: Any, b: PolicyBatch) -> Band:
    sign = b.masked("advantage").sign()
    low = spec.epsilon_high if spec.clip == "directed" else spec.epsilon_low
    directed = sign * masked_log_ratio(b).detach()
    lower, _ = _unbounded(b)
    return Band(
        title="log-ratio in the direction of the advantage and its bound",
        value=_shown(b, directed),
        lower=lower,
        upper=either(sign > 0, spec.epsilon_high, low, directed),
        loss_mask=b.loss_mask,
        names=("directed_log_ratio", "", "upper"),
        verdict="clipped",
        cause=lambda token: " nats: it adds the bound to the sequence's mean, and has no gradient",
    )


def _topr(spec: Any, b: PolicyBatch) -> Band:
    log_weight = segment_sum(masked_log_ratio(b).detach(), b.cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, advantage = spread(b, log_weight.exp()), b.masked("advantage")
    lower, unbounded = _unbounded(b)
    cap = either(advantage < 0, spec.upper, math.inf, ratio)
    return Band(
        title="ratio of the sequence and the cap of its weight",
        value=_shown(b, ratio),
        lower=lower,
        upper=torch.where(advantage < 0, cap, unbounded),
        loss_mask=b.loss_mask,
        names=("sequence_ratio", "", ""),
        columns={"upper": _constant(b, spec.upper)},
        verdict="clipped",
        cause=lambda token: ", which is its weight: it still has a gradient",
        free=lambda token: "A >= 0: a good sequence has weight 1, whatever its ratio is",
    )


# ---- pulls -----------------------------------------------------------------------------------------------------------


def _pulled(b: PolicyBatch, name: str, far: Tensor, epsilon: float) -> Band:
    """The band of a pull that cancels the gradient of a token moving away at distance `epsilon`, and reverses it
    beyond."""
    left = 1 - torch.sign(b.masked("advantage") * (masked_ratio(b) - 1)) * far / epsilon
    return _weighted(
        b,
        f"{name} and the distance at which the pull takes the gradient",
        {name: far, "pull_distance": _constant(b, epsilon), "gradient_left": left},
        lambda t: (
            f"no token is dropped; at {float(far[t]):.3g} of {epsilon:.3g} the pull leaves {float(left[t]):.3g} of A r"
        ),
    )


def _drpo(spec: Any, b: PolicyBatch) -> Band:
    far = b.masked("behavior_log_prob").exp() * (masked_ratio(b) - 1).abs()
    return _pulled(b, "distance_from_behavior", far, spec.epsilon)


def _spo(spec: Any, b: PolicyBatch) -> Band:
    return _pulled(b, "distance_of_ratio", (masked_ratio(b) - 1).abs(), spec.epsilon)


def _dro(spec: Any, b: PolicyBatch) -> Band:
    log_ratio = masked_log_ratio(b)
    pull = spec.beta * log_ratio
    return _weighted(
        b,
        "log-ratio and the pull on it",
        {"log_ratio_to_proximal": log_ratio, "pull": pull},
        lambda t: f"no token is dropped; the log-ratio {float(log_ratio[t]):.3g} pulls it back by {float(pull[t]):.3g}",
    )


# ---- over the whole batch --------------------------------------------------------------------------------------------


def _selected(spec: Any, b: PolicyBatch) -> Tensor:
    chosen = spec.select_tokens(b) if b.selected is None else b.selected
    return b.loss_mask & chosen


def _clip_cov(spec: Any, b: PolicyBatch) -> Band:
    clip = _ppo_clip(spec, b)
    span = f"{spec.low:g} and {spec.high:g}"
    words = f"selected over the whole batch, of those with a covariance of A and log π between {span}"
    return replace(clip, chosen=_selected(spec, b) & clip.keep, chosen_words=words)


def _kl_cov(spec: Any, b: PolicyBatch) -> Band:
    log_ratio, pulled = masked_log_ratio(b), _selected(spec, b)

    def words(token: int) -> str:
        if bool(pulled[token]):
            size = "is among the highest of the batch, so that it is pulled towards π_prox"
            return f"no token is dropped; its covariance of A and log π {size} by {spec.coefficient:g}"
        return "no token is dropped; its covariance of A and log π is not among the highest of the batch"

    return _weighted(
        b, "log-ratio, whose size is the pull on selected tokens", {"log_ratio_to_proximal": log_ratio}, words
    )


def _m2po(spec: Any, b: PolicyBatch) -> Band:
    measured = b.masked("log_prob" if spec.policy == "current" else "proximal_log_prob").detach()
    squares = (measured - b.masked("behavior_log_prob")).square()
    band = _weighted(
        b,
        "squared log-ratio to μ, whose mean over the batch is bounded",
        {"squared_log_ratio": squares},
        lambda t: f"its squared log-ratio {float(squares[t]):.3g} is not among the largest of the batch",
    )
    bound = f"{spec.threshold:g}"
    words = f"the largest squared log-ratios of the batch are dropped until the mean of the rest is below {bound}"
    return replace(band, chosen=_selected(spec, b), chosen_words=words)


BANDS: dict[str, Callable[[Any, PolicyBatch], Band]] = {
    "cispo": _cispo,
    "clip_cov": _clip_cov,
    "cppo": _cppo,
    "dppo": _dppo,
    "dro": _dro,
    "drpo": _drpo,
    "geo_mean": _geo_mean,
    "gspo": _gspo,
    "kl_cov": _kl_cov,
    "luspo": _gspo,
    "m2po": _m2po,
    "ppo_clip": _ppo_clip,
    "reinforce": _reinforce,
    "sapo": _sapo,
    "spo": _spo,
    "topr": _topr,
    "tv_band": _tv_band,
    "vespo": _vespo,
}
