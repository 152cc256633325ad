"""Statistics and files of an evaluation: what a count of right answers says about a model, and how two models compare.

    estimators.py      mean@k, pass@k, maj@k of one question, exact
    intervals.py       Wilson, paired score, BCa bootstrap over questions; ratios.py: a ratio of sums
    paired.py          McNemar, sign flips, difference with its interval
    votes.py           the answer that a text votes for
    headline.py        the figure that represents an evaluation
    plateau.py         ends a run that no longer improves
    answer_means.py    means of rewards, lengths and cut answers
    group_metrics.py   scored groups → every metric of an evaluation
    pair_metrics.py    pairs with scores; preference_metrics.py: with implicit rewards
    results.py         the folder of an evaluation: writing and reading
    question_pairs.py  two results compared question by question
    suites.py          GSM8K, MATH-500, AIME, AMC: data, prompt, rewards
    question_sets.py   the sets of an evaluation, before weights are loaded; held_out.py: the same of a run
    eval_run.py        a model answers them, and the result is written; eval_observer.py: what it reports
A failed scorer never counts as a wrong answer, and every
random draw is counter-based, so the same answers give the same metrics to the last bit.
Imports: numpy, pyarrow, stdlib, `data`, `model`, `engine`, `task`, `reward`, `environment` and `rollout`.
Imported by `train` and the rooms above.
To add a suite: an entry in `SUITES` with its source, and its name in `docs/evaluation.md`. To add a metric: a function
of one question in `estimators.py` with formula and source, an entry in `group_metrics.py`, and an exhaustive
enumeration in `tests/evaluation`.
"""
