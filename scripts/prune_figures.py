"""The figures of docs/algorithms/prune.md, drawn from the selection itself: its pipeline, and dynamic allocation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from proxima.core.advantage.group import Grpo
from proxima.core.selection.dropping import Prune
from proxima.data.outcomes import Outcomes
from proxima.view.chart import Color, Drawing, panel_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of 8 completions of a question: 1 for the format, 2 for the answer, as in the paper.
REWARDS = (1.0, 3.0, 1.0, 0.0, 1.0, 1.0, 1.5, 1.0)
STAGES = ("generate\nG answers", "score\nall", "advantage\nof all", "prune\nto k", "log-probs\nof k", "update\non k")
EXAMPLE, ALLOCATED = Prune(rate=0.75), Prune(rate=0.875, allocate=True)
FIRST_CHEAPER = 4  # the stage from which on only k completions are left


def pruned(rewards: tuple[float, ...], spec: Prune) -> tuple[list[float], list[bool]]:
    """Return the advantages of a group, and whether `spec` keeps each completion."""
    outcomes = Outcomes.of(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long))
    advantage = Grpo(scale="group", epsilon=1e-4)(outcomes)
    return advantage.tolist(), spec(outcomes, advantage).tolist()


def _blank(axes: "Axes", **limits: Any) -> None:
    axes.set(xticks=[], yticks=[], **limits)
    axes.grid(visible=False)


@dataclass(frozen=True)
class PipelineFigure(Drawing):
    """The stages of a step above, and the advantages of a group with those that are kept below."""

    spec: Prune = EXAMPLE
    salt = "prune_pipeline"
    size = (760, 330)

    @property
    def title(self) -> str:
        return f"Pruning: rate {self.spec.rate:g} of {len(REWARDS)} keeps k = {self.spec.kept(len(REWARDS))}"

    def draw(self, figure: "Figure", color: Color) -> None:
        above = panel_axes(figure, (14, 14, 34, 214))
        _blank(above, xlim=(0, len(STAGES)), ylim=(0, 1))
        above.set_title(self.title, pad=12)
        for i, text in enumerate(STAGES):
            left = "b" if i >= FIRST_CHEAPER - 1 else "a"
            box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color(left), "linewidth": 1.5}
            above.text(i + 0.5, 0.5, text, ha="center", va="center", fontsize=11, bbox=box)
            if i:
                above.annotate(
                    "", (i + 0.1, 0.5), (i - 0.1, 0.5), arrowprops={"arrowstyle": "->", "color": color("muted")}
                )
        below = panel_axes(figure, (56, 14, 140, 56))
        advantage, keep = pruned(REWARDS, self.spec)
        for kept, name, label in (
            (True, "b", "kept: the largest |A|"),
            (False, "e", "pruned: no forward, no backward"),
        ):
            where = [i for i, it in enumerate(keep) if it is kept]
            below.bar([i + 1 for i in where], [advantage[i] for i in where], color=color(name), width=0.6, label=label)
        below.axhline(0, color=color("muted"), linewidth=1)
        low, high = min(advantage), max(advantage)
        below.set(xlim=(0.3, len(REWARDS) + 0.7), ylim=(low - 0.6, high + 0.6), ylabel="advantage A")
        rewards = [f"{i}\nreward {reward:g}" for i, reward in enumerate(REWARDS, 1)]
        below.set_xticks(range(1, len(REWARDS) + 1), rewards)
        below.legend(loc="upper right", frameon=False, ncols=1)


@dataclass(frozen=True)
class AllocationFigure(Drawing):
    """The completions of a step and the slots of its update, without and with dynamic allocation."""

    spec: Prune = ALLOCATED
    group: int = 16
    salt = "prune_allocation"
    size = (760, 330)

    @property
    def title(self) -> str:
        k, factor = self.spec.kept(self.group), self.spec.prompts_factor(self.group)
        sizes = f"rate {self.spec.rate:g}, G = {self.group}, k = {k}"
        return f"Allocation: {sizes}: {factor} times as many prompts fill an update"

    def draw(self, figure: "Figure", color: Color) -> None:
        k, factor = self.spec.kept(self.group), self.spec.prompts_factor(self.group)
        figure.text(14 / self.size[0], 1 - 22 / self.size[1], self.title, weight="bold")
        for top, prompts, words in ((56, 1, "without"), (130, factor, "allocate: true")):
            bottom = self.size[1] - top - 20 * prompts
            generated = panel_axes(figure, (120, self.size[0] - 120 - 20 * self.group, top, bottom))
            _blank(generated, xlim=(0, self.group), ylim=(prompts, 0))
            for row in range(prompts):
                for i in range(self.group):
                    _slot(generated, i, row, color("b" if i < k else "e"), filled=i < k)
            slots = panel_axes(figure, (470, self.size[0] - 470 - 17 * self.group, top, self.size[1] - top - 20))
            _blank(slots, xlim=(0, self.group), ylim=(1, 0))
            for i in range(self.group):
                _slot(slots, i, 0, color("b" if i < k * prompts else "grid"), filled=i < k * prompts)
            height = 1 - (top + 13) / self.size[1]
            figure.text(14 / self.size[0], height, words)
            figure.text(450 / self.size[0], height, "→", ha="center")
            full = f"{k * prompts} of {self.group} slots of the update"
            figure.text(470 / self.size[0], 1 - (top + 40) / self.size[1], full, color=color("muted"))
        figure.text(
            120 / self.size[0],
            1 - 44 / self.size[1],
            f"generated and scored, {self.group} to a prompt",
            color=color("muted"),
        )


def _slot(axes: "Axes", column: int, row: int, color: str, *, filled: bool) -> None:
    from matplotlib.patches import Rectangle

    face = color if filled else "none"
    axes.add_patch(Rectangle((column + 0.12, row + 0.12), 0.76, 0.76, facecolor=face, edgecolor=color, linewidth=1.2))
