"""The result of `proxima data prepare`, as lines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxima.prepare import PreparedFolder


def report(done: "PreparedFolder", dry_run: bool) -> Iterator[str]:
    """The result of each step, in lines."""
    from proxima.prepare.dataset_card import recipe_snippet, repetition_line

    card = done.card
    source = card["source"]
    sets = ", ".join(f"{o['set']} {o['left_out']:,}" for o in card["overlap"]["against"] if o["left_out"])
    yield f"{card['name']}  from {source['name']}" + (f" at {source['revision'][:12]}" if source["revision"] else "")
    for side, counts in card["counts"].items():
        yield f"  {side:<5} {counts['rows']:>11,} rows"
        repeats = f"of an earlier question; questions × rows: {repetition_line(card['repetition'][side])}"
        for key, words, more in (
            ("unreadable_rows", "unreadable", f"{counts['unreadable']:,} distinct; unreadable.jsonl"),
            ("repeats", "repeats", repeats),
            ("questions", "questions", ""),
            ("conflicts", "conflicts", f"several answers; {counts['conflicts_dropped']:,} left out; conflicts.jsonl"),
            ("contaminated", "contaminated", f"{sets}; contaminated.jsonl"),
        ):
            if counts[key]:
                yield f"        {counts[key]:>11,} {words:<13}{more}".rstrip()
    compared = [one["set"] for one in card["overlap"]["against"]]
    if "train" in card["counts"]:
        alone = not any(one["sha256"] for one in card["overlap"]["against"]) and card["split"]["held_out"] is not None
        remedy = "; prepare some first, or name them with --against" if alone else ""
        named = ", ".join(compared) or "no evaluation set"
        yield f"  compared with {named}{' alone' if alone and compared else ''}{remedy}"
    for name, facts in card["outputs"].items():
        if name.endswith(".parquet"):
            held_out = card["split"]["held_out"]
            how = f"  held out: {held_out:.3g} by hash" if held_out and name == "test.parquet" else ""
            yield f"  {'would write' if dry_run else 'wrote'} {done.folder / name}  {facts['rows']:,} rows{how}"
    yield from (f"  note: {note}" for note in done.notes)
    if not dry_run:
        yield "  in a recipe: " + recipe_snippet(card, str(done.folder)).replace("\n", "\n               ")
