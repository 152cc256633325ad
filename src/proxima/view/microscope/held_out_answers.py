"""Held-out questions with their answers in the first and the last evaluation, worst first."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.evaluation.headline import ACCURACY
from proxima.evaluation.results import QuestionResult, read_completions
from proxima.runtime.state.folder import RunFolder
from proxima.view.formatting import fixed, shortened

ANSWERS, TEXT = 4, 2000  # of a question on each side; characters of an answer
ORDER = {"worse": 0, "better": 1, "same": 2, "unknown": 3}


def held_out_answers(files: RunFolder) -> dict[str, Any]:
    """Return `labels` of the evaluations, the `metric` that tells better from worse, and `rows`: each question with
    what changed (`kind`), and on each side its answers with their marks.

    Raises:
        UserError: the run has no evaluation, or a file can't be read.
    """
    rows, labels, metrics = list[dict[str, Any]](), list[str](), dict[str, None]()
    for name in ["", *files.eval_sets()]:
        ends = [*dict.fromkeys(files.eval_files(name)[i] for i in (0, -1) if files.eval_files(name))]
        sides = [read_completions(file) for file in ends]
        if not sides:
            continue
        labels = labels if len(labels) > len(ends) else [_label(file.stem) for file in ends]
        judged = any(value is not None for side in sides for q in side.values() for value in q.correct)
        metrics[metric := ACCURACY if judged else "reward"] = None
        for uid, question in sides[0].items():
            both = [side[uid] for side in sides if uid in side]
            change = _change(both, metric)
            kind = (
                "unknown" if change is None else "same" if abs(change) < 1e-12 else "worse" if change < 0 else "better"
            )
            row = {
                "uid": uid,
                "set": name,
                "question": question.question,
                "answer": load_json(question.answer),
                "kind": kind,
            }
            rows.append(row | {"change": change, "sides": [_answers(each, judged) for each in both]})
    if not rows:
        raise UserError("the run has no held-out answers: it was not evaluated, or its evals/ are gone")
    rows.sort(key=lambda row: (ORDER[row["kind"]], row["change"] or 0.0, row["set"], row["uid"]))
    return {"labels": labels, "metric": " and ".join(metrics), "rows": rows}


def _label(stem: str) -> str:
    step = int(stem.partition("-")[0])
    return f"after step {step}" if step else "before the first step"


def _change(sides: Sequence[QuestionResult], metric: str) -> float | None:
    """The mean of the last side minus that of the first; None with a single side, or without a score on one."""
    known = [[float(value) for value in side.values(metric) if value is not None] for side in sides]
    return fmean(known[-1]) - fmean(known[0]) if len(known) > 1 and all(known) else None


def _answers(question: QuestionResult, judged: bool) -> list[dict[str, str]]:
    marks = {True: "right", False: "wrong", None: "no score"}
    rewards = question.values("reward")
    return [
        {
            "mark": marks[correct] if judged else "no score" if reward is None else f"reward {fixed(reward, 3)}",
            "text": shortened(text, TEXT),
        }
        for correct, reward, text in list(zip(question.correct, rewards, question.texts, strict=True))[:ANSWERS]
    ]
