"""Write a small corpus about invented people, and questions that it answers, for recipes/search.yaml. Nobody can know
the answers without a search; the people of the held-out questions are not those of the training questions.

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
    "animal": "dog cat horse rabbit parrot snake turtle goat donkey pig sheep cow duck fox",
}
PASSAGE = "{name} works as a {job}, plays the {instrument}, and has a {animal} at home."
QUESTIONS = {
    "job": "What is the job of {name}?",
    "instrument": "Which instrument does {name} play?",
    "animal": "Which animal does {name} have?",
}


def people() -> list[dict[str, str]]:
    """Different names; what is true of a person is drawn alone, so that no name tells anything."""
    draw = random.Random(0)
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    chosen = draw.sample(names, PEOPLE)
    return [{"name": name} | {kind: draw.choice(words.split()) for kind, words in OWN.items()} for name in chosen]


def main(folder: Path) -> None:
    """`passages.jsonl`, one for each person, and `train.jsonl` and `test.jsonl`, three questions for each."""
    known = people()
    asked = [[_question(kind, person) for kind in QUESTIONS] for person in known]
    parts = {
        "train": [row for rows in asked[HELD_OUT:] for row in rows],
        "test": [row for rows in asked[:HELD_OUT] for row in rows],
    }
    parts["passages"] = [{"text": PASSAGE.format(**person)} for person in known]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(", ".join(f"{len(rows)} {name}" for name, rows in parts.items()), f"in {folder}")


def shown() -> list[dict[str, str]]:
    """How it is done, before each question: the small model calls no tool of which it has only read."""
    ann = {"name": "Ann Lee", "job": "tailor", "instrument": "harp", "animal": "pig"}
    max_ = {"name": "Max Bay", "job": "farmer", "instrument": "flute", "animal": "cat"}
    messages = []
    for kind, person in (("animal", ann), ("job", max_)):
        said = [QUESTIONS[kind], "```search\n{name}\n```", f"[1] {PASSAGE}", f"{{{kind}}}"]
        for i, text in enumerate(said):
            messages.append({"role": ("user", "assistant")[i % 2], "content": text.format(**person)})
    return messages


def _question(kind: str, person: dict[str, str]) -> dict[str, Any]:
    asked = {"role": "user", "content": QUESTIONS[kind].format(**person)}
    return {"messages": [*shown(), asked], "answer": person[kind]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
