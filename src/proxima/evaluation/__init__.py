"""Statistics and files of an evaluation: estimates from counts of right answers, and comparisons of two models.

    estimators.py      mean@k, pass@k, maj@k of one question, exact
    intervals.py       Wilson, paired score, BCa bootstrap over questions, a ratio of sums
    votes.py           the answer for which a text votes
    headline.py        the figure that represents an evaluation
    plateau.py         ends a run that no longer improves
    group_metrics.py   scored groups → every metric of an evaluation
    pair_metrics.py    metrics of pairs, with scores or with implicit rewards
    eval_files.py      the names of the files of a run's evaluations
    results.py         the folder of an evaluation: writing and reading
    question_pairs.py  two results compared question by question: McNemar, sign flips, difference with its interval
    suites.py          GSM8K, MATH-500, AIME, AMC: data, prompt, rewards
    question_sets.py   the sets of an evaluation, before weights are loaded; held_out.py: the same for a run
    eval_run.py        a model answers them, and the result is written; `EvalObserver`: receives its events
A failed scorer never counts as a wrong answer, and every random draw is counter-based, so the same answers give the
same metrics to the last bit.
Imports: numpy, pyarrow, stdlib, `data`, `model`, `engine`, `task`, `reward`, `environment` and `rollout`.
Imported by `training` and the rooms above.
To add a suite: an entry in `SUITES` with its source, and its name in `docs/evaluation.md`. To add a metric: a function
of one question in `estimators.py` with formula and source, an entry in `group_metrics.py`, and an exhaustive
enumeration in `tests/evaluation`.
"""
