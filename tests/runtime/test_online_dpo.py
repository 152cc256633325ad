"""Online DPO: of each prompt's completions the best and the worst are a pair, in the loop of RL."""

import numpy as np
import pytest

from tests.runtime.tiny_run import rollouts_of, steps_of


@pytest.mark.slow
def test_a_run_trains_on_the_best_and_the_worst_of_each_prompt(runs):
    folder = runs.finished("online pairs")
    records = steps_of(folder)
    assert len(records) == 3
    for record in records:
        rows = rollouts_of(folder, record["step"])
        groups = {uid: [row for row in rows if row["prompt_uid"] == uid] for uid in {row["prompt_uid"] for row in rows}}
        trained = [row for row in rows if row["outcome"] == "trained"]
        ties = [uid for uid, group in groups.items() if len({row["reward"] for row in group}) == 1]
        assert len(trained) == 2 * (len(groups) - len(ties)) and record["dropped/uniform_group"] == 4 * len(ties)
        for uid in groups.keys() - set(ties):
            values = sorted(row["reward"] for row in groups[uid])
            assert sorted(row["reward"] for row in trained if row["prompt_uid"] == uid) == [values[0], values[-1]]
    assert any(record["dropped/uniform_group"] for record in records)
    first = records[0]  # the policy is the reference: no pair has a margin
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert records[-1]["rewards/margins"] != 0 and records[-1]["mismatch/k3_kl"] >= 0
