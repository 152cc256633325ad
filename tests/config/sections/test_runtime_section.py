"""Asynchronous training: impossible settings are refused before anything is loaded, useless ones cause a warning."""

from dataclasses import dataclass

import pytest

from proxima.config import check, resolve
from proxima.config.validate import warnings
from proxima.engine import EngineSpec

OVERLAP = ["engine.kind=local_process", "runtime.max_concurrent_rollouts=8"]
UNIFORM = "algorithm.selection=[drop_uniform_groups]"


@dataclass(frozen=True)
class Unversioned(EngineSpec):
    """Says nothing about versions."""

    @property
    def provides(self):
        return frozenset({"behavior_log_prob"})

    def build(self, setup):
        raise NotImplementedError


def last(overrides):
    """Of each field the last value."""
    return list({text.partition("=")[0].removesuffix(".kind"): text for text in overrides}.values())


def refused(recipe, *overrides):
    return [str(problem) for problem in check(resolve(recipe(), last(overrides)))]


def told(recipe, *overrides):
    return [str(problem) for problem in warnings(resolve(recipe(), last(overrides)))]


def test_what_works_is_not_mentioned(recipe):
    assert refused(recipe, *OVERLAP) == told(recipe, *OVERLAP) == []
    assert refused(recipe, *OVERLAP, "runtime.over_age=drop", "runtime.rollout_retries=0") == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [*OVERLAP, "engine={kind: tests.config.sections.test_runtime_section:Unversioned}"],
            "engine.kind=tests.config.sections.test_runtime_section:Unversioned (command line): does not report the "
            "policy version of a token, so nothing bounds its lag; use another engine, or runtime.max_lag=0",
        ),
        (
            [*OVERLAP, UNIFORM, "algorithm.dynamic_sampling={oversample: 2}"],
            "algorithm.dynamic_sampling.oversample=2 (command line): has no effect with "
            "runtime.max_concurrent_rollouts: each rejected group is replaced by one prompt; set it to null",
        ),
        (
            ["runtime.over_age=drop"],
            "runtime.over_age=drop (command line): only applies to asynchronous training; set "
            "runtime.max_concurrent_rollouts too, or leave it out",
        ),
        (
            ["runtime.rollout_retries=5"],
            "runtime.rollout_retries=5 (command line): only applies to asynchronous training; set "
            "runtime.max_concurrent_rollouts too, or leave it out",
        ),
        (
            [*OVERLAP, "runtime.max_lag=0", "runtime.over_age=train"],
            "runtime.over_age=train (command line): only applies to asynchronous training; "
            "runtime.max_lag=0 trains synchronously: raise that, or leave it out",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, line, recipe):
    assert refused(recipe, *overrides) == [line]


def test_a_replay_generates_nothing(recipe):
    lines = refused(recipe, *OVERLAP, "rollouts=elsewhere")
    assert lines[0] == (
        "runtime.max_concurrent_rollouts=8 (command line): a replay (rollouts) generates nothing; set it to null"
    )


@pytest.mark.parametrize("value", ["0", "-3"])
def test_no_prompt_at_all(value, recipe):
    with pytest.raises(ValueError, match=r"runtime.max_concurrent_rollouts=.* must be >= 1; null generates between"):
        resolve(recipe(), [f"runtime.max_concurrent_rollouts={value}"])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["engine.kind=local"],
            "engine.kind=local (command line): takes turns with the trainer in one thread, so that nothing overlaps; "
            "use engine.kind=local_process",
        ),
        (
            ["runtime.max_concurrent_rollouts=33", "runtime.max_lag=3"],
            "runtime.max_concurrent_rollouts=33 (command line): can't be reached: runtime.max_lag=3 admits (3 + 1) x 8 "
            "prompts of steps to come; set 32 or fewer, or raise runtime.max_lag or train.prompts_per_step",
        ),
        (
            ["runtime.max_lag=0"],
            "runtime.max_lag=0 (command line): runtime.max_concurrent_rollouts has no effect: with 0 the run is "
            "synchronous",
        ),
        (
            ["train.steps=3", "runtime.max_lag=3"],
            "runtime.max_lag=3 (command line): bounds nothing: the run has 3 steps, so all prompts may be generated "
            "before the first; lower it or raise train.steps",
        ),
    ],
)
def test_useless_settings_cause_a_warning(overrides, line, recipe):
    assert refused(recipe, *OVERLAP, *overrides) == []
    assert told(recipe, *OVERLAP, *overrides) == [line]
