"""Loss and gradient weight of one token under a surrogate, over the token's ratio or probability.

Both come from the surrogate itself by autograd. Surrogates that depend on more than the token are drawn in a fixed
setting, which `remark_on` states:

    cppo
    the token is inside a completion whose other tokens have all moved by `DRIFT`
    kl_cov, clip_cov, m2po   the whole batch's decision is fixed: selected, not selected, one of four tokens
    of unit "sequence"       the token is a sequence by itself
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from proxima.core.loss import Surrogate, TokenLoss, check_needs
from proxima.core.surrogate.clip import Gspo
from proxima.core.surrogate.cppo import Cppo
from proxima.core.surrogate.whole_batch import ClipCov, KlCov
from proxima.core.token_reasons import alone
from proxima.data.policy_batch import PolicyBatch

LARGEST_RATIO = 2.5
POINTS = 401
POSITION, LENGTH, DRIFT = 11, 21, 0.045  # of `cppo`: the token in its completion; |π − μ| of its other tokens
Over = Literal["ratio", "probability"]


@dataclass(frozen=True)
class SurrogateCurve:
    """`loss` and `weight` at each `x`: [POINTS] float64 each."""

    x: Tensor
    loss: Tensor
    weight: Tensor


def curve(spec: Surrogate, over: Over, mu: float, sign: int) -> SurrogateCurve:
    """Compute loss and gradient weight of one token.

    Args:
        spec: the surrogate.
        over: the x axis: the ratio π / μ (up to 2.5, or 1 / μ if that is less) or π itself.
        mu: the token's behavior probability, which is also its proximal one.
        sign: the advantage, 1 or -1.
    Raises: ValueError if the surrogate needs data that a single token lacks (top-k log-probs).
    """
    largest = min(LARGEST_RATIO * mu, 0.999) if over == "ratio" else 0.999
    probability = torch.linspace(0.002, largest, POINTS, dtype=torch.float64)
    probability[(probability - mu).abs().argmin()] = mu  # at r = 1 even the narrowest clip range has a point
    log_prob, behavior = probability.log(), torch.full_like(probability, mu).log()
    advantage = torch.full_like(probability, float(sign))
    x = probability / mu if over == "ratio" else probability
    b = alone(log_prob.clone().requires_grad_(), behavior, advantage)
    check_needs(spec, b)
    if isinstance(spec, Cppo):
        return SurrogateCurve(x, *_within_completion(spec, log_prob, behavior, advantage))
    if spec.whole_batch:
        b = replace(b, selected=_selected(spec, log_prob, behavior, advantage))
    return SurrogateCurve(x, *_differentiated(b, spec(b)))


def remark_on(spec: Surrogate) -> str:
    """Describe the setting in which the surrogate is drawn if it depends on more than the token; otherwise empty."""
    if isinstance(spec, Cppo):
        return f"token {POSITION} of {LENGTH}, all the others have moved by |π − μ| = {DRIFT:g}"
    if isinstance(spec, ClipCov):
        return "a token that is not selected; a selected one has loss and weight 0"
    if isinstance(spec, KlCov):
        return "a selected token; the others have no pull"
    if spec.whole_batch:
        return "one of four tokens, the other three have not moved"
    return "a sequence of this one token" if isinstance(spec, Gspo) or _unit(spec) == "sequence" else ""


def _unit(spec: Surrogate) -> str:
    half = torch.full((1,), 0.5, dtype=torch.float64).log()
    return spec(alone(half, half, torch.ones(1, dtype=torch.float64))).unit


def _within_completion(spec: Cppo, log_prob: Tensor, behavior: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the curve with each point as the token at `POSITION` of a separate completion."""
    shape, at = (len(log_prob), LENGTH), POSITION - 1
    current = torch.full(shape, 0.5 + DRIFT, dtype=log_prob.dtype).log()
    other = torch.full(shape, 0.5, dtype=log_prob.dtype).log()
    current[:, at], other[:, at] = log_prob, behavior
    b = PolicyBatch.from_padded(torch.ones(shape), log_prob=current, behavior_log_prob=other, advantage=advantage)
    b.log_prob.requires_grad_()
    loss, weight = _differentiated(b, spec(b))
    return loss.view(shape)[:, at], weight.view(shape)[:, at]


def _selected(spec: Any, log_prob: Tensor, behavior: Tensor, advantage: Tensor) -> Tensor:
    """Return the whole batch's decision, as described by `remark_on`."""
    if isinstance(spec, ClipCov | KlCov):
        return torch.full(log_prob.shape, isinstance(spec, KlCov))
    still = behavior[:, None].expand(-1, 3)
    rows = [torch.cat([first[:, None], more], dim=1) for first, more in ((log_prob, still), (behavior, still))]
    pairs = zip(*rows, advantage, strict=True)
    return torch.stack([spec.select_tokens(alone(p, q, a.expand(4)))[0] for p, q, a in pairs])


def _differentiated(b: PolicyBatch, token: TokenLoss) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(token.loss.sum(), b.log_prob)
    assert b.advantage is not None
    return token.loss.detach(), -gradient / b.advantage
