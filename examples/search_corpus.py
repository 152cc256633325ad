"""Write a small corpus about invented people, and questions that it answers, for recipes/search.yaml. The answers can't
be known without a search; held-out and training questions are about different people.

    python examples/search_corpus.py runs/search_corpus
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

PEOPLE, HELD_OUT = 160, 40
FIRST = "Ada Anna Boris Clara Daniel Elena Felix Greta Hugo Ida Jonas Karla Leo Marta Nina Oscar Paula Robin Sara Tom"
LAST = "Adler Bloom Carver Drake Ellis Frost Grant Hale Irving Joyce Kerr Lowell Marsh Nolan Ortiz Palmer Quinn Reyes"
OWN = {
    "job": "baker painter farmer lawyer nurse pilot tailor barber butcher dentist plumber carpenter teacher doctor",
    "instrument": "piano violin guitar flute drums trumpet harp cello banjo organ clarinet saxophone tuba fiddle",
    "pet": "dog cat horse rabbit parrot snake turtle goat donkey pig sheep cow duck fox",
}
QUESTION = "What is the {kind} of {name}?"
QUERY = "{kind} {name}"
PASSAGE = "The {kind} of {name} is {value}."


def people() -> list[dict[str, str]]:
    """Return people with different names; their attributes are drawn independently, so that a name reveals nothing."""
    draw = random.Random(0)
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    chosen = draw.sample(names, PEOPLE)
    return [{"name": name} | {kind: draw.choice(words.split()) for kind, words in OWN.items()} for name in chosen]


def main(folder: Path) -> None:
    """Write `passages.jsonl` with three passages for each person, and `train.jsonl` and `test.jsonl` with a question on
    each passage."""
    facts = [{"name": p["name"], "kind": kind, "value": p[kind]} for p in people() for kind in OWN]
    held_out = HELD_OUT * len(OWN)
    parts = {"train": list(map(_row, facts[held_out:])), "test": list(map(_row, facts[:held_out]))}
    parts["passages"] = [{"text": PASSAGE.format(**fact)} for fact in facts]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(", ".join(f"{len(rows)} {name}" for name, rows in parts.items()), f"in {folder}")


def shown() -> list[dict[str, str]]:
    """Return worked examples to show before each question: the small model doesn't call a tool that it only knows from
    a description."""
    messages = []
    for fact in (
        {"name": "Ann Lee", "kind": "pet", "value": "pig"},
        {"name": "Max Bay", "kind": "job", "value": "farmer"},
    ):
        said = (QUESTION, f"```search\n{QUERY}\n```", f"[1] {PASSAGE}", "{value}")
        for i, text in enumerate(said):
            messages.append({"role": ("user", "assistant")[i % 2], "content": text.format(**fact)})
    return messages


def _row(fact: dict[str, str]) -> dict[str, Any]:
    asked = {"role": "user", "content": QUESTION.format(**fact)}
    return {"messages": [*shown(), asked], "answer": fact["value"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
