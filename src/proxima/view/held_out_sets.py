"""The held-out sets besides `eval.task` (`eval.sets`): their lines in the log, and their table in the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.evaluation.headline import Headline
from proxima.evaluation.held_out import named_sets
from proxima.runtime.watch.observer import Record
from proxima.view.formatting import NONE, fixed


def figure_text(record: Mapping[str, Any]) -> str:
    """Format the figure of a set's record: `0.450 (95 % 0.258–0.658)`."""
    headline = Headline.of([record])
    bounds = headline.bounds(record)
    interval = "" if bounds is None else f" (95 % {fixed(bounds[0], 3)}–{fixed(bounds[1], 3)})"
    return f"{fixed(headline.value(record), 3)}{interval}"


def set_lines(record: Record) -> list[str]:
    """Return a log line for each set: `      math500  accuracy 0.450 (95 % 0.258–0.658)  20 questions`."""
    sets = named_sets(record)
    width = max(map(len, sets), default=0)
    return [
        f"      {name:<{width}} {Headline.of([result]).name} {figure_text(result)}  {result['questions']} questions"
        for name, result in sets.items()
    ]


def sets_table(evals: Sequence[Record]) -> list[dict[str, str]]:
    """Return a row for each set: its name, its questions, and its figure in the first and the last evaluation."""
    rows = []
    for name in dict.fromkeys(name for record in evals for name in named_sets(record)):
        results = [sets[name] for record in evals if name in (sets := named_sets(record))]
        first, last = figure_text(results[0]), figure_text(results[-1]) if len(results) > 1 else NONE
        questions, figure = str(results[-1]["questions"]), Headline.of(results).name
        rows.append({"name": name, "figure": figure, "questions": questions, "first": first, "last": last})
    return rows
