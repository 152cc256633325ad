"""The band of a surrogate: the quantity that it measures for a token, its bounds, and its decision in words.

Each surrogate has a method `band` beside its loss, from the same quantities; the tests compare what both keep.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxima.core.ratio import Centre
from proxima.data.policy_batch import PolicyBatch

FEWEST_DIGITS, MOST_DIGITS = 3, 9  # significant digits in a sentence; more only where two numbers would read the same
Words = Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class Band:
    """The quantity that a surrogate measures for each token and its bounds, [N] each, detached.

    Args:
        title: the title of the plot, such as `weighted divergence and its threshold`.
        value: the measured quantity; NaN outside the loss. lower, upper: the token's bounds; infinite where it has
            none, such as when its update moves it back.
        name: the column name of the value; empty: not drawn.
        columns: further columns to draw, by name, such as the bounds regardless of direction.
        chosen: [N] bool, the tokens dropped by a selection over the whole batch; None: no such rule. chosen_words
            explains the selection.
        verdict: the word for a token outside the band: `masked`, or `clipped` if it stays in the loss with a bounded
            value.
        cause: the rest of the sentence about a token outside the band, after the two numbers.
        free: why a token without bounds is kept; by default that no token is dropped, with its drawn values.
        note: a remark on what the band does not show.
    """

    title: str
    value: Tensor
    lower: Tensor
    upper: Tensor
    loss_mask: Tensor
    name: str = ""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    chosen: Tensor | None = None
    chosen_words: str = ""
    verdict: str = "masked"
    cause: Words = lambda token: ""
    free: Words | None = None
    note: str = ""

    @classmethod
    def of(
        cls,
        b: PolicyBatch,
        title: str,
        name: str,
        value: Tensor | float,
        *,
        lower: Tensor | float = -math.inf,
        upper: Tensor | float = math.inf,
        columns: Mapping[str, Tensor | float] | None = None,
        chosen: Tensor | None = None,
        chosen_words: str = "",
        verdict: str = "masked",
        cause: Words = lambda token: "",
        free: Words | None = None,
        note: str = "",
    ) -> "Band":
        """Build the band from values [N], or one number for all tokens."""
        curves = {column: each_token(b, values) for column, values in (columns or {}).items()}
        return cls(
            title=title,
            name=name,
            value=each_token(b, value),
            lower=each_token(b, lower),
            upper=each_token(b, upper),
            loss_mask=b.loss_mask,
            columns=curves,
            chosen=chosen,
            chosen_words=chosen_words,
            verdict=verdict,
            cause=cause,
            free=free,
            note=note,
        )

    @property
    def keep(self) -> Tensor:
        """[N] bool, equal to the surrogate's `keep`."""
        out = (self.value > self.upper) | (self.value < self.lower)
        return self.loss_mask & ~out & (True if self.chosen is None else ~self.chosen)

    def drawn(self) -> dict[str, Tensor]:
        """The columns of the band, by name."""
        return ({self.name: self.value} if self.name else {}) | dict(self.columns)

    def reason(self, token: int) -> str:
        """Why the surrogate kept or dropped it: `masked: 0.21 > 0.18 because …`."""
        value, lower, upper = (float(column[token]) for column in (self.value, self.lower, self.upper))
        if not bool(self.loss_mask[token]):
            return "not in the loss"
        if self.chosen is not None and bool(self.chosen[token]):
            return f"masked: {self.chosen_words}"
        if value > upper or value < lower:
            left, right = format_distinct(value, upper if value > upper else lower)
            return f"{self.verdict}: {left} {'>' if value > upper else '<'} {right}{self.cause(token)}"
        if math.isinf(lower) and math.isinf(upper):
            drawn = ", ".join(f"{name} {float(values[token]):.3g}" for name, values in self.drawn().items())
            return f"kept: {self.free(token) if self.free else f'no token is dropped; {drawn}'}"
        if math.isfinite(lower):
            left = f"{format_distinct(lower, value)[0]} <= "
        else:
            left = ""
        if math.isfinite(upper):
            right = f" <= {format_distinct(upper, value)[0]}"
        else:
            right = ""
        return f"kept: {left}{format_distinct(value, upper if math.isfinite(upper) else lower)[0]}{right}"


def format_distinct(value: float, other: float) -> tuple[str, str]:
    """Format two numbers with as few digits as tell them apart."""
    for digits in range(FEWEST_DIGITS, MOST_DIGITS):
        texts = f"{value:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1] or value == other:
            return texts
    return repr(value), repr(other)


def each_token(b: PolicyBatch, values: Tensor | float) -> Tensor:
    """[N], detached: the number at every token, or the tensor with NaN outside the loss."""
    if isinstance(values, Tensor):
        return torch.where(b.loss_mask, values.detach(), torch.nan)
    return torch.full_like(b.log_prob.detach(), values)


def returning(b: PolicyBatch, centre: Centre, token: int) -> str:
    """Say why a token for which `returns_to` is True is kept, whatever its divergence."""
    name = "μ" if centre == "behavior" else "π_prox"
    if float(b.masked("advantage")[token]) == 0:
        return "the advantage is 0, so it has no gradient"
    moved = float(b.masked("log_prob")[token]) - float(b.masked(f"{centre}_log_prob")[token])
    if moved:
        return f"the update moves it back towards {name}"
    return f"π is {name} here"
