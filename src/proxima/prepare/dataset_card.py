"""The card of a prepared folder: where it came from, what became of every row, and the hashes by which anyone can check
it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.data import UserError
from proxima.prepare.catalog import Part
from proxima.prepare.locate import CARD, SourceFiles
from proxima.prepare.prompt_template import Template
from proxima.prepare.read_files import InputFile
from proxima.prepare.write_files import COLUMNS

if TYPE_CHECKING:
    from proxima.prepare.decontaminate import EvalSet, OverlapIndex
    from proxima.prepare.deduplicate import RowCounts
    from proxima.prepare.pipeline import PrepareOptions, _ExclusionLists

FORMAT = 1
README = "README.md"
_LISTED_INPUTS = 64  # beyond, files of a side are one line with a hash over theirs
_SHOWN_PHRASES = 10
_READ_BY = {
    "boxed": "math",
    "think_answer": "regex",
}  # templates that ask for another form than the part's own reward reads
LISTS = {
    "conflicts.jsonl": "questions with more than one answer, and what was kept",
    "contaminated.jsonl": "training questions left out because they meet an evaluation question: the set, the row, "
    "the shared run of words",
    "unreadable.jsonl": "rows without a question or a readable answer, each with the reason",
}


def build_card(
    part: Part,
    origin: SourceFiles,
    template: Template,
    options: "PrepareOptions",
    held_out: float | None,
    command: str,
    *,
    inputs: Mapping[str, Sequence[InputFile]],
    tallies: Mapping[str, "RowCounts"],
    against: Sequence["EvalSet"],
    overlap: "OverlapIndex",
    left_out: "_ExclusionLists",
    files: Mapping[str, int],
) -> dict[str, Any]:
    """The card, without the hashes of what is written (`write_card` adds them). It holds no date, and no path but those
    that were given."""
    import pyarrow

    from proxima import __version__

    phrases = overlap.phrases
    return {
        "format": FORMAT,
        "name": part.name,
        "title": part.title,
        "source": {"kind": origin.kind, "name": origin.name, "revision": origin.revision, "license": origin.license},
        "inputs": {side: _input_lines(found) for side, found in inputs.items()},
        "counts": {side: _counts(side, tally, left_out, files) for side, tally in tallies.items()},
        "repetition": {
            side: {str(times): n for times, n in sorted(t.repetition.items())} for side, t in tallies.items()
        },
        "answer": part.answer,
        "reward": _READ_BY.get(template.name, part.reward),
        "prompt": {"template": template.name, "text": template.text, "system": template.system},
        "conflicts": options.conflicts,
        "max_unreadable": options.max_unreadable,
        "split": {"held_out": held_out},
        "overlap": {
            "words": options.words,
            "common": options.common,
            "against": [
                {
                    "set": known.name,
                    "questions": len(known.questions),
                    "sha256": known.sha256,
                    "left_out": left_out.dropped.get(known.name, 0),
                    "same_text": left_out.same.get(known.name, 0),
                }
                for known in against
            ],
            "phrases_ignored": len(phrases),
            "phrases": [{"run": run, "questions": count} for run, count in phrases[:_SHOWN_PHRASES]],
        },
        "outputs": {name: {"rows": rows} for name, rows in files.items()},
        "command": command,
        "versions": {"proxima": __version__, "pyarrow": pyarrow.__version__},
    }


def _input_lines(inputs: Sequence[InputFile]) -> list[dict[str, Any]]:
    if len(inputs) <= _LISTED_INPUTS:
        return [{"file": one.name, "bytes": one.size, "sha256": one.sha256} for one in inputs]
    lines = "".join(f"{one.sha256} {one.name}\n" for one in inputs)
    combined = hashlib.sha256(lines.encode()).hexdigest()
    return [
        {
            "files": len(inputs),
            "bytes": sum(one.size for one in inputs),
            "sha256": combined,
            "of": "lines of `sha256 name`",
        }
    ]


def _counts(side: str, tally: "RowCounts", left_out: "_ExclusionLists", files: Mapping[str, int]) -> dict[str, int]:
    """What became of the rows of a side.

    rows = unreadable_rows + repeats + questions; questions = conflicts_dropped + contaminated + train + test.
    """
    counts = {
        "rows": tally.rows,
        "unreadable_rows": tally.unreadable_rows,
        "unreadable": tally.unreadable,
        "repeats": tally.repeats,
        "questions": tally.questions,
        "conflicts": tally.conflicts,
        "conflicts_dropped": left_out.conflicts_dropped[side],
        "contaminated": left_out.contaminated_questions if side == "train" else 0,
    }
    left = counts["questions"] - counts["conflicts_dropped"] - counts["contaminated"]
    train = files.get("train.parquet", 0) if side == "train" else 0
    return {**counts, "train": train, "test": left - train}


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """`card.json` and `README.md`; fills in size and hash of every file that is there."""
    for name, facts in card["outputs"].items():
        content = _hash(folder / name)
        facts |= {"bytes": content[0], "sha256": content[1]}
    (folder / README).write_text(card_markdown(card), encoding="utf-8", newline="\n")
    card["outputs"][README] = dict(zip(("bytes", "sha256"), _hash(folder / README), strict=True))
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a prepared folder.

    Raises:
        ValueError: there is none, or it is damaged; one line with the remedy.
    """
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no prepared data (no {CARD} in it); make it with proxima data prepare") from None
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} can't be read: {problem}; make it anew: proxima data prepare … --overwrite") from None
    if not isinstance(card, dict) or card.get("format") != FORMAT or not isinstance(card.get("outputs"), dict):
        raise UserError(f"{path} is no card of format {FORMAT}; make it anew: proxima data prepare … --overwrite")
    return card


@dataclass(frozen=True)
class FileStatus:
    """A file against its card: `same`, `altered`, `missing`, or `extra` (a table that the card does not know)."""

    file: str
    verdict: str


def verify_folder(folder: Path) -> list[FileStatus]:
    """Every file of a prepared folder against the hashes of its card.

    Raises:
        ValueError: no card, or a damaged one.
    """
    outputs: dict[str, Any] = read_card(folder)["outputs"]
    found = []
    for name, facts in outputs.items():
        path = folder / name
        same = path.is_file() and _hash(path) == (facts.get("bytes"), facts.get("sha256"))
        found.append(FileStatus(name, "same" if same else "altered" if path.is_file() else "missing"))
    extra = sorted(path.name for path in folder.glob("*.parquet") if path.name not in outputs)
    return found + [FileStatus(name, "extra") for name in extra]


def _hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return path.stat().st_size, digest.hexdigest()


def card_markdown(card: Mapping[str, Any], folder: str | None = None) -> str:
    """`README.md`; its recipe names `folder`, or `data/<name>`."""
    return "\n".join(_lines(card, folder)) + "\n"


def _lines(card: Mapping[str, Any], folder: str | None) -> Iterator[str]:
    source, prompt, overlap = card["source"], card["prompt"], card["overlap"]
    yield f"# {card['name']}\n"
    yield f"{card['title']}.\n"
    where = source["name"] + (f" at {source['revision']}" if source["revision"] else "")
    yield f"Source: {where}. License: {source['license'] or 'not known; see the source'}.\n"
    yield (
        f"Made with `{card['command']}`, proxima {card['versions']['proxima']}; the same files and options give "
        "the same bytes.\n"
    )
    yield "## What became of the rows\n"
    sides = list(card["counts"])
    yield "| | " + " | ".join(sides) + " |\n|---|" + "---:|" * len(sides)
    for key, meaning in _COUNTED.items():
        values = [card["counts"][side][key] for side in sides]
        if any(values) or key == "rows":
            yield f"| {meaning} | " + " | ".join(f"{value:,}" for value in values) + " |"
    for side in sides:
        yield f"\nRepetition, {side}: {repetition_line(card['repetition'][side])}."
    if overlap["against"]:
        run = f", or {overlap['words']} words in a row (arXiv 2005.14165, appendix C)" if overlap["words"] else ""
        yield f"\nContamination: the same normalised text{run}, against"
        yield "\n".join(
            f"- {one['set']}, {one['questions']:,} questions: {one['left_out']:,} left out, {one['same_text']:,} of "
            "them the same text"
            for one in overlap["against"]
        )
        if overlap["phrases_ignored"]:
            yield (
                f"\n{overlap['phrases_ignored']:,} runs are phrases: more than {overlap['common']} training "
                "questions hold each."
            )
    else:
        yield "\nNot compared with any evaluation set."
    yield "\n## Prompt\n"
    if prompt["system"] is not None:
        yield f"System:\n\n{_quoted(prompt['system'])}\n"
    yield f"Template `{prompt['template']}`:\n\n{_quoted(prompt['text'])}\n"
    yield "## Files\n"
    yield "| file | rows | sha256 |\n|---|---:|---|"
    for name, facts in card["outputs"].items():
        if name != README:  # which can't hold its own hash
            yield f"| {name} | {facts['rows']:,} | {facts['sha256'][:16]}… |"
    yield "".join(f"\n`{name}`: {LISTS[name]}.\n" for name in card["outputs"] if name in LISTS)
    yield "| column | meaning |\n|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items())
    yield f"\n## In a recipe\n\n```yaml\n{recipe_snippet(card, folder)}\n```"


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
    """How a recipe names the data."""
    path = folder or f"data/{card['name']}"
    trained = "train.parquet" in card["outputs"]
    asked = "test.parquet" in card["outputs"]
    lines = [f"task: {{kind: prepared, path: {path}}}"] if trained else []
    lines += [f"eval: {{task: {{kind: prepared, path: {path}, split: test}}}}"] if asked else []
    return "\n".join([*lines, f"reward: {card['reward']}"] if trained else lines)


def repetition_line(repetition: Mapping[str, int], most: int = 5) -> str:
    """`1,998 × 100, 2 × 101`: how many questions stand in how many rows, the most frequent first."""
    ranked = sorted(repetition.items(), key=lambda pair: (-pair[1], int(pair[0])))
    shown = ", ".join(f"{count:,} × {int(times):,}" for times, count in ranked[:most])
    rest = sum(count for _, count in ranked[most:])
    return (shown or "none") + (f", {rest:,} in other numbers" if rest else "")


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
