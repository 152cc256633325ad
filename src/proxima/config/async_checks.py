"""Checks of asynchronous runs."""

from collections.abc import Iterator
from typing import Any

from proxima.config.estimate import pruned
from proxima.config.problems import Problem
from proxima.config.resolve import Resolved

CONCURRENT = "runtime.max_concurrent_rollouts"


def overlap_is_possible(r: Resolved[Any]) -> Iterator[Problem]:
    """Nothing is generated beside a replay, nothing has an age without versions, and no batch is generated at once."""
    runtime, refill = r.config.runtime, r.config.algorithm.dynamic_sampling
    if runtime.max_concurrent_rollouts is not None and r.config.rollouts is not None:
        yield r.problem(CONCURRENT, "a replay (rollouts) generates nothing; set it to null")
    if runtime.overlaps and "policy_version" not in getattr(r.config.engine, "provides", {"policy_version"}):
        message = "does not report the policy version of a token, so nothing bounds its lag"
        yield r.problem("engine.kind", f"{message}; use another engine, or runtime.max_lag=0")
    if runtime.overlaps and refill is not None and refill.oversample is not None:
        message = f"has no effect with {CONCURRENT}: each rejected group is replaced by one prompt; set it to null"
        yield r.problem("algorithm.dynamic_sampling.oversample", message)


def overlap_settings_have_an_effect(r: Resolved[Any]) -> Iterator[Problem]:
    """Settings that only apply to asynchronous training are not set without it."""
    runtime = r.config.runtime
    if runtime.overlaps:
        return
    missing = runtime.max_concurrent_rollouts is None
    remedy = f"set {CONCURRENT} too" if missing else "runtime.max_lag=0 trains synchronously: raise that"
    for name, default in (("over_age", "wait"), ("rollout_retries", 2)):
        if getattr(runtime, name) != default:
            message = f"only applies to asynchronous training; {remedy}, or leave it out"
            yield r.problem(f"runtime.{name}", message)


def overlap_is_of_use(r: Resolved[Any]) -> Iterator[Problem]:
    """Engine and trainer can work at once, and the bounds leave them room."""
    runtime, train = r.config.runtime, r.config.train
    if not runtime.overlaps:
        if runtime.max_concurrent_rollouts is not None:
            yield r.problem("runtime.max_lag", f"{CONCURRENT} has no effect: with 0 the run is synchronous")
        return
    if r.entry("engine.kind").value == "local":
        message = "takes turns with the trainer in one thread, so that nothing overlaps; use engine.kind=local_process"
        yield r.problem("engine.kind", message)
    prompts = pruned(train.prompts_per_step, train.completions_per_prompt, r.config.algorithm.selection)[0]
    most = (runtime.max_lag + 1) * prompts
    if runtime.max_concurrent_rollouts > most:
        lag = runtime.max_lag
        message = f"can't be reached: runtime.max_lag={lag} admits ({lag} + 1) x {prompts} prompts of steps to come"
        remedy = f"set {most} or fewer, or raise runtime.max_lag or train.prompts_per_step"
        yield r.problem(CONCURRENT, f"{message}; {remedy}")
    if runtime.max_lag >= train.steps:
        message = f"bounds nothing: the run has {train.steps} steps, so all prompts may be generated before the first"
        yield r.problem("runtime.max_lag", f"{message}; lower it or raise train.steps")
