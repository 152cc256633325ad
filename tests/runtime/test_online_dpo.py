"""Online DPO: of each prompt's completions the best and the worst are a pair, in the loop of RL."""

import numpy as np
import pytest
import torch

from proxima.core.preference import Sigmoid
from proxima.data import PreferencePair, Trajectory
from proxima.model import Policy
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.train import PreferenceObjective, TrainStack
from proxima.train.learner import best_against_worst, update_on_pairs
from tests.model.rows import loaded
from tests.runtime.interruptions import Died, die_at
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, traces


def trajectory(group, sample, advantage, length=3):
    return Trajectory(
        uid=group, sample=sample, group=group, prompt_tokens=[5, group + 6], tokens=range(9, 9 + length),
        advantage=np.asarray(advantage, np.float32), reference_log_prob=np.full(length, -2.0, np.float32),
    )  # fmt: skip


ITEMS = [trajectory(0, 1, -0.5), trajectory(0, 3, 0.5, 5), trajectory(1, 0, 0.75), trajectory(1, 2, -0.25, 4)]


def test_the_larger_advantage_is_chosen():
    pairs = best_against_worst(ITEMS)
    assert list(pairs) == [(1, 0), (2, 3)]
    assert [(pair.chosen.sample, pair.rejected.sample) for pair in pairs.values()] == [(3, 1), (0, 2)]


@pytest.mark.parametrize("items", [ITEMS[:3], [ITEMS[0], trajectory(0, 2, -0.5)]])
def test_what_is_no_pair_is_refused(items):
    with pytest.raises(ValueError, match=r"group [01] has [12] completions with advantages \[.*select with best_and_w"):
        best_against_worst(items)


def test_an_update_on_pairs_is_that_of_the_preference_objective():
    def stack():
        return TrainStack(Policy(loaded("llama")))

    objective = PreferenceObjective(terms=[Sigmoid(beta=0.5)])
    ours, plain = stack(), stack()
    result = update_on_pairs(ours, objective, ITEMS, [(0, 1), (2, 3)], lambda done, total: None, 2)
    pairs = [PreferencePair(row=g, chosen=c, rejected=r) for g, c, r in ((0, ITEMS[1], ITEMS[0]), (1, *ITEMS[2:]))]
    expected = plain.update(objective, [(0,), (1,)], pairs)
    assert result.metrics == expected.metrics and result.updates == 2
    for a, b in zip(ours.parameters, plain.parameters, strict=True):
        assert torch.equal(a, b)
    fresh = stack().log_prob(ITEMS[:2])
    for i in range(2):
        np.testing.assert_allclose(result.token_statistics[i].log_prob, fresh[i], atol=1e-5)
    assert [len(result.token_statistics[i].keep) for i in range(4)] == [3, 5, 3, 4]


def tree(model, **changes):
    return recipe(model, **{"algorithm": {"preset": "online_dpo"}, "eval__every": 1} | changes)


@pytest.fixture(scope="module")
def unbroken(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("online") / "run"
    watcher = Watcher()
    assert go(folder, tree(tiny_model("llama"), reward=REWARD), observer=watcher).status == "done"
    return folder, watcher


REWARD = [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}]  # every third prompt is a tie


def test_a_run_trains_on_the_best_and_the_worst_of_each_prompt(unbroken):
    folder, watcher = unbroken
    records = [r for r in watcher.records if r["kind"] == "train"]
    assert len(records) == 3
    for record in records:
        rows = read_rows(RunFolder(folder).rollout_file(record["step"]))
        groups = {uid: [row for row in rows if row["prompt_uid"] == uid] for uid in {row["prompt_uid"] for row in rows}}
        trained = [row for row in rows if row["outcome"] == "trained"]
        ties = [uid for uid, group in groups.items() if len({row["reward"] for row in group}) == 1]
        assert len(trained) == 2 * (len(groups) - len(ties)) and record["dropped/uniform_group"] == 4 * len(ties)
        for uid in groups.keys() - set(ties):
            values = sorted(row["reward"] for row in groups[uid])
            assert sorted(row["reward"] for row in trained if row["prompt_uid"] == uid) == [values[0], values[-1]]
    assert any(record["dropped/uniform_group"] for record in records)
    first = records[0]  # the policy is the reference: no pair has a margin
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5) and first["rewards/margins"] == pytest.approx(
        0, abs=1e-5
    )
    assert records[-1]["rewards/margins"] != 0 and records[-1]["mismatch/k3_kl"] >= 0


def test_a_killed_run_resumes_to_the_bit(unbroken, tiny_model, tmp_path):
    run = tree(tiny_model("llama"), reward=REWARD)
    with pytest.raises(Died):
        go(tmp_path / "run", run, observer=die_at("step", lambda record, sample: record["step"] == 2))
    assert go(tmp_path / "run", run, resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), traces(unbroken[0]))
