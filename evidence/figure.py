"""Figures of the evidence, as SVG that is the same at each drawing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Sequence[float]


def draw(path: Path, panels: Sequence[Mapping[str, Any]]) -> None:
    """Draw panels beside each other: `title`, `x` and `y` (labels), `lines` {name: (xs, means, halves)}, and `log` for
    a logarithmic vertical axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "proxima", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, (name, (xs, means, halves)) in enumerate(panel["lines"].items()):
            color, style = f"C{number % 10}", "-" if number < 5 else "--"
            axis.plot(xs, means, style, color=color, label=name, linewidth=1.4)
            low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
            axis.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
        axis.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
        if panel.get("log"):
            axis.set_yscale("log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
