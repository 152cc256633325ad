"""Progress and result of `proxima data prepare`, as lines."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxima.prepare import PreparedFolder


class ProgressLine:
    """One moving line on a terminal, a line every ten seconds elsewhere; nothing for a stage that ends sooner."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty()
        self._stage, self._began, self._shown, self._width = "", 0.0, 0.0, 0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def update(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._shown = stage, now, now
        if self._quiet or now - self._shown < (0.5 if self._live else 10.0):
            return
        self._shown = now
        rate = done / (now - self._began)
        line = f"{stage}  {done:,}" + (f" of {total:,}" if total else "") + f"  {rate:,.0f}/s"
        if total and total > done:
            from proxima.view.formatting import duration

            line += f"  eta {duration((total - done) / max(rate, 1e-9))}"
        self._clear()
        if self._live:
            self._width = len(line)
            print(line, end="\r", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._width:
            print(" " * self._width, end="\r", file=sys.stderr, flush=True)
            self._width = 0


def report(done: "PreparedFolder", dry_run: bool) -> Iterator[str]:
    """The result of each step, in lines."""
    from proxima.prepare.dataset_card import recipe_snippet, repetition_line

    card = done.card
    source = card["source"]
    yield f"{card['name']}  from {source['name']}" + (f" at {source['revision'][:12]}" if source["revision"] else "")
    for side, counts in card["counts"].items():
        yield f"  {side:<5} {counts['rows']:>11,} rows"
        repeats = f"of an earlier question; questions × rows: {repetition_line(card['repetition'][side])}"
        for key, words, more in (
            ("unreadable_rows", "unreadable", f"{counts['unreadable']:,} distinct; unreadable.jsonl"),
            ("repeats", "repeats", repeats),
            ("questions", "questions", ""),
            ("conflicts", "conflicts", f"several answers; {counts['conflicts_dropped']:,} left out; conflicts.jsonl"),
            ("contaminated", "contaminated", f"{_contaminated_by(card)}; contaminated.jsonl"),
        ):
            if counts[key]:
                yield f"        {counts[key]:>11,} {words:<13}{more}".rstrip()
    compared = [one["set"] for one in card["overlap"]["against"]]
    if "train" in card["counts"]:
        alone = not any(one["sha256"] for one in card["overlap"]["against"]) and card["split"]["held_out"] is not None
        remedy = "; prepare some first, or name them with --against" if alone else ""
        yield (
            "  compared with "
            f"{', '.join(compared) or 'no evaluation set'}{' alone' if alone and compared else ''}{remedy}"
        )
    for name, facts in card["outputs"].items():
        if name.endswith(".parquet"):
            held_out = card["split"]["held_out"]
            how = f"  held out: {held_out:.3g} by hash" if held_out and name == "test.parquet" else ""
            yield f"  {'would write' if dry_run else 'wrote'} {done.folder / name}  {facts['rows']:,} rows{how}"
    yield from (f"  note: {note}" for note in done.notes)
    if not dry_run:
        yield "  in a recipe: " + recipe_snippet(card, str(done.folder)).replace("\n", "\n               ")


def _contaminated_by(card: dict[str, Any]) -> str:
    return ", ".join(f"{one['set']} {one['left_out']:,}" for one in card["overlap"]["against"] if one["left_out"])
