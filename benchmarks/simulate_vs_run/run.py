"""Run a recipe that generates during training, fit a simulation to its folder, and compare their figures."""

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness

FIGURES = ("tokens_per_second", "idle_trainer", "idle_engine", "mean_lag")
SETTINGS: dict[str, Any] = {
    "model__compute_dtype": "float32",
    "engine": {"kind": "local_process", "slots": 64, "dtype": "float32", "threads": 1},
    "reward": [{"kind": "tests.runtime.tiny_run:Even"}],
    "algorithm": "grpo",
    "sampling": {"max_tokens": 160},
    "eval": {},
    "checkpoint": {},
    "train__prompts_per_step": 8,
    "train__completions_per_prompt": 8,
    "train__tokens_per_micro_batch": 4096,
    "train__optimizer__lr": 1e-7,  # so small that the lengths don't change
}


def run_recipe(root: Path, name: str, steps: int, **settings: Any) -> Path:
    """Train in this process and return the run's folder."""
    from tests.runtime.tiny_run import go, recipe
    from tests.tiny import tiny_factory

    folder = root / name
    tree = recipe(tiny_factory(root / "model")("llama"), train__steps=steps, **(SETTINGS | settings))
    go(folder, tree)
    return folder


def speed_gap(fitted_to: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of a run, those of its simulation with times fitted to `fitted_to`, and their deviations:
    relative to the real figures, but absolute for idle shares."""
    from proxima.config.resolution import resolve
    from proxima.experiments.run_reader import read_run
    from proxima_plan.forecast import devices_here, plan_recipe
    from proxima_plan.simulation.fit import observed_run, with_speed
    from proxima_plan.simulation.lags import simulate_lag
    from proxima_plan.simulation.simulated_run import figures_of

    assumed, steps, own = observed_run(str(fitted_to), import_code=True)
    devices = devices_here(own.config)
    assumed = with_speed(assumed, steps, own, devices)
    real, resolved = asdict(figures_of(read_run(folder).train)), resolve(folder)
    runtime = resolved.config.runtime
    plan = plan_recipe(resolved, devices)
    run = simulate_lag(resolved.config, plan, assumed, runtime.max_lag, runtime.max_concurrent_rollouts)
    simulated = asdict(figures_of(run))
    apart = {
        name: abs(simulated[name] - real[name]) / (1.0 if name.startswith("idle") else real[name]) for name in FIGURES
    }
    speed = {"engine": assumed.engine, "trainer": assumed.trainer, "score": assumed.score}
    return {"real": real, "simulated": simulated, "apart": apart, "times": speed}


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(harness.HERE.parent))
    import torch

    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        by_run = measure(Path(place), options.steps)
    rows = [
        [
            name,
            figure,
            f"{comparison['real'][figure]:.3f}",
            f"{comparison['simulated'][figure]:.3f}",
            f"{comparison['apart'][figure]:.1%}",
        ]
        for name, comparison in by_run.items()
        for figure in FIGURES
    ]
    print(harness.table(["run", "figure", "real", "simulated", "apart"], rows))
    harness.finish({"runs": by_run, "steps": options.steps}, options.json_out)


def measure(root: Path, steps: int) -> dict[str, Any]:
    """Run two lags and simulate each with its own times, and the second also with the times of the first."""
    first = run_recipe(root, "lag-1", steps, runtime={"max_lag": 1, "max_concurrent_rollouts": 8})
    second = run_recipe(root, "lag-3", steps, runtime={"max_lag": 3, "max_concurrent_rollouts": 8})
    return {
        "lag 1": speed_gap(first, first),
        "lag 3": speed_gap(second, second),
        "lag 3, times of lag 1": speed_gap(first, second),
    }
