"""Surrogates side by side in one figure: loss and gradient weight over the ratio and the probability, for both signs of
the advantage. Written as an SVG, with colours for light and dark, or as a PNG.

Surrogates that depend on more than the token are drawn in a fixed setting, which `remark_on` states:

    cppo                     the token is inside a completion whose other tokens have all moved by `DRIFT`
    kl_cov, clip_cov, m2po   the whole batch's decision is fixed: selected, not selected, one of four tokens
    of unit "sequence"       the token is a sequence by itself
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from proxima.config.resolution import spec_from_words
from proxima.core.loss import Surrogate, TokenLoss, check_needs
from proxima.core.surrogate.clip import Gspo
from proxima.core.surrogate.cppo import Cppo
from proxima.core.surrogate.whole_batch import ClipCov, KlCov
from proxima.core.token_reasons import alone
from proxima.data import UserError, require
from proxima.data.policy_batch import PolicyBatch
from proxima.view.chart import Axes, Color, Drawing, Figure, panel_axes, round_ticks

Quantity = Literal["loss", "weight"]
Over = Literal["ratio", "probability"]


Piece = list[tuple[float, float]]
MOST = 8  # curves that a reader can tell apart
# The first line is wide, so that it shows on both sides of a coinciding curve.
WIDTHS = (3.4, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2)
#: of each line: solid, or its dashes and gaps in pixels
STYLES: tuple[Any, ...] = (
    "-",
    "-",
    (0, (7, 4)),
    (0, (2, 3)),
    (0, (9, 3, 2, 3)),
    (0, (4, 2)),
    (0, (1, 2)),
    (0, (12, 3)),
)
WINDOW: dict[Quantity, tuple[float, float]] = {"loss": (-4.0, 4.0), "weight": (-1.5, 3.5)}  # with an advantage of 1
# Neighbouring points that differ by more than this share of the panel's height, and by more than four times as much as
# the points next to them, are a jump, at which the line is interrupted.
JUMP = 0.06
WIDTH = 290  # of a panel, including margins
HEIGHT = 200
LEFT = 40
RIGHT = 12
TOP = 26
BOTTOM = 38
LINE = 18


@dataclass(frozen=True)
class SurrogatePanel:
    """A panel: title, name of the x axis, visible ranges, the x at which r = 1, and the pieces of each curve."""

    title: str
    x_name: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    mark: float
    lines: tuple[list[Piece], ...]


@dataclass(frozen=True)
class SurrogateFigure(Drawing):
    """Rows of panels, the names of the surrogates, and remarks below the figure."""

    names: tuple[str, ...]
    rows: tuple[tuple[SurrogatePanel, ...], ...]
    remarks: tuple[str, ...]
    salt = "surrogates"
    simplify: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return ", ".join(self.names)

    @property
    def columns(self) -> int:
        """The number of columns of the legend."""
        return max(1, WIDTH * max(map(len, self.rows)) // (70 + 8 * max(map(len, self.names))))

    @property
    def head(self) -> int:
        """The height of the legend, including margins."""
        return 12 + 20 * math.ceil(len(self.names) / self.columns)

    @property
    def size(self) -> tuple[float, float]:
        height = self.head + HEIGHT * len(self.rows) + LINE * len(self.remarks) + 8
        return WIDTH * max(map(len, self.rows)), height

    def draw(self, figure: Figure, color: Color) -> None:
        width, height = self.size
        for i, row in enumerate(self.rows):
            top = self.head + i * HEIGHT
            for j, panel in enumerate(row):
                margins = (j * WIDTH + LEFT, width - (j + 1) * WIDTH + RIGHT, top + TOP, height - top - HEIGHT + BOTTOM)
                _draw_panel(panel_axes(figure, margins), panel, color)
        lines = [_plot(figure.axes[0], [], [], i, color) for i in range(len(self.names))]
        figure.legend(
            lines, self.names, loc="upper left", ncols=self.columns, frameon=False, handlelength=2.5, borderaxespad=0.3
        )
        for i, text in enumerate(self.remarks):
            figure.text(14 / width, (LINE * (len(self.remarks) - i) - 4) / height, text, color=color("muted"))


def draw(
    surrogates: Mapping[str, Surrogate],
    mus: Sequence[float] = (0.3,),
    *,
    quantities: Sequence[Quantity] = ("loss", "weight"),
    over: Sequence[Over] = ("ratio", "probability"),
) -> SurrogateFigure:
    """Build the panels of a figure: a row for the ratio, and one for each behavior probability; A = ±1.

    Args:
        surrogates: name for the legend → spec.
        mus: behavior probabilities, in (0, 1); the first is that of the curves over the ratio.
        quantities: columns, each for A > 0 and A < 0.
        over: rows.
    Raises: UserError for no surrogate, more than eight, one that can't be drawn, or a probability out of range.
    """
    if not 1 <= len(surrogates) <= MOST:
        raise UserError(f"{len(surrogates)} surrogates given; draw 1 to {MOST} in one figure")
    for mu in mus:
        require(0 < mu < 1, "behavior_probability", mu, "must be in (0, 1)")
    rows: list[tuple[Over, float]] = []
    if "ratio" in over:
        rows.append(("ratio", mus[0]))
    if "probability" in over:
        rows += [("probability", mu) for mu in mus]
    made = tuple(tuple(_row(surrogates, quantities, x, mu)) for x, mu in rows)
    remarks: dict[str, list[str]] = {}
    for name, spec in surrogates.items():
        remarks.setdefault(remark_on(spec), []).append(name)
    listed = ", ".join(f"{mu:g}" for mu in mus)
    about = f"One token, μ = {listed}, A = ±1; the proximal policy is μ. Gradient weight: −(∂loss/∂log π) / A."
    settings = [f"{', '.join(names)}: {text}." for text, names in remarks.items() if text]
    return SurrogateFigure(tuple(surrogates), made, (about, *settings))


def _row(
    surrogates: Mapping[str, Surrogate], quantities: Sequence[Quantity], over: Over, mu: float
) -> Iterator[SurrogatePanel]:
    curves: dict[int, list[SurrogateCurve]] = {1: [], -1: []}
    for sign, (name, spec) in itertools.product(curves, surrogates.items()):
        try:
            curves[sign].append(curve(spec, over, mu, sign))
        except ValueError as error:
            raise UserError(f"{name} can't be drawn: {error}") from None
    for quantity, sign in itertools.product(quantities, curves):
        x = curves[sign][0].x
        ys = [getattr(c, quantity) for c in curves[sign]]
        y_range = _y_range(ys, WINDOW[quantity])
        label = "loss" if quantity == "loss" else "gradient weight"
        side = "A > 0" if sign > 0 else "A < 0"
        if over == "ratio":
            x_name = "ratio π / μ"
            largest = float(x[-1])
            mark = 1.0
        else:
            x_name = f"probability π, μ = {mu:g}"
            largest = 1.0
            mark = mu
        yield SurrogatePanel(
            title=f"{label}, {side}",
            x_name=x_name,
            x_range=(0.0, largest),
            y_range=y_range,
            mark=mark,
            lines=tuple(_pieces(x, y, y_range) for y in ys),
        )


def _y_range(ys: Sequence[Tensor], window: tuple[float, ...]) -> tuple[float, float]:
    least, most = window
    low = max(min(0.0, *(float(y.min()) for y in ys)), least)
    high = min(max(0.0, *(float(y.max()) for y in ys)), most)
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _pieces(x: Tensor, y: Tensor, y_range: tuple[float, float]) -> list[Piece]:
    """Split a curve at its jumps."""
    height = y_range[1] - y_range[0]
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    pieces = [points[:1]]
    steps = y.diff().abs().tolist()
    for i, step in enumerate(steps):
        beside = max(steps[max(i - 1, 0) : i] + steps[i + 1 : i + 2])
        visible = any(y_range[0] <= value <= y_range[1] for _, value in points[i : i + 2])
        if visible and step > max(JUMP * height, 4 * beside):
            pieces.append([])
        pieces[-1].append(points[i + 1])
    return pieces


def _draw_panel(axes: Axes, panel: SurrogatePanel, color: Color) -> None:
    axes.axhline(0, color=color("muted"), linewidth=1)
    axes.axvline(panel.mark, color=color("muted"), linewidth=1, linestyle=(0, (2, 4)))
    for i, pieces in enumerate(panel.lines):
        points: Piece = []
        for piece in pieces:
            points += [*piece, (math.nan, math.nan)]
        _plot(axes, [x for x, _ in points], [y for _, y in points], i, color)
        jumps = [piece[-1] for piece in pieces[:-1]] + [piece[0] for piece in pieces[1:]]  # both ends of each
        if jumps:
            xs, ys = zip(*jumps, strict=True)
            axes.plot(xs, ys, color=color(f"k{i}"), marker="o", markersize=5, markeredgewidth=0, linestyle="")
    axes.set(xlim=panel.x_range, ylim=panel.y_range, xlabel=panel.x_name)
    axes.set_title(panel.title, y=1.0)  # without it, all texts are laid out to see whether the title must make room
    round_ticks(axes.xaxis, 5)
    round_ticks(axes.yaxis, 6)


def _plot(axes: Axes, xs: Sequence[float], ys: Sequence[float], number: int, color: Color) -> Any:
    """Draw a line in the style of the surrogate of this number."""
    (line,) = axes.plot(xs, ys, color=color(f"k{number}"), linewidth=WIDTHS[number], linestyle=STYLES[number])
    return line


LARGEST_RATIO = 2.5
POINTS = 401
POSITION = 11  # of the token of `cppo`, in a completion of this length
LENGTH = 21
DRIFT = 0.045  # |π − μ| of its other tokens


@dataclass(frozen=True)
class SurrogateCurve:
    """`loss` and `weight` of one token at each `x`: [POINTS] float64 each."""

    x: Tensor
    loss: Tensor
    weight: Tensor


def curve(spec: Surrogate, over: Over, mu: float, sign: int) -> SurrogateCurve:
    """Compute loss and gradient weight of one token, from the surrogate itself by autograd; `remark_on` states the
    setting of a surrogate that depends on more than the token.

    Args:
        spec: the surrogate.
        over: the x axis: the ratio π / μ (up to 2.5, or 1 / μ if that is less) or π itself.
        mu: the token's behavior probability, which is also its proximal one.
        sign: the advantage, 1 or -1.
    Raises: ValueError if the surrogate needs data that a single token lacks (top-k log-probs).
    """
    largest = 0.999
    if over == "ratio":
        largest = min(LARGEST_RATIO * mu, largest)
    probability = torch.linspace(0.002, largest, POINTS, dtype=torch.float64)
    probability[(probability - mu).abs().argmin()] = mu  # at r = 1 even the narrowest clip range has a point
    log_prob = probability.log()
    behavior = torch.full_like(probability, mu).log()
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
    if isinstance(spec, Gspo) or _unit(spec) == "sequence":
        return "a sequence of this one token"
    return ""


def _unit(spec: Surrogate) -> str:
    half = torch.full((1,), 0.5, dtype=torch.float64).log()
    return spec(alone(half, half, torch.ones(1, dtype=torch.float64))).unit


def _within_completion(spec: Cppo, log_prob: Tensor, behavior: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the curve with each point as the token at `POSITION` of a separate completion."""
    shape = (len(log_prob), LENGTH)
    at = POSITION - 1
    current = torch.full(shape, 0.5 + DRIFT, dtype=log_prob.dtype).log()
    other = torch.full(shape, 0.5, dtype=log_prob.dtype).log()
    current[:, at] = log_prob
    other[:, at] = behavior
    b = PolicyBatch.from_padded(torch.ones(shape), log_prob=current, behavior_log_prob=other, advantage=advantage)
    b.log_prob.requires_grad_()
    loss, weight = _differentiated(b, spec(b))
    return loss.view(shape)[:, at], weight.view(shape)[:, at]


def _selected(spec: Any, log_prob: Tensor, behavior: Tensor, advantage: Tensor) -> Tensor:
    """Return the whole batch's decision, as described by `remark_on`."""
    if isinstance(spec, ClipCov | KlCov):
        return torch.full(log_prob.shape, isinstance(spec, KlCov))
    still = behavior[:, None].expand(-1, 3)
    current = torch.cat([log_prob[:, None], still], dim=1)
    before = torch.cat([behavior[:, None], still], dim=1)
    selected = []
    for p, q, a in zip(current, before, advantage, strict=True):
        batch = alone(p, q, a.expand(4))
        selected.append(spec.select_tokens(batch)[0])
    return torch.stack(selected)


def _differentiated(b: PolicyBatch, token: TokenLoss) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(token.loss.sum(), b.log_prob)
    assert b.advantage is not None
    return token.loss.detach(), -gradient / b.advantage


def parse_surrogate(word: str) -> Any:
    """Build the spec of `ppo_clip` or `ppo_clip,epsilon_high=0.28`; ConfigError as for `spec_from_words`."""
    kind, *words = word.split(",")
    return spec_from_words("surrogate", kind, words)
