"""The band of a surrogate: the quantity that it measures for a token, its bounds, and its decision in words.

Each surrogate has a method `band` beside its loss, from the same quantities; the tests compare what both keep. Training
does not load this module.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        curves = zip(self.names, (self.value, self.lower, self.upper), strict=True)
        return {name: values for name, values in curves if name} | dict(self.columns)

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


def no_bounds(b: PolicyBatch) -> tuple[Tensor, Tensor]:
    """[N] each: minus and plus infinity."""
    return constant(b, -math.inf), constant(b, math.inf)


def in_loss(b: PolicyBatch, values: Tensor) -> Tensor:
    """[N] the values, NaN outside the loss."""
    return torch.where(b.loss_mask, values.detach(), torch.nan)


def constant(b: PolicyBatch, value: float) -> Tensor:
    """[N] the same value for each token."""
    return torch.full_like(b.log_prob.detach(), value)


def weighing_band(b: PolicyBatch, title: str, names: Mapping[str, Tensor], words: Words) -> Band:
    """The band of a surrogate that drops no token; the first of the `names` is what it measures."""
    lower, upper = no_bounds(b)
    (name, value), *more = names.items()
    return Band(
        title=title,
        value=in_loss(b, value),
        lower=lower,
        upper=upper,
        loss_mask=b.loss_mask,
        names=(name, "", ""),
        columns={other: in_loss(b, values) for other, values in more},
        free=words,
    )
