"""Runs of a recipe on more and more devices, in turns and overlapping: their speed and their bottlenecks."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import lcm, log2
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import GIB, Devices
from proxima_plan.forecast import PlannedRecipe, StepPlan, generating
from proxima_plan.layout import DeviceLayout, is_local
from proxima_plan.proposals import layouts, proposed_engine
from proxima_plan.simulation.lags import simulate_lag
from proxima_plan.simulation.simulated_run import figures_of
from proxima_plan.simulation.times import Assumptions

STEPS = 4  # most measured steps
PAYS = 1.3  # minimum factor in speed for twice the devices
SHARES = (0.25, 0.5, 0.75)  # of the devices, for the engines of an overlapping run
TRIED = 2  # of these layouts, the best by their plans, are simulated


@dataclass(frozen=True, kw_only=True)
class ScaledRun:
    """A run on a given number of devices.

    Args:
        devices, lag: lag 0: engines and trainer take turns on all devices.
        binds: what takes most of a step, and its share; or the reason why no layout is possible.
        layout: None if none is possible.
        tokens_per_second, step_seconds: over the measured steps; tokens of the completions that they train on.
        waiting: share of these steps in which the trainer waits for completions.
    """

    devices: int
    lag: int
    binds: str
    layout: DeviceLayout | None = None
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    waiting: float = 0.0

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.devices

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second_per_device": self.per_device}


def simulate_scale(
    resolved: Resolved[Any],
    devices: Sequence[Devices],
    assumed: Assumptions,
    lag: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[ScaledRun, ScaledRun]]:
    """Simulate a run in turns and an overlapping one for each number of devices.

    Args:
        lag: steps that generation may be ahead in the overlapping run.

    Raises:
        UserError: the recipe does not generate, or the size of its model is unknown.
        FieldError: the model can't be divided as the layout requires.
    """
    config = generating(resolved, "--devices with several numbers", remedy="name one number of devices")
    placement = config.placement
    if is_local(placement):
        sharding = Sharding()
    else:
        sharding = Sharding.of(placement)
    recipe = PlannedRecipe.of(resolved, devices[0], assumed.mean)
    ranks = lcm(sharding.ranks_per_share, sharding.tensor_parallel * sharding.expert_parallel)
    recipe.check(DeviceLayout(ranks, sharding))
    load = assumed.load(recipe.load)
    load = replace(load, engine=proposed_engine(load.engine), concurrent=None)
    sizes = [1, 2, 4, 8, 16]
    if getattr(placement, "engines", 0):
        size = placement.gpus_of_ranks if placement.colocate else placement.gpus_per_engine
        sizes = [max(1, int(size))]
    within_node = [n for n in sizes if n <= devices[0].kind.node]
    rows = []
    for done, asked in enumerate(devices):
        progress(done, len(devices))
        pair = []
        for ahead in (0, lag):
            shares = SHARES if ahead else [0.0]
            possible = layouts(asked, [sharding], within_node, shares)
            plans = replace(recipe, devices=asked).plans(possible, replace(load, lag=ahead))
            pair.append(_best(config, asked.count, ahead, plans, assumed))
        rows.append((pair[0], pair[1]))
    return rows


def _best(config: RunConfig, count: int, lag: int, plans: Sequence[StepPlan], assumed: Assumptions) -> ScaledRun:
    """Simulate the best of the plans that fit, and return the fastest run."""
    fitting = sorted((plan for plan in plans if plan.memory.fits), key=lambda plan: plan.seconds)
    if not fitting:
        refused = "too few for the groups of the placement"
        if plans:
            memory = min((plan.memory for plan in plans), key=lambda memory: memory.needed)
            refused = f"needs {memory.needed / GIB:,.0f} GiB a device, which has {memory.memory / GIB:,.0f}"
            if memory.needed <= memory.memory:
                refused = f"a server needs {memory.least / GIB:,.0f} GiB, and has {memory.room / GIB:,.0f} on a device"
        return ScaledRun(devices=count, lag=lag, binds=refused)
    tried = TRIED if lag else 1
    runs = [simulate_plan(config, plan, assumed, lag) for plan in fitting[:tried]]
    return max(runs, key=lambda run: run.tokens_per_second)


def simulate_plan(config: RunConfig, plan: StepPlan, assumed: Assumptions, lag: int = 0) -> ScaledRun:
    """Simulate a run on the layout of a plan and measure its middle: at the beginning the engines are empty, and
    towards the end nothing new is generated."""
    around = lag + 1 if lag else 0
    steps = min(STEPS, config.train.steps)
    config = replace(config, train=replace(config.train, steps=steps + 2 * around))
    concurrent = (lag + 1) * config.train.prompts_per_step if lag else None
    measured = simulate_lag(config, plan, assumed, lag, concurrent, most=around + steps)[around:]
    seconds = measured[-1]["time"] - measured[0]["time"] + measured[0]["time/step"]
    generate, *rest = plan.stages
    waiting = figures_of(measured).idle_trainer
    longest = generate
    if waiting <= 0.5:
        longest = max(rest, key=lambda stage: stage.seconds)
    return ScaledRun(
        devices=plan.layout.devices,
        lag=lag,
        layout=plan.layout,
        tokens_per_second=sum(step.get("tokens/trained", 0) for step in measured) / seconds,
        step_seconds=seconds / steps,
        waiting=waiting,
        binds=f"{longest.name}: {longest.binds} {100 * max(waiting, 1 - waiting):.0f} %",
    )


def stops_paying(runs: Sequence[ScaledRun]) -> ScaledRun | None:
    """Return the first run from which on twice the devices give less than `PAYS` times the speed, or None."""
    pairs = list(pairwise([run for run in runs if run.layout]))
    first: ScaledRun | None = None
    for run, larger in reversed(pairs):
        if gain(run, larger) >= PAYS:
            break
        first = run
    return first


def gain(run: ScaledRun, larger: ScaledRun) -> float:
    """Return the factor in speed per doubling of the devices."""
    return float((larger.tokens_per_second / run.tokens_per_second) ** (1 / log2(larger.devices / run.devices)))


def conclusions(pairs: Sequence[tuple[ScaledRun, ScaledRun]]) -> list[str]:
    """Say for each kind of run where more devices stop paying off."""
    kinds = (("synchronous", [sync for sync, _ in pairs]), ("asynchronous", [beside for _, beside in pairs]))
    return [f"{name}: {_conclusion(runs)}" for name, runs in kinds]


def _conclusion(runs: Sequence[ScaledRun]) -> str:
    fitting = [run for run in runs if run.layout]
    if len(fitting) < 2:
        return "fewer than two of these numbers of devices can run it"
    last = stops_paying(runs)
    if last is None:
        return f"up to {fitting[-1].devices:,} devices, twice as many give at least {PAYS:g} × the speed"
    larger = fitting[fitting.index(last) + 1]
    less = f"from {last.devices:,} devices on, twice as many give less than {PAYS:g} × the speed"
    return f"{less} ({gain(last, larger):.2f} ×); on {larger.devices:,}, {larger.binds}"
