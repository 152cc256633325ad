"""Simulated runs of a recipe for several lags and numbers of concurrent prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.data import UserError
from proxima.engine import ENGINES
from proxima.engine.local.decoder import padded_rows
from proxima_plan.devices import Devices
from proxima_plan.forecast import StepPlan, generating, plan_recipe
from proxima_plan.simulation.simulated_run import SpeedFigures, figures_of, simulate_run
from proxima_plan.simulation.times import Assumptions, Times

MOST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class SimulatedCell:
    """A run with `runtime.max_lag` and `runtime.max_concurrent_rollouts` (None: synchronous), and the ratio of its
    tokens per second to those of the synchronous run."""

    lag: int
    concurrent: int | None
    figures: SpeedFigures
    speed_up: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {"lag": self.lag, "concurrent": self.concurrent, **asdict(self.figures), "speed_up": self.speed_up}


def simulate_lags(
    resolved: Resolved[Any],
    devices: Devices,
    assumed: Assumptions,
    lags: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SimulatedCell]:
    """Simulate the synchronous run, which is always the first, and one for every lag and number of concurrent prompts:
    the recipe's or, without one, the prompts of one step and of two.

    Args:
        lags: values of `runtime.max_lag`; 0 is the synchronous run.
        progress: called with the number of finished runs and the total.

    Raises:
        UserError: the recipe does not generate or does not fit, or a run ends early.
    """
    config = generating(resolved, "--lag")
    config = replace(config, train=replace(config.train, steps=min(config.train.steps, MOST_STEPS)))
    plan = plan_recipe(resolved, devices, mean=assumed.mean)
    own = config.runtime.max_concurrent_rollouts
    batch = config.train.prompts_per_step
    concurrents = [batch, 2 * batch] if own is None else [own]
    pairs: list[tuple[int, int | None]] = [(0, None)]
    pairs += product(filter(None, lags), concurrents)
    cells: list[SimulatedCell] = []
    for lag, concurrent in pairs:
        progress(len(cells), len(pairs))
        figures = figures_of(simulate_lag(config, plan, assumed, lag, concurrent))
        first = cells[0].figures if cells else figures
        speed_up = figures.tokens_per_second / first.tokens_per_second
        cells.append(SimulatedCell(lag=lag, concurrent=concurrent, figures=figures, speed_up=speed_up))
    return cells


def simulate_lag(
    config: RunConfig, plan: StepPlan, assumed: Assumptions, lag: int, concurrent: int | None, most: int | None = None
) -> list[dict[str, Any]]:
    """Simulate one run on the layout of a plan, and return the records of its steps, of its first `most` if given."""
    layout = plan.layout
    completions = config.train.completions_per_prompt
    load = replace(assumed.load(plan.load), lag=lag, concurrent=(concurrent or 0) * completions or None)
    if layout.in_process:
        slots = padded_rows(load.engine.slots or load.sequences)
    else:
        slots = plan.recipe.plan(layout, load).memory.slots
    if not slots:
        raise UserError(
            f"{config.model.path} does not fit {plan.recipe.devices} as {layout}", remedy="see it without --lag"
        )
    runtime = replace(config.runtime, max_lag=lag, max_concurrent_rollouts=concurrent)
    times = Times(replace(plan, load=load), assumed)
    in_thread = ENGINES.holds(config.engine, "local") and not ENGINES.holds(config.engine, "local_process")
    return simulate_run(replace(config, runtime=runtime), times, layout.engines, slots, most=most, in_thread=in_thread)
