"""Compare plans for this machine with runs on it: measure products and memory bandwidth, fit four rates and the memory
of a bare process on two runs, and compare three runs with other settings."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import HERE
from proxima.config.resolution import resolve
from proxima_plan.devices import Devices, Rates, device_rates, this_machine
from proxima_plan.forecast import PlannedRecipe, StepPlan
from proxima_plan.layout import DeviceLayout

# prompts, completions, tokens at most, checkpointing; those of CALIBRATION are fitted
CALIBRATION = ((4, 8, 48, False), (2, 32, 80, False))
SETTINGS = (*CALIBRATION, (8, 8, 48, False), (4, 8, 112, False), (4, 16, 64, True))
BOUNDS = {"step": 0.20, "memory": 0.10}
SOLVED = {"train": ("products", "step"), "generate": ("rows", "layer")}  # rates, from which of a run's times
MOST = 1e6  # the rate of products that cost nothing
LIMIT = 1800  # seconds of a run


def words_of(model: str, setting: tuple[int, int, int, bool]) -> list[str]:
    """Return the quickstart's overrides for a setting: no evaluations, and a reward that differs within each group."""
    prompts, completions, tokens, again = setting
    return [
        f"model.path={model}", f"train.prompts_per_step={prompts}", f"train.completions_per_prompt={completions}",
        f"sampling.max_tokens={tokens}", f"model.gradient_checkpointing={str(again).lower()}", "train.warmup_steps=0",
        "train.optimizer.lr=1e-7", "reward=[{kind: tests.runtime.tiny_run:Even}]", "train.updates_per_step=1",
        "eval.before=false", "eval.after=false", "eval.every=0", "checkpoint.every=0", "algorithm.selection=[]",
    ]  # fmt: skip


def measured(words: list[str], steps: int, threads: int) -> dict[str, float]:
    """Run the quickstart: return the seconds of a step and its parts, medians without the first step; the mean length;
    the peak bytes of the process."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "proxima", "train", str(HERE.parent / "recipes" / "quickstart.yaml")]
        subprocess.run(
            [*command, f"folder={folder}", f"train.steps={steps}", *words],
            cwd=HERE.parent, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT,
        )  # fmt: skip
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        peak = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["peak_memory_bytes"]
    steps_trained = [record for record in records if record["kind"] == "train"][1:]

    def median(read: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(read(record) for record in steps_trained)

    return {
        "generate": median(lambda r: r["time/generate"]),
        "train": median(lambda r: r["time/step"] - r["time/generate"]),
        "step": median(lambda r: r["time/step"]),
        "length": median(lambda r: r["length/mean"]),
        "memory": float(peak),
    }


def planned(words: list[str], here: Devices, length: float, rates: Rates) -> StepPlan:
    """Return the plan of a measured step with the mean length that it had."""
    devices = replace(here, kind=replace(here.kind, rates=rates))
    recipe = PlannedRecipe.of(resolve(HERE.parent / "recipes" / "quickstart.yaml", words), devices, length)
    return recipe.plan(DeviceLayout(in_process=True))


def seconds_of(plan: StepPlan) -> dict[str, float]:
    """Return the seconds of a plan's two sides and of the step."""
    generate, rest = plan.sides
    return {"generate": generate, "train": rest, "step": generate + rest}


def fitted(here: Devices, runs: Sequence[tuple[list[str], dict[str, float]]]) -> Rates:
    """Return the rates of an accelerator, with those of SOLVED fitted to the times of the runs by least squares, none
    of them negative. What a CPU moves between products stays in its last-level cache and costs no bandwidth.
    """
    rates = device_rates("machine", "cpu")
    for name, unknown in SOLVED.items():
        costs = dict.fromkeys(unknown, 0.0)
        base = times_of(name, here, runs, with_costs(rates, costs))
        slopes = {rate: times_of(name, here, runs, with_costs(rates, costs | {rate: 1.0})) - base for rate in unknown}
        late = np.array([measurement[name] for _, measurement in runs]) - base
        for free in (unknown, unknown[:1], unknown[1:]):  # all of them, else one alone
            found_costs = np.linalg.lstsq(np.array([slopes[rate] for rate in free]).T, late)[0]
            costs |= dict.fromkeys(unknown, 0.0) | dict(zip(free, map(float, found_costs), strict=True))
            if min(costs.values()) >= 0:
                break
        rates = with_costs(rates, costs)
    return rates


def with_costs(rates: Rates, costs: dict[str, float]) -> Rates:
    """Return the rates with these costs. Times are linear in a cost: the inverse of a speed, or the rate itself."""
    return replace(rates, **{name: 1 / max(x, 1 / MOST) if name == "products" else x for name, x in costs.items()})


def times_of(name: str, here: Devices, runs: Sequence[tuple[list[str], dict[str, float]]], rates: Rates) -> Any:
    """Return the planned seconds, [runs]."""
    return np.array(
        [seconds_of(planned(words, here, measurement["length"], rates))[name] for words, measurement in runs]
    )


def compare_here(model: str, threads: int, steps: int, settings: Any = SETTINGS) -> dict[str, Any]:
    """Return a row for each figure of each setting, the measured device and the fitted rates."""
    torch.set_num_threads(threads)
    here = this_machine("bfloat16", "cpu", 1)
    words = [words_of(model, setting) for setting in settings]
    measurements = [measured(each, steps, threads) for each in words]
    for i, each in enumerate(words[: len(CALIBRATION)]):  # again, as the machine may have been slower for a while
        measurements[i] = min(
            measurements[i], measured(each, steps, threads), key=lambda measurement: measurement["step"]
        )
    runs = list(zip(words, measurements, strict=True))
    rates = fitted(here, runs[: len(CALIBRATION)])
    plans = [planned(words, here, measurement["length"], rates) for words, measurement in runs]
    sizes = [sum(plan.memory.trainer.values()) + sum(plan.memory.engine.values()) for plan in plans]
    beside = [measurement["memory"] - size for (_, measurement), size in zip(runs, sizes, strict=True)]
    bare = statistics.fmean(beside[: len(CALIBRATION)])
    rows: list[dict[str, Any]] = []
    for setting, (_, measurement), plan, size in zip(settings, runs, plans, sizes, strict=True):
        figures = seconds_of(plan) | {"memory": size + bare}
        for name in ("generate", "train", "step", "memory"):
            if measurement[name]:
                ratio = figures[name] / measurement[name]
            else:
                ratio = 1.0
            within = abs(ratio - 1) <= BOUNDS.get(name, 1.0)
            row = {"setting": setting, "figure": name, "measured": measurement[name], "planned": figures[name]}
            rows.append(row | {"ratio": round(ratio, 3), "within": within, "fitted": setting in CALIBRATION})
    kind = here.kind
    device = {"gemm": kind.bf16 * 1e12, "bandwidth": kind.bandwidth * 1e12, "bare_process": bare}
    found_rates = {rate: getattr(rates, rate) for unknown in SOLVED.values() for rate in unknown}
    return {"device": device, "rates": found_rates, "rows": rows}
