"""The learning curve of a run as an SVG file of its own, for a README: `python -m proxima.view.curve RUN OUT.svg`.

It carries its colours for light and dark, so it can stand in an `<img>` on either page.
"""

import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from proxima.data import UserError
from proxima.data.atomic_files import write_whole
from proxima.runtime.folder import RunFolder
from proxima.view.chart import Frame, Point, running_mean, ticks
from proxima.view.formatting import duration, fixed
from proxima.view.log_lines import bounds

STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; --ink: #1f2328; --muted: #656d76; --grid: #e3e6ea; --a: #2563eb; --b: #c2500c; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --muted: #9198a1; --grid: #2c323a; --a: #7aaefc; --b: #f2a164; } }
text { fill: var(--muted); } .title { fill: var(--ink); font-size: 15px; font-weight: 600; } .a { fill: var(--a); } .b { fill: var(--b); font-weight: 600; }
.grid { stroke: var(--grid); } .raw, .line { fill: none; stroke: var(--a); stroke-linejoin: round; } .raw { opacity: .35; } .line { stroke-width: 2.2; }
.dot { fill: var(--b); } .whisker { stroke: var(--b); stroke-width: 2; }
"""  # noqa: E501


def write_curve(run: Path | str, out: Path | str) -> Path:
    """Draw mean reward by step, and the held-out accuracy with its 95 % Wilson interval; return `out`.

    Raises:
        ValueError: the run has no finished step.
    """
    folder = RunFolder(run)
    records = folder.read_metrics()
    train = [r for r in records if r["kind"] == "train" and r.get("reward/mean") is not None]
    evals = [r for r in records if r["kind"] == "eval" and r.get("accuracy") is not None]
    if not train:
        raise UserError(f"{folder.metrics} holds no finished step; train first")
    write_whole(Path(out), draw(train, evals))
    return Path(out)


def draw(train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    """The SVG text."""
    rewards: list[Point] = [(float(r["step"]), float(r["reward/mean"])) for r in train]
    values = [v for _, v in rewards if v is not None] + [float(r["accuracy"]) for r in evals]
    levels = ticks(min(0.0, *values), max(1.0, *values), 6)
    frame = Frame(
        width=760,
        height=330,
        left=44,
        right=24,
        top=44,
        bottom=40,
        x_low=0.0,
        x_high=rewards[-1][0],
        y_low=levels[0],
        y_high=levels[-1],
    )
    parts = [f'<text class="title" x="{frame.left}" y="22">{escape(caption(train, evals))}</text>']
    for level in levels:
        y = frame.y(level)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{fixed(level, 1)}</text>')
    for tick in (t for t in ticks(0.0, frame.x_high, 9) if t <= frame.x_high):
        parts.append(f'<text x="{frame.x(tick):.1f}" y="{frame.height - 18}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(
        f'<text x="{(frame.left + frame.width) / 2:.1f}" y="{frame.height - 2}" text-anchor="middle">step</text>'
    )
    parts.append(_line(frame, rewards, "raw"))
    parts.append(_line(frame, running_mean(rewards), "line"))
    parts += [_eval(frame, r) for r in evals]
    parts += _names(frame, bool(evals))
    box = f'viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}"'
    title = f"<title>{escape(caption(train, evals))}</title>"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f"{box}>{title}<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def caption(train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    """What the picture says, in one line."""
    spent = f"{train[-1]['step']} steps, {duration(sum(float(r.get('time/step') or 0) for r in train))}"
    if len(evals) < 2:
        return f"mean reward {fixed(train[0]['reward/mean'])} → {fixed(train[-1]['reward/mean'])} in {spent}"
    questions = evals[-1]["questions"]
    return (
        f"held-out accuracy {fixed(evals[0]['accuracy'], 3)} → {fixed(evals[-1]['accuracy'], 3)} of {questions} "
        f"questions in {spent}"
    )


def _line(frame: Frame, points: list[Point], kind: str) -> str:
    places = " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in points if v is not None)
    return f'<polyline class="{kind}" points="{places}"/>'


def _eval(frame: Frame, record: dict[str, Any]) -> str:
    low, high = bounds(record)
    x, y, accuracy = frame.x(float(record["step"])), frame.y(float(record["accuracy"])), fixed(record["accuracy"], 3)
    anchor, shift = ("start", 9) if x < frame.width / 2 else ("end", -9)
    return (
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        f'<text class="b" x="{x + shift:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}">{accuracy}</text>'
    )


def _names(frame: Frame, evals: bool) -> list[str]:
    """The two names, in the empty lower right corner of a curve that rises."""
    x, y = frame.width - frame.right - 6, frame.y(frame.y_low) - 30
    names = [f'<text class="a" x="{x}" y="{y:.1f}" text-anchor="end">mean reward of a step</text>']
    return (
        [*names, f'<text class="b" x="{x}" y="{y + 18:.1f}" text-anchor="end">held-out accuracy, 95 % interval</text>']
        if evals
        else names
    )


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m proxima.view.curve RUN_FOLDER OUT.svg", file=sys.stderr)
        return 2
    try:
        print(write_curve(sys.argv[1], sys.argv[2]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
