"""Prints what `proxima engine diagnose` has found."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from proxima.cli.parameters import print_json
from proxima.config.validate import load_recipe
from proxima.data import UserError
from proxima.evaluation.intervals import Interval
from proxima.runtime.diagnosis.examination import Diagnosis, SettingRow, diagnose
from proxima.view.formatting import significant, visible
from proxima.view.terminal import table_text

DIGITS = 2
HEADER = (
    "nats a token, |ρ| unless it says otherwise; ρ: the trainer's log-prob less the engine's; [95 % over the answers]"
)


def print_diagnosis(
    recipe: str, overrides: Sequence[str], *, prompts: int, samples: int, tokens: int, as_json: bool
) -> None:
    """Diagnose the engine of a recipe and print the report, or everything for programs.

    Raises:
        ConfigError: the recipe is wrong, or takes its answers from another run.
        UserError: the engine can't start.
    """
    resolved = load_recipe(recipe, overrides)
    if resolved.config.replayed is not None:
        raise UserError(
            "rollouts names a run whose answers are replayed: no engine samples", remedy="set rollouts=null"
        )
    with resolved.locating():
        found = diagnose(
            resolved.config,
            lambda line: print(visible(line), file=sys.stderr, flush=True),
            prompts=prompts,
            samples=samples,
            tokens=tokens,
        )
    if as_json:
        print_json(asdict(found) | {"found": found.found})
    else:
        print("\n".join(visible(line) for line in diagnosis_lines(found)))


def diagnosis_lines(found: Diagnosis) -> Iterator[str]:
    """The report, line by line: settings, promises, what was not tried, pairs, and what was found."""
    yield f"engine   {found.engine}: {found.answers:,} answers of {found.tokens:,} tokens"
    yield HEADER
    yield ""
    tried = [found.recipe, *(row for row in found.rows if row.verdict != "not tried")]
    yield from table_text([_cells(row, found.recipe) for row in tried], sys.stdout).splitlines()
    yield ""
    for promise in found.promises:
        state = {True: "BROKEN", False: "kept", None: "not tried"}[promise.broken]
        if promise.value is None:
            figure = ""
        else:
            figure = f"; {_interval(promise.value)} {promise.unit}"
        yield f"{state:<10} {promise.name}: {promise.says}{figure}"
    for row in found.rows:
        if row.verdict == "not tried":
            yield f"not tried  {row.what}: {row.name}: {row.why_not}"
    for pair in found.pairs:
        extra = f"{_interval(pair.more_than_sum)} more than the sum of each alone"
        yield f"pair       {' and '.join(pair.names)}: less by {_interval(pair.less)}; {extra}"
    yield ""
    yield from _conclusion(found)


def _conclusion(found: Diagnosis) -> Iterator[str]:
    """What makes the mismatch, each with a line, and the fields to set."""
    if not found.found:
        yield "found      nothing: no setting makes the mismatch less, and every promise is kept"
        return
    rows = {row.name: row for row in found.rows}
    for name in found.found:
        row = rows.get(name)
        if row is None or row.less is None:
            yield f"found      {name}"
            continue
        line = f"found      {row.what}: {name}: less by {_interval(row.less)}"
        if row.rate is not None and found.recipe.rate:
            line += f", at {row.rate / found.recipe.rate:.2f} × the tokens a second"
        if row.fields:
            line += f"; set {shlex.join(row.fields)}"
        yield line
    yield "           then diagnose again: a small cause hides behind a large one"


def _cells(row: SettingRow, recipe: SettingRow) -> dict[str, str]:
    sampled = row.sampled
    assert sampled is not None
    scored = "–" if row.scored is None else _interval(row.scored.mean)
    less = "" if row is recipe or row.less is None else _interval(row.less)
    rate = "–" if row.rate is None else f"{row.rate:,.0f}"
    return {
        "setting": f"{row.what}: {row.name}",
        "scored": scored,
        "sampled": _interval(sampled.mean),
        "ρ": _interval(sampled.signed),
        "p99": _interval(sampled.p99),
        "an answer": _interval(sampled.answer),
        "less by": less,
        "tokens/s": rate,
    }


def _interval(value: Interval) -> str:
    shown = (significant(figure, DIGITS) for figure in (value.value, value.low, value.high))
    return "{} [{}, {}]".format(*shown)
