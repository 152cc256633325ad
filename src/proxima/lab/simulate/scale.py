"""Runs of a recipe on more and more devices, in turns and overlapping: their speed and their bottlenecks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import log2, prod
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.data import UserError
from proxima.lab.plan.devices import GIB, DeviceKind, Devices
from proxima.lab.plan.layout import DeviceLayout, planned_layout
from proxima.lab.plan.step_plan import StepPlan, plan_recipe, plan_step
from proxima.lab.simulate.planned_times import PlannedTimes, planned_times, with_lengths
from proxima.lab.simulate.simulated_run import SimulatedRun, simulate_run
from proxima.lab.simulate.timed_engine import Fleet
from proxima.lab.simulate.times import Times

STEPS = 4  # measured steps, if the user gives no number
PAYS = 1.3  # minimum factor in speed for twice the devices
SHARES = (0.25, 0.5, 0.75)  # of the devices, for the engines of an overlapping run
TRIED = 2  # of these layouts, the best by their plans, are simulated
LONGEST, DECODE, REST = "longest completion", "decode bandwidth", "rewards and rest"
UPDATE, NETWORK, PUBLISH = "update", "network", "publication"


@dataclass(frozen=True, kw_only=True)
class ScaledRun:
    """A run on a given number of devices.

    Args:
        lag: 0: engines and trainer take turns on all devices.
        layout: None if no layout is possible; `refused` says why.
        tokens_per_second, step_seconds: over the measured steps; tokens of the completions that they train on.
        spent: the trainer's time by cause, as shares of a step.
    """

    devices: int
    lag: int
    layout: DeviceLayout | None = None
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    spent: dict[str, float]
    refused: str = ""

    @property
    def per_device(self) -> float:
        return self.tokens_per_second / self.devices

    @property
    def binds(self) -> str:
        """The cause that takes most of a step, or the reason why no layout is possible."""
        return self.refused or max(self.spent, key=self.spent.__getitem__)

    @property
    def where(self) -> str:
        """The number of engines and of devices per engine."""
        if self.layout is None:
            return "–"
        size = self.layout.engine_devices
        return f"{self.layout.engines} × {size}"

    def as_json(self) -> dict[str, Any]:
        layout = None if self.layout is None else {**asdict(self.layout), "text": str(self.layout)}
        facts = {"tokens_per_second_per_device": self.per_device, "binds": self.binds}
        return {**asdict(self), **facts, "layout": layout}


def simulate_scale(
    resolved: Resolved[Any],
    kind: DeviceKind,
    counts: Sequence[int],
    times: Times,
    *,
    given: Sequence[str] = (),
    lag: int = 1,
    steps: int = STEPS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[ScaledRun, ScaledRun]]:
    """Simulate a run in turns and an overlapping one for each number of devices.

    Args:
        kind, counts: the kind of device, and the numbers of devices.
        times: lengths, and durations that no plan has; `given`: the fields of it that were set explicitly.
        lag: steps that generation may be ahead in the overlapping run.
        steps: number of measured steps.

    Raises:
        UserError: the recipe does not generate, or the size of its model is unknown.
        FieldError: the model can't be divided as the layout requires.
    """
    config = resolved.config
    if not isinstance(config, RunConfig) or config.rollouts is not None:
        raise UserError("--devices simulates runs that generate what they train on")
    base = planned_layout(config, Devices(kind, 2**20 * _granule(config.placement)))
    first = replace(base, ranks=_granule(config.placement), engines=1, colocated=True, in_process=False)
    planned = plan_recipe(resolved, Devices(kind, first.ranks), layout=first)
    load, times = with_lengths(replace(planned.load, slots=None), times, given)
    fixed = base.engine_devices if getattr(config.placement, "engines", 0) else 0
    rows = []
    for done, count in enumerate(counts):
        progress(done, len(counts))
        pair = []
        for ahead in (0, lag):
            own = replace(load, lag=ahead, concurrent=None)
            scaled = [
                plan_step(planned.model, config.model, layout, own, Devices(kind, count))
                for layout in _layouts(base, count, kind.node, fixed, overlaps=bool(ahead))
            ]
            pair.append(_best(config, count, ahead, scaled, times, given, steps))
        rows.append((pair[0], pair[1]))
    return rows


def _granule(placement: Any) -> int:
    """Return the size that the number of ranks must be a multiple of: the product of the placement's groups."""
    return prod(getattr(placement, f"{name}_parallel", 1) for name in ("tensor", "context", "expert"))


def _layouts(base: DeviceLayout, count: int, node: int, size: int, *, overlaps: bool) -> Iterator[DeviceLayout]:
    """Yield layouts of the recipe's groups on `count` devices, for each engine size (or the recipe's) and each share of
    the devices for engines."""
    sizes = [size] if size else [n for n in (1, 2, 4, 8, 16) if n <= node]
    sharding = base.sharding
    for each in sizes:
        for share in SHARES if overlaps else (1.0,):
            engines = round(count * share) // each
            ranks = count - engines * each if overlaps else count
            whole = ranks and ranks % sharding.together == 0
            whole = whole and ranks // sharding.tensor_parallel % sharding.expert_parallel == 0
            if engines and whole and (overlaps or count % each == 0):
                yield replace(
                    base, ranks=ranks, engines=engines, engine_devices=each, colocated=not overlaps, in_process=False
                )


def _best(
    config: RunConfig, count: int, lag: int, plans: Sequence[StepPlan], times: Times, given: Sequence[str], steps: int
) -> ScaledRun:
    """Simulate the best of the plans that fit, and return the fastest run."""
    fitting = sorted((plan for plan in plans if plan.memory.fits), key=lambda plan: plan.seconds)
    if not fitting:
        refused = "too few for the groups of the placement"
        if plans:
            least = min(plans, key=lambda plan: plan.memory.needed)
            memory = least.memory
            refused = f"needs {memory.needed / GIB:,.0f} GiB a device, which has {memory.memory / GIB:,.0f}"
            if memory.needed <= memory.memory:
                refused = "engines have no room for the cache of the longest completion"
        return ScaledRun(devices=count, lag=lag, spent={}, refused=refused)
    runs = [simulate_plan(config, plan, times, given, lag, steps) for plan in fitting[: TRIED if lag else 1]]
    return max(runs, key=lambda run: run.tokens_per_second)


def simulate_plan(
    config: RunConfig, plan: StepPlan, times: Times, given: Sequence[str] = (), lag: int = 0, steps: int = STEPS
) -> ScaledRun:
    """Simulate a run on the layout of a plan and measure its middle: at the beginning the engines are empty, and
    towards the end nothing new is generated."""
    around = lag + 1 if lag else 0
    own = planned_times(plan, times, given)
    runtime = replace(
        config.runtime, max_lag=lag, max_concurrent_rollouts=(lag + 1) * config.train.prompts_per_step if lag else None
    )
    config = replace(config, runtime=runtime, train=replace(config.train, steps=steps + 2 * around))
    run = simulate_run(config, own, Fleet(plan.layout.engines, plan.memory.slots))
    measured = run.steps[around : around + steps]
    begin = measured[0]["time"] - measured[0]["time/step"]
    seconds = measured[-1]["time"] - begin
    return ScaledRun(
        devices=plan.layout.devices,
        lag=lag,
        layout=plan.layout,
        tokens_per_second=sum(step.get("tokens/trained", 0) for step in measured) / seconds,
        step_seconds=seconds / steps,
        spent=spent(run, own, plan.layout.engines, begin, begin + seconds, steps),
    )


def spent(
    run: SimulatedRun, times: PlannedTimes, engines: int, begin: float, end: float, steps: int
) -> dict[str, float]:
    """Return the trainer's time between two instants by cause, as shares.

    While the trainer waits for completions, the cause is the decode bandwidth if twice as many engines would decode
    faster. Otherwise it is the longest completion: the engines read their weights for only a few completions.
    """
    causes = dict.fromkeys((LONGEST, DECODE, UPDATE, NETWORK, PUBLISH, REST), 0.0)
    changes = [(0.0, 0, "running"), *((at, n, "running") for at, n in run.running)]
    for spans, name in ((run.trained, "train"), (run.published, "publish")):
        changes += [(at, on, name) for a, b in spans for at, on in ((a, 1), (b, 0))]
    now = {"running": 0, "train": 0, "publish": 0}
    for (at, value, name), (until, *_) in pairwise([*sorted(changes, key=lambda change: change[0]), (end, 0, "")]):
        now[name] = value
        seconds = min(until, end) - max(at, begin)
        if seconds <= 0:
            continue
        if now["publish"] or now["train"]:
            causes[PUBLISH if now["publish"] else UPDATE] += seconds
        elif not now["running"]:
            causes[REST] += seconds
        else:
            each = now["running"] / engines
            slower = times.decode_step(round(each)) / times.decode_step(round(each / 2))
            causes[LONGEST if slower < PAYS else DECODE] += seconds
    rest = min(causes[UPDATE], times.other * steps)
    causes[REST] += rest
    causes[NETWORK] = (causes[UPDATE] - rest) * times.network
    causes[UPDATE] -= rest + causes[NETWORK]
    return {cause: seconds / (end - begin) for cause, seconds in causes.items()}


def stops_paying(runs: Sequence[ScaledRun]) -> ScaledRun | None:
    """Return the first run from which on twice the devices give less than `PAYS` times the speed, or None."""
    largest = None
    for run, larger in reversed(list(pairwise([run for run in runs if not run.refused]))):
        if gain(run, larger) >= PAYS:
            break
        largest = run
    return largest


def lasting_cause(run: ScaledRun, larger: ScaledRun) -> str:
    """Return the cause that dominates the part of a step that no number of devices shortens. A cause that takes s1
    seconds on n devices and s2 on f n takes (f s2 - s1) / (f - 1) on infinitely many, if the rest of it scales."""
    more = larger.devices / run.devices

    def left(cause: str) -> float:
        before, after = (side.spent[cause] * side.step_seconds for side in (run, larger))
        return (more * after - before) / (more - 1)

    return max(larger.spent, key=left)


def gain(run: ScaledRun, larger: ScaledRun) -> float:
    """Return the factor in speed per doubling of the devices."""
    return float((larger.tokens_per_second / run.tokens_per_second) ** (1 / log2(larger.devices / run.devices)))
