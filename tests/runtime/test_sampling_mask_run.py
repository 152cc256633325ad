"""Runs under top-p whose policy is compared over the tokens that could be sampled: the first ratio is 1, and only so;
masks survive files, checkpoints and replays to the bit; without `behavior: sampled` no number is another one."""

import numpy as np
import pytest

from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.data.trajectory import Trajectory
from proxima.engine.local.scheduler import Scheduler
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.training.objectives.policy_objective import mask_sizes
from tests.runtime.runs import CUT, RUNS
from tests.runtime.tiny_run import NO_EVAL, assert_same, go, recipe, steps_of, traces

REPLAY = RUNS["sampling masks"].settings


@pytest.fixture
def run(runs):
    """The folder of a finished run with replay; read-only by agreement."""
    return runs.finished("sampling masks")


def test_the_first_step_of_a_run_measures_no_mismatch(run):
    first = steps_of(run)[0]
    assert first["mismatch/log_prob_absdiff_max"] < 3e-5
    assert first["mismatch/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    assert 1 < first["sampling_mask/size_mean"] <= first["sampling_mask/size_max"] <= 64


def test_the_sizes_of_the_sets():
    facts = {"group": 0, "prompt_tokens": [1], "tokens": [3, 5, 9, 4]}
    items = [Trajectory(**facts, sampling_mask=SamplingMask.of_sets([[3], [1, 5], [9], [2, 4, 6, 8]]))]
    sizes = {name: metric.value for name, metric in mask_sizes(items).items()}
    assert sizes == {"sampling_mask/size_mean": 2.0, "sampling_mask/size_max": 4.0, "sampling_mask/one_fraction": 0.5}
    assert mask_sizes([Trajectory(**facts)]) == {}


def test_the_rollouts_hold_the_sets(run):
    for file in sorted(RunFolder(run).rollouts.iterdir()):
        for row in read_rows(file):
            mask = SamplingMask.of_counts(
                np.array(row["sampling_mask"], np.int32), np.array(row["sampling_mask_counts"])
            )
            mask.check(np.array(row["tokens"], np.int32))
            assert row["behavior_log_prob"] == row["sampled_log_prob"] != row["untruncated_log_prob"]


@pytest.mark.slow
def test_with_the_untruncated_behavior_policy_the_switch_changes_no_number(tiny_model, tmp_path):
    """The masks are stored, and nothing reads them."""
    runs = {}
    for on in (True, False):
        changes = CUT | {"engine__sampling_mask": on, "train__steps": 1} | NO_EVAL
        go(tmp_path / str(on), recipe(tiny_model("llama"), **changes))
        runs[on] = traces(tmp_path / str(on))
        rows = [row for rows in runs[on]["rollouts"].values() for row in rows]
        stored = [row.pop(name) is not None for row in rows for name in ("sampling_mask", "sampling_mask_counts")]
        assert set(stored) == {on}
    assert_same(runs[True], runs[False])
    assert not any(key.startswith("sampling_mask/") for record in runs[True]["metrics"] for key in record)


VARIANTS = {  # and divergences of two policies that are still the same
    "recomputed": (
        {
            "proximal": "recompute",
            "correction": [{"kind": "importance"}],
            "reference_kl": {"kind": "k3", "coefficient": 0.1},
            "entropy_bonus": 0.01,
        },
        ("correction/kl", "approx_kl_k1", "approx_kl", "reference_kl/mean"),
    ),
    "as sampled": (
        {
            "reward_kl": {"coefficient": 0.05},
            "advantage": {"kind": "optimal_token_baseline"},
            "mismatch": {"on_mismatch": "reject"},
        },
        ("reward_kl/mean", "mismatch/kl", "mismatch/rejected_seq_fraction"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_comparison_at_the_sampled_token_is_over_the_same_set(name, tiny_model, tmp_path):
    """An unmoved policy: every ratio to it is 1 and every KL to it 0, which truncation alone would break."""
    settings, keys = VARIANTS[name]
    algorithm = {"preset": "grpo", "behavior": "sampled"} | settings
    unmoved = {"train__steps": 1, "train__optimizer__lr": 1e-9, **NO_EVAL}
    go(tmp_path / "run", recipe(tiny_model("llama"), **CUT | unmoved, algorithm=algorithm))
    (record,) = steps_of(tmp_path / "run")
    assert all(abs(record[key]) < 3e-5 for key in keys)
    assert abs(record["ratio_mean"] - 1) < 3e-5 and record["ratio_max"] < 1.001


@pytest.mark.slow
def test_an_engine_that_forgets_a_set_ends_the_run_by_name(tiny_model, tmp_path, monkeypatch):
    made = Scheduler._completion

    def forgetful(self, request, columns, reason):
        columns.pop("sampling_mask", None)
        return made(self, request, columns, reason)

    monkeypatch.setattr(Scheduler, "_completion", forgetful)
    said = "prompt 0, sample 0, turn 0: the engine did not report which tokens could be sampled"
    with pytest.raises(UserError, match=said):
        go(tmp_path / "run", recipe(tiny_model("llama"), **REPLAY))
