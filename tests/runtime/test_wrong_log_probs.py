"""Engines whose log-probs are not those of the weights end the run before it trains on them; noise does not."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from proxima.config import EvaluateConfig, resolve
from proxima.core.correction import MismatchError, MismatchGuard
from proxima.data import FieldError
from proxima.engine.local import Local
from proxima.evaluate.eval_run import run_eval
from proxima.evaluate.question_sets import load_suites, recipe_suites
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from tests.runtime.tiny_run import go, recipe, steps_of

pytestmark = pytest.mark.slow  # whole runs
KIND = "tests.runtime.test_wrong_log_probs:Wrong"
QUICK = {"train__steps": 2, "eval__every": 0, "eval__before": False, "eval__after": False}


@dataclass(frozen=True, kw_only=True)
class Wrong(Local):
    """Reports `factor` log p + `shift` + noise, as `spread` times a Laplace draw."""

    shift: float = 0.0
    factor: float = 1.0
    spread: float = 0.0

    def build(self, setup: Any) -> Any:
        return _WrongEngine(super().build(setup), self)


class _WrongEngine:
    def __init__(self, inner: Any, spec: Wrong) -> None:
        self._inner, self._spec = inner, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, requests: Any) -> AsyncIterator[Any]:
        async with aclosing(self._inner.generate(requests)) as completions:
            async for completion in completions:
                draws = np.random.default_rng([completion.prompt_uid, completion.sample]).laplace(
                    size=len(completion.tokens)
                )
                spec = self._spec
                reported = spec.factor * completion.sampled_log_prob + spec.shift + spec.spread * draws
                reported = reported.astype(np.float32)
                yield replace(completion, sampled_log_prob=reported, untruncated_log_prob=reported)


def wrong(tiny_model, **engine):
    settings = {"kind": KIND, "dtype": "float32", "slots": 8} | engine
    return recipe(tiny_model("llama"), engine=settings, algorithm={"preset": "cppo"}, **QUICK)


@pytest.mark.parametrize("engine", [{"shift": -0.5}, {"factor": 1.5}])
def test_log_probs_that_are_wrong_end_the_run_before_the_first_update(engine, tiny_model, tmp_path):
    with pytest.raises(RunEnded) as error:
        go(tmp_path / "run", wrong(tiny_model, **engine))
    said = str(error.value)
    assert said.startswith("step 1, before its update: the engine's log-probs of ") and "\n" not in said
    assert "max_fresh=0.2" in said and "on_mismatch=warn" in said
    assert steps_of(tmp_path / "run") == []


@pytest.mark.parametrize("shift", [0.0, -0.5])
def test_an_engine_whose_answers_are_all_wrong_is_compared_too(shift, tiny_model, tmp_path):
    """No completion has an advantage, so that no update has a forward pass."""
    tree = wrong(tiny_model, shift=shift) | {"reward": [{"kind": "format", "pattern": "nobody writes this"}]}
    if shift:
        with pytest.raises(RunEnded, match="^step 1, before its update: the engine's log-probs of "):
            go(tmp_path / "run", tree)
        return
    assert go(tmp_path / "run", tree).status == "done"
    assert all(
        r["mismatch/log_prob_absdiff_mean"] < 1e-4 and r["tokens/trained"] == 0 for r in steps_of(tmp_path / "run")
    )


def test_noise_of_a_sound_engine_goes_on(tiny_model, tmp_path):
    """Mean 0.1 nats: twice that of a server in bfloat16, with tails longer than its own."""
    assert go(tmp_path / "run", wrong(tiny_model, spread=0.1)).status == "done"
    assert all(0.05 < r["mismatch/log_prob_absdiff_mean"] < 0.2 for r in steps_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weights": "int3"}, "engine.weights=int3"),
        ({"noise": 1.0}, "engine.noise=1.0"),
        ({"weights": "int3", "noise": 1.0}, "engine.weights=int3 and engine.noise=1.0"),
    ],
)
def test_a_difference_on_purpose_is_named(settings, named, tiny_model, tmp_path):
    engine = {"kind": "local", "dtype": "float32", "slots": 8, **settings}
    tree = recipe(tiny_model("llama"), engine=engine, **QUICK)
    with pytest.raises(RunEnded) as error:
        go(tmp_path / "run", tree)
    said = str(error.value)
    assert said.startswith("step 1, before its update: the engine's log-probs of ") and "\n" not in said
    assert f"within 0.05; expected with {named}: see docs/mismatch.md; resume (--resume) with" in said
    assert "another distribution" not in said and steps_of(tmp_path / "run") == []
    tree["algorithm"] = {"preset": "cppo", "mismatch": {"on_mismatch": "warn"}}
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert all(r["mismatch/log_prob_absdiff_mean"] > 0.2 for r in steps_of(tmp_path / "run"))


def test_the_metrics_show_the_dose(tiny_model, tmp_path):
    """From none to int3 the mean distance grows; that of noise is of the size of its standard deviation."""
    means = []
    for settings in ({}, {"weights": "int8"}, {"weights": "int4"}, {"weights": "int3"}, {"noise": 0.05}):
        engine = {"kind": "local", "dtype": "float32", "slots": 8, **settings}
        changes = {"engine": engine, "algorithm__mismatch": {"on_mismatch": "warn"}, **QUICK, "train__steps": 1}
        go(tmp_path / f"run{len(means)}", recipe(tiny_model("llama"), **changes))
        means.append(steps_of(tmp_path / f"run{len(means)}")[0]["mismatch/log_prob_absdiff_mean"])
    none, int8, int4, int3, noise = means
    assert 10 * none < 1e-5 < int8 < int4 < int3 and 8 * int8 < int4
    assert 0.025 < noise < 0.06


@dataclass(frozen=True, kw_only=True)
class Seen(Local):
    """Keeps the seeds that it is built with."""

    seeds: ClassVar[list[int]] = []

    def build(self, setup: Any) -> Any:
        self.seeds.append(setup.seed)
        return super().build(setup)


def test_every_engine_of_a_run_gets_its_seed(tiny_model, tmp_path, monkeypatch):
    """The rollout's, the reference's, and that of an evaluation afterwards: a bias is the same in all of them."""
    monkeypatch.setattr(Seen, "seeds", [])
    seen = {"kind": "tests.runtime.test_wrong_log_probs:Seen", "dtype": "float32", "slots": 8}
    tree = recipe(tiny_model("llama"), engine=seen, **QUICK)
    tree["algorithm"] |= {"reference_engine": seen, "reference_kl": "k3"}
    go(tmp_path / "run", tree)
    assert Seen.seeds == [3, 3]
    run = RunFolder(tmp_path / "run")
    config = resolve(run.config, [f"model.path={run.checkpoint(2) / 'model'}"], root=EvaluateConfig).config
    (suite,) = recipe_suites(config.eval, config.reward)
    run_eval(config, load_suites(config, [suite]))
    assert Seen.seeds == [3, 3, 3]


def test_tokens_of_earlier_weights_are_not_judged(tiny_model, tmp_path):
    """A large step moves the policy far from what sampled the completions that run meanwhile."""
    tree = wrong(tiny_model)
    tree["train"] |= {"optimizer": {"kind": "adamw", "lr": 0.3}, "warmup_steps": 0, "schedule": "constant", "steps": 4}
    tree["runtime"] = {"threads": 1, "max_lag": 2, "max_concurrent_rollouts": 8}
    try:
        assert go(tmp_path / "run", tree).status == "done"
    finally:
        differences = [r["mismatch/log_prob_absdiff_mean"] for r in steps_of(tmp_path / "run")]
    assert max(differences) > 0.2


def test_pairs_are_judged_too(tiny_model, tmp_path):
    tree = wrong(tiny_model, shift=0.5)
    tree["algorithm"] = {"preset": "online_dpo"}
    with pytest.raises(RunEnded, match="step 1, before its update"):
        go(tmp_path / "run", tree)


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
