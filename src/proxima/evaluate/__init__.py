"""Evaluation as mathematics and files: what a number of right answers says about a model, and how two models compare.

    estimators.py   mean@k, pass@k, maj@k of one question, exactly        votes.py     the answer that a text votes for
    intervals.py    Wilson, paired score, BCa bootstrap over questions
    figures.py   scored groups → every figure of an evaluation
    paired.py       McNemar, sign flips, difference with its interval
    results.py   the folder of an evaluation, read back
    suites.py       GSM8K, MATH-500, AIME, AMC: data, prompt, rewards     compare.py   two of them, question by question
No model runs here: `runtime` generates and scores, and writes; this room turns scores into numbers. A failed scorer is
never a wrong answer, and every random draw is by counter, so the same answers give the same figures to the last bit.
Imports: numpy, pyarrow (reading), stdlib, `data`, `task` and `reward` (the suites' specs). Imported by `runtime`,
`view`, `cli`.
To add a suite: a line in `SUITES` with its source, and its name in `docs/evaluation.md`. To add a figure: a function of
one question in `estimators.py` with its formula and source, a line in `figures.py`, and an exhaustive enumeration in
`tests/evaluate`.
"""

from proxima.evaluate.estimators import maj_at_k, mean_at_k, pass_at_k
from proxima.evaluate.figures import Question, figures, question_of
from proxima.evaluate.intervals import Interval, bootstrap_mean, paired_score, wilson
from proxima.evaluate.paired import difference, mcnemar, sign_flip
from proxima.evaluate.question_pairs import Comparison, compare
from proxima.evaluate.results import Result, read_result
from proxima.evaluate.suites import SUITES, Suite
from proxima.evaluate.votes import VOTES, canonical, vote

__all__ = [
    "SUITES",
    "VOTES",
    "Comparison",
    "Interval",
    "Question",
    "Result",
    "Suite",
    "bootstrap_mean",
    "canonical",
    "compare",
    "difference",
    "figures",
    "maj_at_k",
    "mcnemar",
    "mean_at_k",
    "paired_score",
    "pass_at_k",
    "question_of",
    "read_result",
    "sign_flip",
    "vote",
    "wilson",
]
