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

FEWEST_DIGITS = 3  # significant digits in a sentence; more only where two numbers would read the same
MOST_DIGITS = 9
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
        keep = self.loss_mask & ~out
        if self.chosen is not None:
            keep = keep & ~self.chosen
        return keep

    def drawn(self) -> dict[str, Tensor]:
        """The columns of the band, by name."""
        drawn: dict[str, Tensor] = {}
        if self.name:
            drawn[self.name] = self.value
        return drawn | dict(self.columns)

    def reason(self, token: int) -> str:
        """Why the surrogate kept or dropped it: `masked: 0.21 > 0.18 because …`."""
        if not bool(self.loss_mask[token]):
            return "not in the loss"
        if self.chosen is not None and bool(self.chosen[token]):
            return f"masked: {self.chosen_words}"
        value = float(self.value[token])
        lower = float(self.lower[token])
        upper = float(self.upper[token])
        if value > upper or value < lower:
            return f"{self.verdict}: {outside(value, lower, upper)}{self.cause(token)}"
        if math.isinf(lower) and math.isinf(upper):
            return f"kept: {self._unbounded(token)}"
        return f"kept: {_within(value, lower, upper)}"

    def _unbounded(self, token: int) -> str:
        """Why a token that nothing bounds is kept."""
        if self.free is not None:
            return self.free(token)
        drawn = ", ".join(f"{name} {float(values[token]):.3g}" for name, values in self.drawn().items())
        return f"no token is dropped; {drawn}"


def outside(value: float, lower: float, upper: float) -> str:
    """The bound that a value outside its bounds violates: `0.21 > 0.18`."""
    if value > upper:
        left, right = format_distinct(value, upper)
        return f"{left} > {right}"
    left, right = format_distinct(value, lower)
    return f"{left} < {right}"


def _within(value: float, lower: float, upper: float) -> str:
    """A value between its bounds, of which one may be infinite: `0.8 <= 0.95 <= 1.2`."""
    near = upper if math.isfinite(upper) else lower
    words, _ = format_distinct(value, near)
    if math.isfinite(lower):
        bound, _ = format_distinct(lower, value)
        words = f"{bound} <= {words}"
    if math.isfinite(upper):
        bound, _ = format_distinct(upper, value)
        words = f"{words} <= {bound}"
    return words


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
