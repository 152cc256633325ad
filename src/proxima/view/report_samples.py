"""The texts in report.html: held-out questions answered before and after, and samples of the steps."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.runtime.folder import RunFolder
from proxima.runtime.rollouts import read_rows
from proxima.view.formatting import fixed, signed

QUESTIONS = 5  # answered before and after
SAMPLED_STEPS, SAMPLED_GROUPS, SAMPLED_COMPLETIONS = 60, 2, 4
IDENTITY = ("prompt_uid", "sample", "question", "answer", "text", "correct", "reward")
CUT = 1500  # characters of a completion shown


def held_out_questions(folder: RunFolder) -> dict[str, Any] | None:
    """The first held-out questions with the first answer of the first and of the last evaluation."""
    files = sorted(folder.evals.glob("[0-9]*.parquet"))
    if not files:
        return None
    sets = [{r["prompt_uid"]: r for r in reversed(read_rows(file, IDENTITY))} for file in {files[0]: 0, files[-1]: 0}]
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
                "answer": answer_text(sets[0][uid]["answer"]),
                "answers": answers,
            }
        )
    return {"rows": rows, "of": len(sets[0]), "labels": ["before", "after"] if len(sets) == 2 else ["answer"]}


def select_samples(folder: RunFolder) -> tuple[list[int], list[list[dict[str, Any]]], list[str]]:
    """Steps spread evenly over the run, the completions of `select_groups` for each, and the unreadable files."""
    files = sorted(folder.rollouts.glob("[0-9]*.parquet"))
    n = min(SAMPLED_STEPS, len(files))
    selected = sorted({files[round(i * (len(files) - 1) / max(n - 1, 1))] for i in range(n)})
    steps, samples, unreadable = [], [], []
    for file in selected:
        try:
            rows = read_rows(file, (*IDENTITY, "parts", "error", "advantage", "outcome"))
        except ValueError:
            unreadable.append(file.name)
            continue
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["prompt_uid"], []).append(row)
        steps.append(int(file.stem))
        samples.append([_sample(group) for group in select_groups(list(groups.values()))])
    return steps, samples, unreadable


def select_groups(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sequence[Mapping[str, Any]]]:
    """Groups with a failed score first, then those trained on, then the others; each in the order of the prompts."""

    def rank(group: Sequence[Mapping[str, Any]]) -> int:
        if any(row["error"] is not None for row in group):
            return 0
        return 1 if any(row["outcome"] == "trained" for row in group) else 2

    return sorted(groups, key=rank)[:SAMPLED_GROUPS]


def representative(group: Sequence[Mapping[str, Any]], most: int = SAMPLED_COMPLETIONS) -> list[Mapping[str, Any]]:
    """A failed completion of a group, then by reward the best, the worst, and some in between.

    Equal ones (same reward and text) only fill up.
    """
    failed = [row for row in group if row["reward"] is None]
    scored = sorted(
        (row for row in group if row["reward"] is not None), key=lambda row: (-row["reward"], row["sample"])
    )
    room = most - min(len(failed), 1) if scored else 0
    unique = list({(row["reward"], row["text"]): row for row in reversed(scored)}.values())[::-1]
    others = [row for row in scored if not any(row is other for other in unique)]
    pool = sorted([*unique, *others[: max(0, room - len(unique))]], key=lambda row: (-row["reward"], row["sample"]))
    room = min(room, len(pool))
    spread = [pool[round(i * (len(pool) - 1) / max(room - 1, 1))] for i in range(room)]
    return [*failed[: most - len(spread)], *spread]


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
        for row in representative(group)
    ]
    return {
        "question": cut(group[0]["question"]),
        "answer": answer_text(group[0]["answer"]),
        "completions": completions,
        "of": len(group),
    }


def answer_text(answer: Any) -> str:
    """An expected answer: a string as it is, anything else as JSON."""
    return "" if answer is None else cut(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))


def cut(text: str) -> str:
    return text if len(text) <= CUT else text[:CUT] + " …"


def first_errors(folder: RunFolder, most: int = 3) -> list[tuple[str, int]]:
    """The commonest reasons of failed scores, with their counts, in the latest readable rollouts that have any."""
    for file in sorted(folder.rollouts.glob("[0-9]*.parquet"), reverse=True)[:SAMPLED_STEPS]:
        try:
            reasons = Counter(cut(row["error"])[:200] for row in read_rows(file, ("error",)) if row["error"])
        except ValueError:
            continue
        if reasons:
            return reasons.most_common(most)
    return []
