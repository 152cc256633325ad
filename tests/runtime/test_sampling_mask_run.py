"""Runs under top-p whose policy is compared over the tokens that could be sampled: the first ratio is 1, and only so;
masks survive files, checkpoints and replays to the bit; without `behavior: sampled` no number is another one."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data import Prompt, SamplingMask, Trajectory, UserError
from proxima.engine import Local, LocalEngine, Request, Sampling
from proxima.engine.local import collect
from proxima.engine.scheduler import Scheduler
from proxima.model import Policy, load
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.train import LogProbStage
from proxima.train.forward_stage import stage_columns
from proxima.train.objectives.policy_objective import mask_sizes
from tests.runtime.runs import CUT, RUNS
from tests.runtime.tiny_run import assert_same, go, recipe, steps_of, traces

REPLAY = RUNS["sampling masks"].settings


@pytest.fixture
def run(runs):
    """The folder of a finished run with replay; read-only by agreement."""
    return runs.finished("sampling masks")


@pytest.fixture(scope="module")
def sampled(tiny_model):
    """A policy, and what the engine sampled from its weights under top-p."""
    loaded = load(str(tiny_model("llama")), device="cpu")
    sampling = Sampling(max_tokens=12, top_p=0.8, temperature=0.9)
    prompts = [Prompt(uid=i, messages=(), tokens=(5 + i, 17, 42)) for i in range(4)]
    wanted = [Request(prompt=p, sample=s, sampling=sampling, seed=3) for p in prompts for s in range(3)]
    made = asyncio.run(collect(LocalEngine(loaded, Local(dtype="float32", slots=8, sampling_mask=True)), wanted))
    return Policy(loaded), [
        Trajectory.of(prompts[c.prompt_uid], c, group=c.prompt_uid, advantage=1.0, behavior="sampled") for c in made
    ]


def log_ratio(policy, items):
    batch = policy.pack(items)
    with torch.no_grad():
        return policy(batch).log_prob - batch.behavior_log_prob


def test_the_first_ratio_is_one_with_the_masks_and_the_mass_that_was_kept_without(sampled):
    policy, items = sampled
    assert log_ratio(policy, items).abs().max() < 3e-5
    without = log_ratio(policy, [replace(item, sampling_mask=None) for item in items])
    assert without.max() < 3e-5 and without.mean() < -0.1 and without.exp().min() >= 0.8 - 1e-3  # the kept mass


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


def test_with_the_untruncated_behavior_policy_the_switch_changes_no_number(tiny_model, tmp_path):
    """The masks are stored, and nothing reads them."""
    runs = {}
    for on in (True, False):
        go(tmp_path / str(on), recipe(tiny_model("llama"), **CUT | {"engine__sampling_mask": on, "train__steps": 2}))
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
        ("correction/kl", "approx_kl_k1", "approx_kl"),
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


@pytest.mark.parametrize("name", VARIANTS)
def test_every_comparison_at_the_sampled_token_is_over_the_same_set(name, tiny_model, tmp_path):
    """An unmoved policy: every ratio to it is 1 and every KL to it 0, which truncation alone would break."""
    settings, keys = VARIANTS[name]
    algorithm = {"preset": "grpo", "behavior": "sampled"} | settings
    unmoved = {"train__steps": 2, "train__optimizer__lr": 1e-9, "eval__task": None, "eval__every": 0}
    go(tmp_path / "run", recipe(tiny_model("llama"), **CUT | unmoved, algorithm=algorithm))
    for record in steps_of(tmp_path / "run"):
        assert all(abs(record[key]) < 3e-5 for key in keys)
        assert abs(record["ratio_mean"] - 1) < 3e-5 and record["ratio_max"] < 1.001


def test_the_reference_is_over_the_same_set_and_the_entropy_over_the_vocabulary(sampled):
    policy, items = sampled
    stage = LogProbStage("reference_log_prob", policy)
    reference = stage_columns(stage, items, 500, share_prompt=True)["reference_log_prob"]
    for values, item in zip(reference, items, strict=True):
        np.testing.assert_allclose(values, item.behavior_log_prob, rtol=0, atol=3e-5)
    batch = policy.pack(items)
    with torch.no_grad():
        masked, whole = (
            policy(packed, frozenset({"entropy"}))
            for packed in (batch, replace(batch, sampling_mask=None, sampling_mask_cu=None))
        )
    assert torch.equal(masked.entropy, whole.entropy) and not torch.equal(masked.log_prob, whole.log_prob)


def test_an_engine_that_forgets_a_set_ends_the_run_by_name(tiny_model, tmp_path, monkeypatch):
    made = Scheduler._completion

    def forgetful(self, request, columns, reason):
        columns.pop("sampling_mask", None)
        return made(self, request, columns, reason)

    monkeypatch.setattr(Scheduler, "_completion", forgetful)
    said = "prompt 0, sample 0, turn 0: the engine did not report which tokens could be sampled"
    with pytest.raises(UserError, match=said):
        go(tmp_path / "run", recipe(tiny_model("llama"), **REPLAY))
