"""The card of a prepared folder: its source, the outcome for every row, and the hashes that verify its files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.prepare.catalog import Part, PrepareOptions
from proxima.prepare.decontaminate import EvalSet, OverlapIndex, OverlapMatch
from proxima.prepare.locate import CARD, SourceFiles
from proxima.prepare.prompt_template import Template
from proxima.prepare.read_files import InputFile, combined_sha256, inspect_file
from proxima.prepare.write_files import COLUMNS, LISTS, SplitData, SplitOutcome
from proxima.version import __version__

FORMAT = 1
_REMAKE = "make it anew: proxima data prepare … --overwrite"
README = "README.md"
_LISTED_INPUTS = 64  # beyond, the files of a side are one line with a combined hash
_SHOWN_PHRASES = 10
# rewards for templates whose answers are in a form that the part's reward does not read
_REWARD_OF_TEMPLATE = {"boxed": "math", "think_answer": "regex"}


def build_card(
    part: Part,
    source: SourceFiles,
    template: Template,
    options: PrepareOptions,
    held_out: float | None,
    command: str,
    sides: Mapping[str, SplitData],
    overlap: OverlapIndex,
    outcome: SplitOutcome,
    files: Mapping[str, int],
) -> dict[str, Any]:
    """Build the card without the hashes of written files, which `write_card` adds. It has no date and no absolute
    path."""
    import pyarrow

    phrases = overlap.phrases
    return {
        "format": FORMAT,
        "name": part.name,
        "title": part.title,
        "source": {"kind": source.kind, "name": source.name, "revision": source.revision, "license": source.license},
        "inputs": {side: _input_lines(data.inputs) for side, data in sides.items()},
        "counts": {side: _counts(side, data, outcome) for side, data in sides.items()},
        "answer": part.answer,
        "reward": _REWARD_OF_TEMPLATE.get(template.name, part.reward),
        "prompt": {"template": template.name, "text": template.text, "system": template.system},
        "conflicts": options.conflicts,
        "max_unreadable": options.max_unreadable,
        "split": {"held_out": held_out},
        "overlap": {
            "words": options.words,
            "common": options.common,
            "against": [_compared(eval_set, outcome) for eval_set in overlap.sets],
            "phrases_ignored": len(phrases),
            "phrases": [{"run": run, "questions": count} for run, count in phrases[:_SHOWN_PHRASES]],
        },
        "outputs": {name: {"rows": rows} for name, rows in files.items()},
        "command": command,
        "versions": {"proxima": __version__, "pyarrow": pyarrow.__version__},
    }


def _input_lines(inputs: Sequence[InputFile]) -> list[dict[str, Any]]:
    if len(inputs) <= _LISTED_INPUTS:
        return [{"file": file.name, "bytes": file.size, "sha256": file.sha256} for file in inputs]
    size = sum(file.size for file in inputs)
    combined = combined_sha256(inputs)
    return [{"files": len(inputs), "bytes": size, "sha256": combined, "of": "lines of `sha256 name`"}]


def _compared(eval_set: EvalSet, outcome: SplitOutcome) -> dict[str, Any]:
    """An evaluation set, and the number of questions that it excludes."""
    excluded = _excluded_by(eval_set.name, outcome)
    return {
        "set": eval_set.name,
        "questions": len(eval_set.questions),
        "sha256": eval_set.sha256,
        "left_out": len(excluded),
        "same_text": sum(not all(match.grams for match in matches) for matches in excluded),
    }


def _excluded_by(name: str, outcome: SplitOutcome) -> list[list[OverlapMatch]]:
    """The matches with one evaluation set of each question that it excludes."""
    matches = ([match for match in of if match.where[0] == name] for _, of in outcome.contaminated)
    return [of for of in matches if of]


def _counts(side: str, data: SplitData, outcome: SplitOutcome) -> dict[str, int]:
    """Count the rows of a side by outcome.

    rows = unreadable_rows + repeats + questions; questions = conflicts_dropped + contaminated + train + test.
    """
    counts = data.distinct.counts
    counts["conflicts_dropped"] = sum(entry.kept is None for entry in data.distinct.questions())
    counts["contaminated"] = len(outcome.contaminated) if side == "train" else 0
    counts["train"] = len(outcome.kept["train"]) if side == "train" else 0
    dropped = sum(counts[key] for key in ("conflicts_dropped", "contaminated", "train"))
    return {**counts, "test": counts["questions"] - dropped}


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Write `card.json` and `README.md`, with the size and hash of every written file."""
    for name, facts in card["outputs"].items():
        facts |= _facts(folder / name)
    (folder / README).write_text(card_markdown(card), encoding="utf-8", newline="\n")
    card["outputs"][README] = _facts(folder / README)
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def read_card(folder: Path) -> dict[str, Any]:
    """Read the card of a prepared folder; UserError if it is missing or damaged."""
    path = folder / CARD
    try:
        card = load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "make it with proxima data prepare"
        raise UserError(f"{folder} is not prepared data (no {CARD} in it)", remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}", remedy=_REMAKE) from None
    if not isinstance(card, dict) or card.get("format") != FORMAT or not isinstance(card.get("outputs"), dict):
        raise UserError(f"{path} is not a card of format {FORMAT}", remedy=_REMAKE)
    return card


def verify_folder(folder: Path) -> dict[str, str]:
    """Compare each file of a prepared folder with its card: `same`, `altered`, `missing`, or `extra` for a table that
    the card does not list. UserError if the card is missing or damaged."""
    outputs: dict[str, Any] = read_card(folder)["outputs"]
    statuses = {}
    for name, facts in outputs.items():
        path = folder / name
        if not path.is_file():
            statuses[name] = "missing"
        elif _facts(path).items() <= facts.items():
            statuses[name] = "same"
        else:
            statuses[name] = "altered"
    extra = sorted(path.name for path in folder.glob("*.parquet") if path.name not in outputs)
    return statuses | dict.fromkeys(extra, "extra")


def _facts(path: Path) -> dict[str, Any]:
    file = inspect_file(path, path.name)
    return {"bytes": file.size, "sha256": file.sha256}


def card_markdown(card: Mapping[str, Any]) -> str:
    """Render the content of `README.md` from `card.md.j2`; its recipe names `data/<name>`."""
    import jinja2

    jinja = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    jinja.filters["thousands"] = "{:,}".format
    template = jinja.from_string(Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8"))
    tables = {"counted": _COUNTED, "lists": LISTS, "columns": COLUMNS}
    return template.render(card=card, snippet=recipe_snippet(card), **tables)


_COUNTED = {
    "rows": "rows read",
    "unreadable_rows": "without a readable answer",
    "repeats": "repeats of an earlier question",
    "questions": "distinct questions",
    "conflicts": "with several answers",
    "conflicts_dropped": "left out for that",
    "contaminated": "left out, as they meet an evaluation question",
    "train": "in train.parquet",
    "test": "in test.parquet",
}


def recipe_snippet(card: Mapping[str, Any], folder: str | None = None) -> str:
    """Return the lines of a recipe that uses the data."""
    path = folder or f"data/{card['name']}"
    lines = {
        f"task: {{kind: prepared, path: {path}}}": "train.parquet",
        f"eval: {{task: {{kind: prepared, path: {path}, split: test}}}}": "test.parquet",
        f"reward: {card['reward']}": "train.parquet",
    }
    return "\n".join(line for line, needed in lines.items() if needed in card["outputs"])
