"""Means over the questions of figures that every answer has, independent of how correctness is decided."""

import statistics
from collections.abc import Sequence

from proxima.data.flow import Group
from proxima.evaluation.headline import CUT, REWARD
from proxima.evaluation.intervals import PART, Interval, bootstrap_mean


def mean_estimates(groups: Sequence[Group], *, seed: int = 0) -> dict[str, Interval]:
    """Average figures that every answer has over samples, then over questions, with 95 % intervals.

    Returns: `reward/mean`; each reward before its weight and each part of it, `reward/part/<name>`; `length/mean`,
        tokens; `truncated_fraction`. A sample without a valid score has no reward; figures that no sample has are left
        out. The range of a reward is unknown, so equal values for all questions give an interval of width 0
        (`bootstrap_mean`).
    """
    valid = [[score for score in group.scores if score.valid] for group in groups]
    parts = dict.fromkeys(part for scores in valid for score in scores for part in score.parts)
    values = {REWARD: [[score.value for score in scores] for scores in valid]}
    values |= {PART + part: [[s.parts[part] for s in scores if part in s.parts] for scores in valid] for part in parts}
    values["length/mean"] = [[float(completion.generated) for completion in group.completions] for group in groups]
    values[CUT] = [[float(completion.truncated) for completion in group.completions] for group in groups]
    means = {key: tuple(statistics.fmean(question) for question in of if question) for key, of in values.items()}
    tasks = {key: (of, (0.0, 1.0) if key == CUT else None) for key, of in means.items() if of}
    intervals = {task: bootstrap_mean(task[0], seed=seed, span=task[1]) for task in set(tasks.values())}  # some equal
    return {key: intervals[task] for key, task in tasks.items()}
