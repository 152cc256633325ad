"""Engines whose log-probs are not those of the weights end the run before it trains on them; noise does not."""

from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.config.resolution import resolve
from proxima.config.schema import EvaluateConfig
from proxima.core import MismatchGuard
from proxima.core.correction.guard import MismatchError
from proxima.data import FieldError
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.evaluation.eval_run import run_eval
from proxima.evaluation.question_sets import load_suites, recipe_suites
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from tests.runtime.tiny_run import go, recipe, steps_of

pytestmark = pytest.mark.slow  # whole runs
QUICK = {"train__steps": 2, "eval__every": 0, "eval__before": False, "eval__after": False}


@pytest.fixture
def wrong(tiny_model, monkeypatch):
    """A recipe whose engine reports log p + `shift` + noise, as `spread` times a Laplace draw."""
    generate = LocalEngine.generate

    def wrong(shift=0.0, spread=0.0):
        async def generated(self, requests):
            async with aclosing(generate(self, requests)) as completions:
                async for completion in completions:
                    draws = np.random.default_rng([completion.prompt_uid, completion.sample])
                    noise = spread * draws.laplace(size=len(completion.tokens))
                    reported = (completion.sampled_log_prob + shift + noise).astype(np.float32)
                    yield replace(completion, sampled_log_prob=reported, untruncated_log_prob=reported)

        monkeypatch.setattr(LocalEngine, "generate", generated)
        return recipe(tiny_model("llama"), **QUICK)

    return wrong


UNREAD = {"reward": [{"kind": "format", "pattern": "nobody writes this"}]}  # no completion has an advantage


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, UNREAD, {"algorithm": {"preset": "online_dpo"}}])
def test_log_probs_that_are_wrong_end_the_run_before_the_first_update(changes, wrong, tmp_path):
    with pytest.raises(RunEnded) as error:
        go(tmp_path / "run", wrong(shift=-0.5) | changes)
    said = str(error.value)
    assert said.startswith("step 1, before its update: the engine's log-probs of ") and "\n" not in said
    assert "max_fresh=0.2" in said and "on_mismatch=warn" in said
    assert steps_of(tmp_path / "run") == []


def test_an_engine_is_compared_where_no_update_has_a_forward_pass(wrong, tmp_path):
    with pytest.raises(RunEnded, match=r"^no step of \d trained anything; in the last one, every advantage was 0"):
        go(tmp_path / "run", wrong() | UNREAD)
    assert all(
        r["mismatch/log_prob_absdiff_mean"] < 1e-4 and r["tokens/trained"] == 0 for r in steps_of(tmp_path / "run")
    )


@pytest.mark.slow
def test_noise_of_a_sound_engine_goes_on(wrong, tmp_path):
    """Mean 0.1 nats: twice that of a server in bfloat16, with tails longer than its own."""
    assert go(tmp_path / "run", wrong(spread=0.1)).status == "done"
    assert all(0.05 < r["mismatch/log_prob_absdiff_mean"] < 0.2 for r in steps_of(tmp_path / "run"))


@pytest.mark.slow
def test_a_difference_on_purpose_is_named(tiny_model, tmp_path):
    tree = recipe(tiny_model("llama"), engine__weights="int3", engine__noise=1.0, **QUICK)
    with pytest.raises(RunEnded) as error:
        go(tmp_path / "run", tree)
    said = str(error.value)
    assert said.startswith("step 1, before its update: the engine's log-probs of ") and "\n" not in said
    named = "engine.weights=int3 and engine.noise=1.0"
    assert f"within 0.05; expected with {named}: see docs/mismatch.md; resume (--resume) with" in said
    assert "another distribution" not in said and steps_of(tmp_path / "run") == []
    tree["algorithm"] = {"preset": "cppo", "mismatch": {"on_mismatch": "warn"}}
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert all(r["mismatch/log_prob_absdiff_mean"] > 0.2 for r in steps_of(tmp_path / "run"))


@pytest.mark.slow
def test_every_engine_of_a_run_gets_its_seed(tiny_model, tmp_path, monkeypatch):
    """The rollout's, the reference's, and that of an evaluation afterwards: a bias is the same in all of them."""
    seeds, build = [], Local.build
    monkeypatch.setattr(Local, "build", lambda spec, setup: seeds.append(setup.seed) or build(spec, setup))
    tree = recipe(tiny_model("llama"), **QUICK)
    tree["algorithm"] |= {"reference_engine": tree["engine"], "reference_kl": "k3"}
    go(tmp_path / "run", tree)
    assert seeds == [3, 3]
    run = RunFolder(tmp_path / "run")
    config = resolve(run.config, [f"model.path={run.checkpoint(2) / 'model'}"], root=EvaluateConfig).config
    (suite,) = recipe_suites(config.eval, config.reward)
    run_eval(config, load_suites(config, [suite]), folder=tmp_path / "eval")
    assert seeds == [3, 3, 3]


@pytest.mark.slow
def test_tokens_of_earlier_weights_are_not_judged(wrong, tmp_path):
    """A large step moves the policy far from what sampled the completions that run meanwhile."""
    tree = wrong()
    tree["train"] |= {"optimizer": {"kind": "adamw", "lr": 0.3}, "warmup_steps": 0, "schedule": "constant", "steps": 4}
    tree["runtime"] = {"threads": 1, "max_lag": 2, "max_concurrent_rollouts": 8}
    try:
        assert go(tmp_path / "run", tree).status == "done"
    finally:
        differences = [r["mismatch/log_prob_absdiff_mean"] for r in steps_of(tmp_path / "run")]
    assert max(differences) > 0.2


def test_the_bound_by_numbers():
    guard = MismatchGuard()
    guard.check_fresh(torch.full((100,), 0.199))
    guard.check_fresh(torch.full((31,), 5.0))  # too few to tell
    guard.check_fresh(torch.full((100,), torch.nan))
    with pytest.raises(MismatchError, match=r"of 32 tokens are 0\.201 nats"):
        guard.check_fresh(torch.cat([torch.full((32,), 0.201), torch.full((50,), torch.nan)]))
    with pytest.raises(MismatchError, match="inf nats"):
        guard.check_fresh(torch.tensor([torch.inf, *[0.0] * 99]))
    with pytest.raises(FieldError, match="max_fresh"):
        MismatchGuard(max_fresh=0.0)
    assert MismatchGuard(measure=False).judges_fresh is False
    assert [MismatchGuard(on_mismatch=action).judges_fresh for action in ("auto", "warn", "reject", "stop")] == [
        True, False, False, False,
    ]  # fmt: skip
