"""Finds questions that are trained on although they are evaluated, in tasks that read texts.

Two rows have the same question if their `question_keys` are equal; a template or a system prompt in the question makes
it another one. So a note names only what is trained on for certain, and tasks without a note may still overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from proxima.data.errors import counted
from proxima.task.held_out_part import SplitTask, question_keys
from proxima.task.protocol import MappedRows, Rows, Task, is_played

MOST_TRAINED = 20_000  # rows to train on, evenly spaced, whose questions are compared: a second


def has_texts(task: Any) -> bool:
    """True if the questions of a task are all that its rows ask: they are data, without images or episodes."""
    if is_played(task) or getattr(task, "images", None) is not None:
        return False

    parts = [source.task for source in getattr(task, "tasks", ())]  # of a mix
    if parts:
        return all(map(has_texts, parts))
    return isinstance(task, SplitTask) or hasattr(task, "path")


def notes_of_sources(names: Sequence[str], tasks: Sequence[Task], parts: Sequence[Rows]) -> tuple[str, ...]:
    """A note for each source of a mix that trains on questions that another one holds out.

    Args:
        names, tasks, parts: of the sources, and the rows of each that are trained on.
    """
    notes = []
    for holder, rows in enumerate(parts):
        held_out = set(chain.from_iterable(map(question_keys, left_out(rows)))) - {None}
        for other, others in enumerate(parts):
            if not held_out or other == holder or not has_texts(tasks[other]):
                continue
            common = sum(key in held_out for key in question_keys(others))
            if not common:
                continue
            of_rows = f"{common:,} of the {counted(len(others), 'row')} of {names[other]}"
            them = "them"
            what = f"{of_rows} ask questions that {names[holder]} holds out"
            if common == 1:
                them = "it"
                what = f"{of_rows} asks a question that {names[holder]} holds out"
            share = getattr(tasks[holder], "held_out", None)
            remedy = "the same held_out" if share is None else f"held_out={share:g}"
            notes.append(f"{what} for evaluation, and the run trains on {them}; set {remedy} in both")
    return tuple(notes)


def overlap_notes(tasks: Mapping[str, Task], opened: Mapping[str, Rows], limits: Mapping[str, int]) -> list[str]:
    """Notes on the tasks of a run, keyed by their dotted paths, with their rows.

    Args:
        tasks: `task` is trained on, the others are evaluated.
        limits: the number of first rows that are evaluated, by path; 0: all.
    """
    trained = opened.get("task")
    if trained is None:
        return []

    notes = [f"task: {note}" for note in notes_of_rows(trained)]
    if not has_texts(tasks["task"]):
        return notes
    asked = {path: rows for path, rows in opened.items() if path != "task" and _differs(tasks[path], tasks["task"])}
    if not asked:
        return notes

    numbers = range(len(trained))
    step = max(1, -(-len(trained) // MOST_TRAINED))
    keys = set(question_keys(trained, numbers[::step])) - {None}
    for path, rows in asked.items():
        count = min(limits[path] or len(rows), len(rows))
        common = sum(key in keys for key in question_keys(rows, range(count)))
        if common:
            least = "at least " if step > 1 else ""
            verb = "is" if common == 1 else "are"
            what = f"{path}: {least}{common:,} of its {counted(count, 'question')} {verb} trained on too"
            notes.append(f"{what}; name other questions, or leave eval.task out and set task.held_out=0.1")
    return notes


def _differs(asked: Any, trained: Any) -> bool:
    """True for tasks whose fields alone don't tell what they have in common: `evaluation_is_held_out` compares those,
    and a mix the parts of its own sources."""
    if not has_texts(asked) or asked == trained:
        return False
    if hasattr(asked, "part") and replace(asked, part="train") == trained:
        return False
    return not (isinstance(asked, SplitTask) and asked.shares_data(trained))


def left_out(rows: Rows) -> tuple[Rows, ...]:
    """The rows that are held out from these; see `MappedRows.left_out`."""
    return rows.left_out if isinstance(rows, MappedRows) else ()


def notes_of_rows(rows: Rows) -> tuple[str, ...]:
    """See `MappedRows.notes`."""
    return rows.notes if isinstance(rows, MappedRows) else ()
