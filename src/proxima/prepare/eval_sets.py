"""Evaluation sets that must not be trained on: named ones, or the prepared folders next to the one being written."""

from pathlib import Path

from proxima.data import UserError
from proxima.prepare.catalog import Part
from proxima.prepare.dataset_card import read_card
from proxima.prepare.decontaminate import EvalSet
from proxima.prepare.locate import CARD, locate_files
from proxima.prepare.normalize import question_key, strip_instructions
from proxima.prepare.read_files import combined_sha256, inspect_file, iter_source_rows
from proxima.system.jsonl import utf8

_ANY = Part("evaluation set", "", (), side="test", answer="expression", template="plain")


def load_eval_set(given: str) -> EvalSet:
    """Load the distinct test questions of a prepared folder, a file, a folder as published, or a data set on the hub;
    UserError if it does not exist, or has no questions."""
    place = Path(given).expanduser()
    path = str(place / "test.parquet") if (place / "test.parquet").is_file() else given
    if path == given and (place / CARD).is_file():
        raise UserError(f"against={given!r} has no test.parquet: nothing is evaluated on it; leave it out")
    try:
        files = locate_files(_ANY, path)
        inputs = tuple(inspect_file(*pair) for pair in files.sides["test"])
        questions = {
            question_key(row.content.question): utf8(strip_instructions(row.content.question))
            for row in iter_source_rows(inputs)
            if row.content and row.content.question
        }
    except UserError as error:
        raise UserError(f"against={given!r}: {error}") from None
    if not questions:
        raise UserError(f"against={given!r} holds no questions")
    name = place.name if place.is_dir() or place.stem != "test" else place.resolve().parent.name
    return EvalSet(name, list(questions.values()), combined_sha256(inputs))


def sibling_eval_sets(out: Path) -> list[str]:
    """Return the folders next to `out` with a `test.parquet`, except test splits that were split off a training set."""
    if not out.parent.is_dir():
        return []
    siblings = (path for path in sorted(out.parent.iterdir()) if path != out and (path / "test.parquet").is_file())
    return [str(path) for path in siblings if not path.name.startswith(".") and not _is_split_off(path)]


def _is_split_off(folder: Path) -> bool:
    try:
        return bool(read_card(folder)["split"]["held_out"])
    except (UserError, KeyError, TypeError):
        return False
