"""KL in the reward and epochs that stop, in whole runs: stored columns, kinds of advantages, resumes."""

import numpy as np
import pytest

from proxima.runtime.state.folder import RunFolder
from proxima.training.checkpoint import checkpoints
from proxima.view.log_lines import LogFile
from tests.runtime.runs import shaped
from tests.runtime.tiny_run import go, recipe, rollouts_of, saved_in, steps_of

pytestmark = pytest.mark.slow


def shaped_recipe(model, advantage="grpo", **changes):
    return recipe(model, **shaped() | {"algorithm__advantage": advantage} | changes)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "rloo"])
def test_the_divergence_is_paid_for(tiny_model, tmp_path, advantage):
    """From the second step on, policy and reference differ; the column holds what the advantage is computed from."""
    go(tmp_path / "run", shaped_recipe(tiny_model("llama"), advantage, train__steps=2))
    first, second = steps_of(tmp_path / "run")
    assert first["reward_kl/mean"] == pytest.approx(0, abs=1e-4) and abs(second["reward_kl/mean"]) > 1e-3
    assert first["reward_kl/coefficient"] == second["reward_kl/coefficient"] == 0.5
    rows = rollouts_of(tmp_path / "run", 2)
    assert {row["outcome"] for row in rows} == {"trained"}
    paid = [row["reward"] - sum(row["token_reward"]) for row in rows]
    assert np.mean(paid) == pytest.approx(second["reward_kl/paid"], abs=1e-6) and min(map(abs, paid)) > 1e-4
    kl = [(row["reward"] - sum(row["token_reward"])) / 0.5 / len(row["tokens"]) for row in rows]
    assert np.mean(kl) == pytest.approx(second["reward_kl/mean"], abs=1e-6)
    if advantage == "reinforce_pp":
        returns = [np.cumsum(row["token_reward"][::-1])[::-1] for row in rows]
        every = np.concatenate(returns)
        for row, own in zip(rows, returns, strict=True):
            whitened = (own - every.mean()) / every.std(ddof=1)
            assert (row["token_advantage"] or [row["advantage"]]) == pytest.approx(whitened, abs=1e-4)
        return
    for uid in {row["prompt_uid"] for row in rows}:  # the baseline is of the sums
        group = [row for row in rows if row["prompt_uid"] == uid]
        total = np.array([sum(row["token_reward"]) for row in group])
        expected = (total - total.mean()) * len(group) / (len(group) - 1)
        assert [row["advantage"] for row in group] == pytest.approx(expected.tolist(), abs=1e-5)


def test_uniform_groups_are_those_of_the_scores(tiny_model, tmp_path):
    """Their sums differ by the KL, which alone is nothing to learn from; a selection never sees it."""
    even = {"kind": "tests.runtime.tiny_run:Even", "constant": 2}
    changes = {"algorithm__selection": [{"kind": "drop_uniform_groups", "metric": "reward"}], "reward": [even]}
    go(tmp_path / "run", shaped_recipe(tiny_model("llama"), train__steps=2, **changes))
    rows = rollouts_of(tmp_path / "run", 2)
    assert {row["outcome"] for row in rows if row["prompt_uid"] % 2 == 0} == {"dropped_uniform_group"}
    assert "trained" in {row["outcome"] for row in rows}


@pytest.mark.parametrize("updates", [1, 2])
def test_recomputed_log_probs_are_the_old_policy(tiny_model, tmp_path, updates):
    """With `proximal: recompute`, the policy of the first step is the reference, whatever the engine says."""
    tree = shaped_recipe(tiny_model("llama"), algorithm__proximal="recompute", algorithm__behavior="untruncated")
    tree["train"] |= {"steps": 1, "updates_per_step": updates}
    tree["engine"]["dtype"] = "bfloat16"
    go(tmp_path / "run", tree)
    (first,) = steps_of(tmp_path / "run")
    assert first["reward_kl/mean"] == first["reward_kl/paid"] == 0 and first["mismatch/k3_kl"] > 0


def test_an_adaptive_coefficient(runs):
    run = RunFolder(runs.finished("adaptive KL"))
    beta = 0.5
    for record in steps_of(run.path):
        assert record["reward_kl/coefficient"] == pytest.approx(beta)
        beta *= 1 + min(max(record["reward_kl/mean"] / 1e-3 - 1, -0.2), 0.2) * 16 / 32
    assert beta != 0.5
    last = checkpoints(run.checkpoints)[-1]
    assert last.facts["kl_coefficient"] == pytest.approx(beta)


def test_epochs_that_stop(runs, tmp_path):
    """Where it stopped stands in record and log; the learning rate is that of a run without a target."""
    runs.go("epochs that stop", tmp_path / "free", train__target_kl=1e6, train__steps=2)
    runs.go("epochs that stop", tmp_path / "run", train__steps=2, observer=LogFile())
    records, every = steps_of(tmp_path / "run"), steps_of(tmp_path / "free")
    stopped = [record for record in records if record["early_stop/stopped"]]
    assert stopped and all(record["early_stop/kl"] > 1.5e-4 for record in stopped)
    assert all(record["updates"] == 2 * record["early_stop/epochs"] < 6 for record in stopped)
    assert all((record["updates"], record["early_stop/epochs"]) == (6, 3) for record in every)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("stopped after epoch") == len(stopped)
    facts = [saved_in(tmp_path / name)[-1].facts for name in ("run", "free")]
    assert [saved["trainer"]["updates"] for saved in facts] == [12, 12]
