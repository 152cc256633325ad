"""The columns of an evaluation's completions."""

from proxima.evaluation.results import completions_table
from tests.evaluation.test_group_metrics import FAILED, RIGHT, WRONG, group


def test_a_failed_score_has_neither_verdict_nor_reward():
    table = completions_table([group(7, ("4", RIGHT), ("5", WRONG), ("6", FAILED))], 5, None).to_pylist()
    assert [row["reward"] for row in table] == [1.0, 0.0, None]
    assert [row["correct"] for row in table] == [True, False, None]
    assert [(row["valid"], row["error"]) for row in table] == [(True, None), (True, None), (False, "timed out")]
    assert {(row["row"], row["prompt_uid"], row["extracted"]) for row in table} == {(2, 7, None)}
