"""The held-out sets beside `eval.task` (`eval.sets`): their lines in the log, their table and curve in the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.evaluate.headline import Headline
from proxima.runtime.held_out import named_sets
from proxima.runtime.observer import Record
from proxima.view.chart import Series, line_chart
from proxima.view.formatting import NONE, fixed

COLORS = ("a", "b", "c", "d", "e")


def figure_text(record: Mapping[str, Any]) -> str:
    """Of a set's record: `0.450 (95 % 0.258–0.658)`."""
    headline = Headline.of([record])
    bounds = headline.bounds(record)
    interval = "" if bounds is None else f" (95 % {fixed(bounds[0], 3)}–{fixed(bounds[1], 3)})"
    return f"{fixed(headline.value(record), 3)}{interval}"


def set_lines(record: Record) -> list[str]:
    """A line of the log for each set: `      math500  accuracy 0.450 (95 % 0.258–0.658)  20 questions`."""
    sets = named_sets(record)
    width = max(map(len, sets), default=0)
    return [
        f"      {name:<{width}} {Headline.of([one]).name} {figure_text(one)}  {one['questions']} questions"
        for name, one in sets.items()
    ]


def sets_table(evals: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each set: its name, its figure, and that of its first and last evaluation."""
    rows = []
    for name in dict.fromkeys(name for record in evals for name in named_sets(record)):
        known = [sets[name] for record in evals if name in (sets := named_sets(record))]
        first, last = figure_text(known[0]), figure_text(known[-1]) if len(known) > 1 else NONE
        questions = str(known[-1]["questions"])
        rows.append(
            {"name": name, "figure": Headline.of(known).name, "questions": questions, "first": first, "last": last}
        )
    return rows


def sets_card(train: Sequence[Record], evals: Sequence[Record]) -> dict[str, Any] | None:
    """A chart with the curve of each set; None without sets."""
    drawn, legend, values = [], [], []
    names = dict.fromkeys(name for record in evals for name in named_sets(record))
    for color, name in zip(COLORS, names, strict=False):
        known = {int(r["step"]): sets[name] for r in evals if name in (sets := named_sets(r))}
        headline = Headline.of(known.values())
        points = [(float(step), headline.value(one)) for step, one in known.items()]
        drawn.append(Series(points=points, color=color, smooth=False, dots=True))
        by_step = {int(x): fixed(y, 3) for x, y in points}
        values.append([by_step.get(int(r["step"]), NONE) for r in train])
        legend.append({"name": name, "color": f"var(--{color})", "last": fixed(points[-1][1], 3)})
    svg = line_chart(drawn, label="Held-out sets by step", zero=True) if drawn else ""
    more = f"; {len(names) - len(COLORS)} more in metrics.jsonl" if len(names) > len(COLORS) else ""
    text = f"accuracy, or mean reward, of the sets of eval.sets{more}"
    return (
        {"title": "Held-out sets", "explanation": text, "svg": svg, "legend": legend, "values": values} if svg else None
    )
