"""Figures of the evidence, as SVG that is the same at each drawing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Line = tuple[Sequence[float], Sequence[float], Sequence[float]]  # places, means, half-widths of their intervals


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines in one pair of axes. `x`, `y`: labels; `log`: the vertical axis is logarithmic."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line]
    log: bool = False


def draw(path: Path, panels: Sequence[Panel], columns: int = 3) -> None:
    """Draw panels with the same lines, `columns` of them beside each other, with one legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rc("svg", hashsalt="proxima")
    plt.rc("font", size=9)
    plt.rc("axes.spines", top=False, right=False)
    rows = -(-len(panels) // columns)
    size = (4.2 * min(columns, len(panels)) + 1.4, 3.2 * rows)
    figure, axes = plt.subplots(rows, min(columns, len(panels)), figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for number, (name, (xs, means, halves)) in enumerate(panel.lines.items()):
            color, style = f"C{number % 10}", "-" if number < 5 else "--"
            axis.plot(xs, means, style, color=color, label=name, linewidth=1.4)
            low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
            axis.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if panel.log:
            axis.set_yscale("log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
