"""Means over the questions of what every answer has, whatever decides that it is right."""

import statistics
from collections.abc import Sequence

from proxima.data import Group
from proxima.evaluate.headline import CUT, PART, REWARD
from proxima.evaluate.intervals import Interval, bootstrap_mean


def mean_estimates(groups: Sequence[Group], *, seed: int = 0) -> dict[str, Interval]:
    """Means of what every answer has, with 95 % intervals: over the questions, of the mean over their samples.

    Returns: `reward/mean`; each reward before its weight and each part of its own, `reward/part/<name>`; `length/mean`,
        tokens; `truncated_fraction`. A sample without a valid score has no reward; what no sample has is left out.
        Nobody knows the range of a reward, so equal values of all questions give an interval of width 0
        (`bootstrap_mean`).
    """
    valid = [[score for score in group.scores if score.valid] for group in groups]
    parts = dict.fromkeys(part for scores in valid for score in scores for part in score.parts)
    values = {REWARD: [[score.value for score in scores] for scores in valid]}
    values |= {PART + part: [[s.parts[part] for s in scores if part in s.parts] for scores in valid] for part in parts}
    values["length/mean"] = [[float(completion.generated) for completion in group.completions] for group in groups]
    values[CUT] = [[float(completion.truncated) for completion in group.completions] for group in groups]
    means = {key: tuple(statistics.fmean(question) for question in of if question) for key, of in values.items()}
    spans = {key: (0.0, 1.0) if key == CUT else None for key in means}
    tasks = {key: (of, spans[key]) for key, of in means.items() if of}
    intervals = {task: bootstrap_mean(task[0], seed=seed, span=task[1]) for task in set(tasks.values())}  # some equal
    return {key: intervals[task] for key, task in tasks.items()}
