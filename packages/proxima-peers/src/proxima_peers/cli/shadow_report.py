"""The stages as text and as JSON."""

import sys
from typing import Any

from proxima.view.terminal import table_text
from proxima_peers.shadow.choices import Found, Match
from proxima_peers.shadow.dump import Dump
from proxima_peers.shadow.stages import StageVerdict, first_disagreement

MOST_LINES = 6  # conventions that are printed; --json has all
MOST_MATCHES = 1000
NONE_FITS = "no convention gives this"
UNLIKELY = 1e-3


def failed(made: list[StageVerdict]) -> bool:
    """True if a number has no explanation."""
    return any(stage.verdict == "unexplained" for stage in made)


def text(dump: Dump, file: str, made: list[StageVerdict]) -> str:
    """The report for a reader."""
    rows = len(dump.loss_mask)
    peer = f" of {dump.settings.peer}" if dump.settings.peer else ""
    tokens = int(dump.loss_mask.sum())
    lines = [f"{file}: one update step{peer}, {rows} answers, {tokens} tokens in the loss", ""]
    table = [_row(stage) for stage in made]
    lines.append(table_text(table, sys.stdout, left=("verdict", "at")))
    first = first_disagreement(made)
    named = "none" if first is None else first.name
    lines += ["", f"first disagreement: {named}"]
    loss = next(stage for stage in made if stage.name == "loss")
    for stage in made:
        if stage.name == "gradient" and stage.verdict == "explained" and stage.found.matches == loss.found.matches:
            lines += ["", "gradient: the conventions of the loss give it, too"]
        else:
            lines += _explanation(stage)
    return "\n".join(lines)


def _row(stage: StageVerdict) -> dict[str, str]:
    row = {"": stage.name, "ours": _number(stage.ours), "theirs": _number(stage.theirs)}
    if stage.verdict == "same":
        return row | {"verdict": "same", "at": ""}
    if stage.verdict == "unexplained":
        return row | {"verdict": NONE_FITS, "at": stage.where}
    return row | {"verdict": stage.verdict, "at": stage.where}


def _explanation(stage: StageVerdict) -> list[str]:
    if stage.verdict == "same" or (stage.verdict == "not recomputed" and stage.theirs is None):
        return []
    lines = ["", f"{stage.name}: {_headline(stage)}"]
    if stage.verdict == "explained":
        nearest = stage.found.nearest
        lines += [f"    {match}" for match in nearest[:MOST_LINES]]
        if len(nearest) > MOST_LINES:
            lines.append(f"    … {len(nearest) - MOST_LINES} more with as few departures: --json lists them")
        for axis, choices in stage.found.alike.items():
            lines.append(f"    the same on this batch: {axis}: {'; '.join(choices)}")
        if stage.found.by_chance > UNLIKELY:
            share = f"{100 * stage.found.by_chance:.1f} %"
            lines.append(f"    a wrong number would fit one of them by chance in {share} of cases: dump grad_log_prob")
    return lines


def _headline(stage: StageVerdict) -> str:
    more = f" ({stage.reason})" if stage.reason else ""
    if stage.verdict == "not recomputed":
        return f"not recomputed: {stage.reason}"
    if stage.verdict == "unexplained":
        return f"{NONE_FITS}; {stage.found.tried:,} tried{more}"
    count = len(stage.found.nearest)
    said = f"{count} conventions give it, which this batch can't tell apart"
    if count == 1:
        said = "this convention gives it"
    return f"{said}; {stage.found.tried:,} tried{more}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.9g}"


def as_json(dump: Dump, file: str, made: list[StageVerdict]) -> dict[str, Any]:
    """The report for a program."""
    first = first_disagreement(made)
    named = None if first is None else first.name
    return {
        "file": file,
        "peer": dump.settings.peer,
        "first_disagreement": named,
        "stages": [
            {
                "name": stage.name,
                "verdict": stage.verdict,
                "ours": stage.ours,
                "theirs": stage.theirs,
                "at": stage.where,
                "reason": stage.reason,
                **_found(stage.found),
            }
            for stage in made
        ],
    }


def _found(found: Found) -> dict[str, Any]:
    def written(match: Match) -> dict[str, Any]:
        return {"convention": dict(match.convention), "departures": dict(match.departures)}

    return {
        "tried": found.tried,
        "by_chance": found.by_chance,
        "matches": len(found.matches),
        "conventions": [written(match) for match in found.matches[:MOST_MATCHES]],
    }
