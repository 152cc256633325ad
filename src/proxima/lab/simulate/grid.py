"""Simulated runs of a recipe for a grid of lags and concurrent prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxima.config import RunConfig, resolve
from proxima.config.resolution import Recipe
from proxima.lab.simulate.simulated_run import SimulatedRun, simulate_run
from proxima.lab.simulate.times import Times

MOST_STEPS = 200  # if the user gives no number
LAG, CONCURRENT = "runtime.max_lag", "runtime.max_concurrent_rollouts"


@dataclass(frozen=True, kw_only=True)
class SimulatedCell:
    """A run with `runtime.max_lag` and `runtime.max_concurrent_rollouts` (None: synchronous), and the ratio of its
    tokens per second to those of the synchronous run."""

    lag: int
    concurrent: int | None
    run: SimulatedRun
    speed_up: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {"lag": self.lag, "concurrent": self.concurrent, **asdict(self.run.figures), "speed_up": self.speed_up}


def simulate_grid(
    recipe: Recipe,
    overrides: Sequence[str],
    times: Times,
    lags: Sequence[int],
    concurrents: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    import_code: bool = True,
) -> list[SimulatedCell]:
    """Simulate the synchronous run, which is always the first, and one for every pair of lag and concurrent prompts.

    Args:
        recipe, overrides: as `proxima train` takes them.
        times: durations and lengths.
        lags: values of `runtime.max_lag`; 0 is the synchronous run.
        concurrents: values of `runtime.max_concurrent_rollouts`; empty: the recipe's, or else the prompts of one step
            and of two.
        progress: called with the number of finished runs and the total.
        import_code: see `resolve`.

    Raises:
        UserError: the recipe of a cell is invalid, or its run ends early.
    """
    synchronous: RunConfig = resolve(recipe, [*overrides, f"{LAG}=0"], import_code=import_code).config
    if not concurrents:
        own, batch = synchronous.runtime.max_concurrent_rollouts, synchronous.train.prompts_per_step
        concurrents = [batch, 2 * batch] if own is None else [own]
    pairs = [(lag, concurrent) for lag in lags if lag for concurrent in concurrents]
    overridden = [[*overrides, f"{LAG}={lag}", f"{CONCURRENT}={n}"] for lag, n in pairs]
    configs = [resolve(recipe, words, import_code=import_code).config for words in overridden]
    progress(0, len(pairs) + 1)
    first = simulate_run(synchronous, times)
    cells = [SimulatedCell(lag=0, concurrent=None, run=first, speed_up=1.0)]
    for (lag, concurrent), config in zip(pairs, configs, strict=True):
        progress(len(cells), len(pairs) + 1)
        run = simulate_run(config, times)
        speed_up = run.figures.tokens_per_second / first.figures.tokens_per_second
        cells.append(SimulatedCell(lag=lag, concurrent=concurrent, run=run, speed_up=speed_up))
    return cells
