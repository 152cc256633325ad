"""What report.html shows of the texts: held-out questions answered before and after, and samples of the steps."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.runtime.folder import RunFolder
from proxima.runtime.rollouts import read_rows
from proxima.view.formatting import fixed, signed

QUESTIONS = 5  # answered before and after
SAMPLED_STEPS, SAMPLED_GROUPS, SAMPLED_COMPLETIONS = 60, 2, 4
CUT = 1500  # characters of a completion shown


def questions(folder: RunFolder) -> dict[str, Any] | None:
    """The first held-out questions with the first answer of the first and of the last evaluation."""
    files = sorted(folder.evals.glob("[0-9]*.parquet"))
    if not files:
        return None
    columns = ("prompt_uid", "sample", "question", "answer", "text", "correct", "reward", "valid")
    sets = [{r["prompt_uid"]: r for r in reversed(read_rows(file, columns))} for file in {files[0]: 0, files[-1]: 0}]
    rows = []
    for uid in sorted(sets[0])[:QUESTIONS]:
        answers = [
            {"text": cut(row["text"]), "mark": {True: "right", False: "wrong", None: "unscored"}[row["correct"]]}
            for row in (each.get(uid) for each in sets)
            if row is not None
        ]
        rows.append(
            {
                "question": cut(sets[0][uid]["question"]),
                "answer": plain_answer(sets[0][uid]["answer"]),
                "answers": answers,
            }
        )
    return {"rows": rows, "of": len(sets[0]), "labels": ["before", "after"] if len(sets) == 2 else ["answer"]}


def pick_samples(folder: RunFolder) -> tuple[list[int], list[list[dict[str, Any]]], list[str]]:
    """Steps spread evenly over the run, for each the completions of `picked_groups`, and the names of unreadable
    files."""
    files = sorted(folder.rollouts.glob("[0-9]*.parquet"))
    many = min(SAMPLED_STEPS, len(files))
    wanted = sorted({files[round(i * (len(files) - 1) / max(many - 1, 1))] for i in range(many)})
    columns = (
        "prompt_uid",
        "sample",
        "question",
        "answer",
        "text",
        "reward",
        "parts",
        "correct",
        "error",
        "advantage",
        "outcome",
    )
    steps, samples, torn = [], [], []
    for file in wanted:
        try:
            rows = read_rows(file, columns)
        except ValueError:
            torn.append(file.name)
            continue
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["prompt_uid"], []).append(row)
        steps.append(int(file.stem))
        samples.append([_sample(group) for group in picked_groups(list(groups.values()))])
    return steps, samples, torn


def picked_groups(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sequence[Mapping[str, Any]]]:
    """The groups with a failed score first, then those that were trained on, then the others; in each the order of the
    prompts."""

    def rank(group: Sequence[Mapping[str, Any]]) -> int:
        return (
            0
            if any(row["error"] is not None for row in group)
            else 1
            if any(row["outcome"] == "trained" for row in group)
            else 2
        )

    return sorted(groups, key=rank)[:SAMPLED_GROUPS]


def spread_of(group: Sequence[Mapping[str, Any]], most: int = SAMPLED_COMPLETIONS) -> list[Mapping[str, Any]]:
    """Some completions of a group that stand for all: a failed one, then by reward the best, the worst, and what lies
    between.

    Of the same reward and text only one is taken while there are others.
    """
    failed = [row for row in group if row["reward"] is None]
    scored = sorted(
        (row for row in group if row["reward"] is not None), key=lambda row: (-row["reward"], row["sample"])
    )
    room = most - min(len(failed), 1) if scored else 0
    distinct = list({(row["reward"], row["text"]): row for row in reversed(scored)}.values())[::-1]
    others = [row for row in scored if not any(row is one for one in distinct)]
    pool = sorted([*distinct, *others[: max(0, room - len(distinct))]], key=lambda row: (-row["reward"], row["sample"]))
    room = min(room, len(pool))
    chosen = [pool[round(i * (len(pool) - 1) / max(room - 1, 1))] for i in range(room)]
    return [*failed[: most - len(chosen)], *chosen]


def _sample(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    completions = [
        {
            "text": cut(row["text"]),
            "reward": "invalid" if row["reward"] is None else fixed(row["reward"], 2),
            "mark": {True: "right", False: "wrong", None: ""}[row["correct"]],
            "parts": "  ".join(f"{name} {fixed(value, 2)}" for name, value in row["parts"].items()),
            "note": row["error"]
            or (
                row["outcome"].replace("_", " ")
                + (f", advantage {signed(row['advantage'], 2)}" if row["advantage"] else "")
            ),
        }
        for row in spread_of(group)
    ]
    return {
        "question": cut(group[0]["question"]),
        "answer": plain_answer(group[0]["answer"]),
        "completions": completions,
        "of": len(group),
    }


def plain_answer(answer: Any) -> str:
    """An expected answer as a person writes it: text bare, anything else as JSON."""
    return "" if answer is None else cut(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))


def cut(text: str) -> str:
    return text if len(text) <= CUT else text[:CUT] + " …"


def first_errors(folder: RunFolder, most: int = 3) -> list[tuple[str, int]]:
    """The commonest reasons of failed scores in the last rollouts that have any, each with its count; an unreadable
    file has none."""
    for file in sorted(folder.rollouts.glob("[0-9]*.parquet"), reverse=True)[:SAMPLED_STEPS]:
        try:
            found = Counter(cut(row["error"])[:200] for row in read_rows(file, ("error",)) if row["error"])
        except ValueError:
            continue
        if found:
            return found.most_common(most)
    return []
