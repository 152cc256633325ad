"""Lengths and speed of a finished run, for a simulation: from its rollouts and metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pyarrow.compute as pc

from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.data import UserError
from proxima.experiments.run_reader import read_run
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_table
from proxima.runtime.watch.observer import Record
from proxima.system.damage import reading
from proxima_plan.devices import Devices
from proxima_plan.forecast import generating, plan_recipe
from proxima_plan.simulation.lags import simulate_lag
from proxima_plan.simulation.simulated_run import figures_of
from proxima_plan.simulation.times import Assumptions, Observed

WARM_UP = 1  # first steps, excluded if there are enough others
ROUNDS = 3  # of the fit of the speeds
LEAST = 0.01  # share of a step that can be told from 0


def assumptions(
    mean: float | None, folder: str | None, score: float | None, here: Devices | None, *, import_code: bool
) -> Assumptions:
    """Return what a simulation takes beside a plan; of the run in `folder` its speed only on this machine, `here`."""
    assumed = Assumptions(mean=mean)
    if folder is not None:
        assumed, steps, resolved = observed_run(folder, import_code=import_code)
        if here is not None:
            assumed = with_speed(assumed, steps, resolved, here)
    if score is None:
        return assumed
    return replace(assumed, score=score)


def observed_run(folder: str, *, import_code: bool = False) -> tuple[Assumptions, Sequence[Record], Resolved[Any]]:
    """Read a run: what it shows of lengths and rewards, the records of its steps, and its config.

    Raises:
        UserError: the folder is not a run, or has fewer than two finished steps with rollouts.
    """
    run = read_run(folder)
    files = RunFolder(folder)
    steps = [record for record in run.train if files.rollout_file(int(record["step"])).is_file()]
    if len(steps) < 2:
        raise UserError(f"--from {folder}: has {len(steps)} finished steps with rollouts; two are needed to fit times")
    if len(steps) >= 3 * WARM_UP + 1:
        steps = steps[WARM_UP:]
    resolved = resolve(folder, import_code=import_code)
    with reading(f"a file of {folder}", "proxima check tells which one is damaged"):
        return _assumed(files, steps, resolved), steps, resolved


def _assumed(files: RunFolder, steps: Sequence[Record], resolved: Resolved[Any]) -> Assumptions:
    """What these steps of a run show of lengths, rewards and dropped groups."""
    prompts: list[int] = []
    lengths: dict[int, list[int]] = {}
    for record in steps:
        table = read_table(files.rollout_file(int(record["step"])), ["prompt_uid", "tokens", "prompt_tokens"])
        columns = [table["prompt_uid"], pc.list_value_length(table["tokens"])]
        prompts += pc.list_value_length(table["prompt_tokens"]).to_pylist()
        for uid, length in zip(*(column.to_pylist() for column in columns), strict=True):
            lengths.setdefault(uid, []).append(length)
    sizes = {len(of_prompt) for of_prompt in lengths.values()}
    group = sizes.pop() if len(sizes) == 1 else 1
    values = tuple(length for uid in sorted(lengths) for length in lengths[uid])
    assumed = Assumptions(
        observed=Observed(values, group),
        prompt=max(1, round(fmean(prompts))),
        score=fmean(record.get("time/score", Assumptions.score) for record in steps),
    )
    if generating(resolved, "--from").algorithm.dynamic_sampling is not None:
        judged = sum(r["prompts_generated"] - r["prompts_unscored"] for r in steps)
        assumed = replace(assumed, accepted=sum(r["prompts_accepted"] for r in steps) / max(1, judged))
    return assumed


def with_speed(assumed: Assumptions, steps: Sequence[Record], resolved: Resolved[Any], devices: Devices) -> Assumptions:
    """Return the assumptions with the speed of engine and trainer with which a simulation of the run itself has them as
    busy as they were, for each token."""
    real = figures_of(steps)
    config = generating(resolved, "--from")
    config = replace(config, train=replace(config.train, steps=len(steps) + WARM_UP))
    plan = plan_recipe(resolved, devices)
    runtime = config.runtime
    lag = 0
    concurrent = None
    if runtime.overlaps:
        lag = runtime.max_lag
        concurrent = runtime.max_concurrent_rollouts
    for _ in range(ROUNDS):
        run = simulate_lag(config, plan, assumed, lag, concurrent)
        simulated = figures_of(run[WARM_UP:])
        faster = simulated.tokens_per_second / real.tokens_per_second
        engine = _ratio(1 - real.idle_engine, 1 - simulated.idle_engine) * faster
        trainer = _ratio(1 - real.idle_trainer, 1 - simulated.idle_trainer) * faster
        assumed = replace(assumed, engine=assumed.engine * engine, trainer=assumed.trainer * trainer)
    return assumed


def _ratio(busy: float, simulated: float) -> float:
    """Return the ratio of two busy shares; one near 0 says no more than that it is small."""
    return max(LEAST, busy) / max(LEAST, simulated)
