"""Evaluation sets that must not be trained on: those that are named, or those that lie beside the folder being made."""

import json
from pathlib import Path

from proxima.data import UserError
from proxima.prepare.catalog import Part
from proxima.prepare.decontaminate import EvalSet
from proxima.prepare.locate import CARD, locate_files
from proxima.prepare.normalize import question_key, sound, strip_instructions
from proxima.prepare.pipeline import sha256_of
from proxima.prepare.read_files import inspect_file, iter_source_rows

_ANY = Part("evaluation set", "", (), side="test", answer="expression", template="plain", reward="math")


def load_eval_set(given: str) -> EvalSet:
    """The test questions of a prepared folder, of a file, of a folder as published, or of a data set on the hub; each
    once.

    Raises:
        ValueError: nothing is there, or it holds no questions; one line.
    """
    place = Path(given).expanduser()
    path = str(place / "test.parquet") if (place / "test.parquet").is_file() else given
    if path == given and (place / CARD).is_file():
        raise UserError(f"against={given!r} has no test.parquet: nothing is evaluated on it; leave it out")
    try:
        origin = locate_files(_ANY, path)
        inputs = tuple(inspect_file(*pair) for pair in origin.sides["test"])
        questions = {
            question_key(row.raw.question): sound(strip_instructions(row.raw.question))
            for row in iter_source_rows(inputs)
            if row.raw and row.raw.question
        }
    except ValueError as problem:
        raise UserError(f"against={given!r}: {problem}") from None
    if not questions:
        raise UserError(f"against={given!r} holds no questions")
    name = place.name if place.is_dir() or place.stem != "test" else place.resolve().parent.name
    return EvalSet(name, list(questions.values()), sha256_of(inputs))


def sibling_eval_sets(out: Path) -> list[str]:
    """Folders beside `out` that are evaluated on: those with a `test.parquet`, apart from test sides split off a
    training set."""
    if not out.parent.is_dir():
        return []
    found = (folder for folder in sorted(out.parent.iterdir()) if folder != out and (folder / "test.parquet").is_file())
    return [str(folder) for folder in found if not folder.name.startswith(".") and not _split_off(folder)]


def _split_off(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / CARD).read_text(encoding="utf-8"))["split"]["held_out"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
