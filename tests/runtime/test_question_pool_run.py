"""A run with a pool of questions: what it asks, stores and trains on, and what a replay of it trains on."""

from dataclasses import replace

import numpy as np
import pytest

from proxima.runtime.state.pending_files import read_groups
from proxima.runtime.state.stored_completions import stored_groups
from proxima.training.checkpoint import CARRIED_GROUPS
from tests.runtime.tiny_run import Even, rollouts_of, saved_in, steps_of

pytestmark = pytest.mark.slow


class Later(Even):
    """A third of nine questions have uniform groups, in the first two epochs."""

    kind = "later"

    def score_one(self, prompt, completion):
        score = super().score_one(prompt, completion)
        return replace(score, value=0.25) if prompt.uid % 3 == 0 and prompt.uid < 18 else score


def counted(folder, name):
    return sum(record[name] for record in steps_of(folder))


def test_questions_that_teach_nothing_are_asked_less_often(runs, tmp_path):
    """Three of nine questions have uniform groups, in every epoch."""
    pooled, plain = runs.finished("pooled questions"), tmp_path / "plain"
    runs.go("pooled questions", plain, algorithm__question_pool=None)
    costs = [counted(folder, "prompts_generated") / counted(folder, "prompts_used") for folder in (pooled, plain)]
    assert costs[0] < costs[1] and counted(pooled, "prompts_used") == counted(plain, "prompts_used")
    uniform = [counted(folder, "prompts_dropped_uniform") for folder in (pooled, plain)]
    assert uniform[0] < uniform[1]
    for record in steps_of(pooled):
        judged = record["prompts_used"] + record["prompts_dropped_uniform"]
        assert record["prompts_useful_fraction"] == pytest.approx(record["prompts_used"] / judged)
        ratio = record["prompts_generated"] / record["prompts_used"]
        assert record["prompts_generated_per_used"] == pytest.approx(ratio)
    assert steps_of(pooled)[-1]["pool/rows_below_one"] == 3
    assert min(record["pool/asked_fraction"] for record in steps_of(pooled)) < 1
    assert "pool/asked_fraction" not in steps_of(plain)[0]


def test_a_weight_is_stored_and_multiplies_the_advantages(runs, tmp_path):
    """In this world the questions that are asked less often become useful after two epochs."""
    folder = tmp_path / "run"
    reward = [{"kind": "tests.runtime.test_question_pool_run:Later"}]
    runs.go("pooled questions", folder, reward=reward, train__steps=9)
    weights = []
    for step in range(1, 10):
        rows = rollouts_of(folder, step)
        for row in rows:
            weight = row.get("question_weight") or 1.0
            if row["outcome"] == "trained":
                group = [r["reward"] for r in rows if r["prompt_uid"] == row["prompt_uid"]]
                centred = row["reward"] - np.mean(group)
                assert row["advantage"] == pytest.approx(weight * centred, rel=1e-5)
                weights.append(weight)
        used, dropped = stored_groups(folder / f"rollouts/{step:06}.parquet")
        stored = {group.prompt.uid: group.prompt.weight for group in (*used, *(group for group, _ in dropped))}
        assert stored == {row["prompt_uid"]: row.get("question_weight") or 1.0 for row in rows}
    assert set(weights) > {1.0} and max(weights) <= 4

    replay = {"rollouts": str(folder), "algorithm__question_pool": None, "algorithm__dynamic_sampling": None}
    runs.go("pooled questions", tmp_path / "replay", train__steps=9, **replay)
    for step in (1, 9):
        assert [row["advantage"] for row in rollouts_of(tmp_path / "replay", step)] == [
            row["advantage"] for row in rollouts_of(folder, step)
        ]


def test_what_a_checkpoint_holds_keeps_its_weights(runs):
    state = [checkpoint.facts["cursor"]["pool"] for checkpoint in saved_in(runs.finished("pooled questions"))]
    counts = dict(zip(state[-1]["rows"], state[-1]["counts"], strict=True))
    assert sorted(counts) == list(range(9))
    for row, (_, _, useful, uniform) in counts.items():
        assert (useful == 0) == (row % 3 == 0) and (uniform == 0) == (row % 3 != 0)
    for checkpoint in saved_in(runs.finished("pooled questions")):
        groups = read_groups(checkpoint.path / CARRIED_GROUPS)
        assert all(group.prompt.weight >= 1 for group in groups)
