"""The texts in report.html: held-out questions answered before and after, and samples of the steps."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.system.damage import reading
from proxima.view.episode_lines import shown_messages
from proxima.view.formatting import fixed, shortened, signed
from proxima.view.microscope.single_file import thumbnails

QUESTIONS = 5  # answered before and after
SAMPLED_STEPS = 20
SAMPLED_GROUPS = 2  # of a step
SAMPLED_COMPLETIONS = 4  # of a group
IDENTITY = ("prompt_uid", "sample", "turn", "question", "answer", "text", "correct", "reward")
Item = TypeVar("Item")
CUT = 1500  # characters of a completion shown
IMAGES = 4  # of a question shown
SIDE = 160  # pixels of one
VERDICTS = {True: "right", False: "wrong", None: ""}


def held_out_questions(folder: RunFolder) -> dict[str, Any] | None:
    """Return held-out questions with the first answer in the first and in the last evaluation, changed ones first:
    three gained, two lost. The change is in the verdict, or in the reward if no reward decides correctness."""
    files = folder.eval_files()
    if not files:
        return None
    sets = []  # the first and the last evaluation, or the only one
    for file in dict.fromkeys([files[0], files[-1]]):
        answers = _rows(file, (*IDENTITY, "error"))
        sets.append({row["prompt_uid"]: row for row in reversed(answers)})
    every_row = list(chain.from_iterable(answers.values() for answers in sets))
    judged = any(row["correct"] is not None for row in every_row)
    scored = any(map(_scored, every_row))
    measure = "correct" if judged else "reward"
    changes = {uid: _change([answers[uid][measure] for answers in sets if uid in answers]) for uid in sorted(sets[0])}
    gained = sorted((uid for uid, change in changes.items() if change > 0), key=lambda uid: -changes[uid])
    lost = sorted((uid for uid, change in changes.items() if change < 0), key=lambda uid: changes[uid])
    shown = dict.fromkeys([*gained[:3], *lost[:2], *gained, *lost, *changes])
    rows = [
        {
            "question": cut(sets[0][uid]["question"]),
            "answer": answer_text(sets[0][uid]["answer"]),
            "answers": [_answer(answers[uid], judged) for answers in sets if uid in answers],
            "images": _images(folder.path, sets[0][uid].get("images") or ()),
        }
        for uid in list(shown)[:QUESTIONS]
    ]
    labels = ["before", "after"] if len(sets) == 2 else ["answer"]
    summary = _changes_text(len(gained), len(lost), judged)
    if not scored:
        summary = "Greedy completions, before training and of the last evaluation; they are not scored."
    return {"rows": rows, "of": len(changes), "labels": labels, "changes": summary}


def _changes_text(gained: int, lost: int, judged: bool) -> str:
    """How many questions changed, in their verdict or in their reward."""
    if not gained and not lost:
        what = "verdict" if judged else "reward"
        return f"No {what} of a question changed."
    if judged:
        return f"{gained} became right and {lost} became wrong; these come first."
    return f"{gained} have a higher reward and {lost} have a lower one; these come first."


def _change(values: Sequence[float | None]) -> float:
    """Return the last value minus the first; 0 if one is unknown."""
    if values[0] is None or values[-1] is None:
        return 0.0
    return values[-1] - values[0]


def _scored(row: Mapping[str, Any]) -> bool:
    """Return True if a reward was computed for the row; a failed one has left an error."""
    return row["reward"] is not None or row["error"] is not None


def _answer(row: Mapping[str, Any], judged: bool) -> dict[str, Any]:
    """Return an answer with its verdict or its reward."""
    verdict = VERDICTS[row["correct"]]
    if row["reward"] is None:
        verdict = ""
        mark = "no score" if _scored(row) else ""
    elif judged:
        mark = verdict or "not judged"
    else:
        mark = f"reward {fixed(row['reward'], 3)}"
    return {"text": cut(row["text"]), "turns": _turns(row), "verdict": verdict, "mark": mark}


def select_samples(folder: RunFolder) -> tuple[list[tuple[int, list[dict[str, Any]]]], list[str]]:
    """Return steps spread evenly over the run, each with samples of two groups, one with a failed score, if any, and
    those with the best answers; and the unreadable files."""
    samples: list[tuple[int, list[dict[str, Any]]]] = []
    unreadable: list[str] = []
    files = sorted(folder.rollouts.glob("[0-9]*.parquet"))
    for file in _spread(files, SAMPLED_STEPS):
        try:
            with reading(file):
                samples.append((int(file.stem), _step_samples(file, folder)))
        except (FileNotFoundError, UserError):
            unreadable.append(file.name)
    return samples, unreadable


def _step_samples(file: Path, folder: RunFolder) -> list[dict[str, Any]]:
    rows = _rows(file, (*IDENTITY, "parts", "error", "advantage", "outcome"))
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompt_uid"], []).append(row)
    best_first = sorted(groups, key=lambda uid: -_best_reward(groups[uid]))
    failed = [uid for uid in groups if any(row["error"] is not None for row in groups[uid])]
    shown = list(dict.fromkeys([*failed[:1], *best_first]))[:SAMPLED_GROUPS]
    return [_sample(groups[uid], folder.path) for uid in shown]


def _best_reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return max((row["reward"] for row in rows if row["reward"] is not None), default=-inf)


def _rows(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read one row per sample, that of its last path, with its episode and its images if any. ValueError if the file is
    torn."""
    rows = read_rows(file, columns)
    names = pq.read_schema(file).names
    more = [name for name in ("episode", "images") if name in names]
    if more:
        rows = [row | of for row, of in zip(rows, read_rows(file, more), strict=True)]
    last_of_each = {(row["prompt_uid"], row["sample"]): row for row in rows}
    return list(last_of_each.values())


def representative(group: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Select completions of a group, evenly spaced from a failed one or the best one to the worst one."""
    best_first = sorted(group, key=lambda row: (row["reward"] is not None, -(row["reward"] or 0.0)))
    return _spread(best_first, SAMPLED_COMPLETIONS)


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, evenly spaced from the first to the last."""
    n = min(most, len(items))
    return [items[round(i * (len(items) - 1) / max(n - 1, 1))] for i in range(n)]


def _sample(group: Sequence[Mapping[str, Any]], run: Path) -> dict[str, Any]:
    first = group[0]
    return {
        "uid": first["prompt_uid"],
        "question": cut(first["question"]),
        "answer": answer_text(first["answer"]),
        "images": _images(run, first.get("images") or ()),
        "completions": list(map(_completion, representative(group))),
        "of": len(group),
    }


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    reward = "invalid" if row["reward"] is None else fixed(row["reward"])
    return {
        "name": f"{row['prompt_uid']}.{row['sample']}.{row['turn']}",
        "text": cut(row["text"]),
        "turns": _turns(row),
        "reward": reward,
        "mark": VERDICTS[row["correct"]],
        "parts": "  ".join(f"{name} {fixed(value)}" for name, value in row["parts"].items()),
        "note": row["error"] or _outcome(row),
    }


def _images(run: Path, numbers: Sequence[int]) -> list[str]:
    """Addresses of the first of a question's images."""
    if not numbers:
        return []

    return [address for address in thumbnails(run, numbers[:IMAGES], SIDE) if address]


def _turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of an episode; empty without one."""
    if row.get("episode") is None:
        return []

    return shown_messages(row["episode"])


def _outcome(row: Mapping[str, Any]) -> str:
    """`trained, advantage +0.25`."""
    outcome = row["outcome"].replace("_", " ")
    if row["advantage"]:
        return f"{outcome}, advantage {signed(row['advantage'], 2)}"
    return str(outcome)


def answer_text(answer: object) -> str:
    """Format an expected answer: a string unchanged, anything else as JSON."""
    if answer is None:
        return ""
    if not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False)
    return cut(answer)


def cut(text: str) -> str:
    return shortened(text, CUT)
