"""Plans of this machine against runs on it: rates of products and memory measured at once, a first run that two rates
and the memory of a bare process are fitted on, and three runs with other settings that are compared."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, gemm_rate
from proxima.config import resolve
from proxima.lab.plan.devices import GIB, DeviceKind, Devices
from proxima.lab.plan.layout import DeviceLayout
from proxima.lab.plan.rates import Rates, fitted_rates
from proxima.lab.plan.step_plan import PlannedRecipe, StepPlan

# prompts, completions, tokens at most, checkpointing; the first is fitted
SETTINGS = ((4, 8, 48, False), (8, 8, 48, False), (4, 8, 112, False), (4, 16, 64, True))
BOUNDS = {"step": 0.20, "memory": 0.10}
LAYERS = 30  # of SmolLM2-135M; another number only takes more rounds
LIMIT = 1800  # seconds of a run


def words_of(model: str, setting: tuple[int, int, int, bool]) -> list[str]:
    """The quickstart in a setting, without evaluations, with a reward that differs within each group."""
    prompts, completions, tokens, again = setting
    return [
        f"model.path={model}", f"train.prompts_per_step={prompts}", f"train.completions_per_prompt={completions}",
        f"sampling.max_tokens={tokens}", f"model.gradient_checkpointing={str(again).lower()}", "train.warmup_steps=0",
        "train.optimizer.lr=1e-7", "reward=[{kind: tests.runtime.tiny_run:Even}]", "train.updates_per_step=1",
        "eval.before=false", "eval.after=false", "eval.every=0", "checkpoint.every=0", "algorithm.selection=[]",
    ]  # fmt: skip


def copied() -> float:
    """Bytes a second that a copy reads and writes, the best of some."""
    import torch

    source = torch.zeros(2**28, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best


def machine_kind(threads: int) -> DeviceKind:
    """This machine as a device."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    rate = gemm_rate(threads, "bfloat16", size=1024) / 1e12
    return DeviceKind("cpu", memory, rate, copied() / 1e12, 1.0, 1.0, 1, "measured")


def measured(words: list[str], steps: int, threads: int) -> dict[str, float]:
    """Seconds of a step and its parts, medians without the first step; lengths; peak bytes of the process."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "proxima", "train", str(HERE.parent / "recipes" / "quickstart.yaml")]
        subprocess.run(
            [*command, f"folder={folder}", f"train.steps={steps}", *words],
            cwd=HERE.parent, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT,
        )  # fmt: skip
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        peak = json.loads((folder / "summary.json").read_text())["peak_memory_bytes"]
    found = [record for record in records if record["kind"] == "train"][1:]

    def median(read: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(read(record) for record in found)

    return {
        "generate": median(lambda r: r["time/generate"]),
        "train": median(lambda r: r["time/train"]),
        "step": median(lambda r: r["time/step"]),
        "length": median(lambda r: r["length/mean"]),
        "memory": float(peak),
    }


def planned(words: list[str], kind: DeviceKind, length: float, rates: Rates) -> StepPlan:
    """The plan of the same step with the mean length that it had."""
    recipe = PlannedRecipe.of(resolve(HERE.parent / "recipes" / "quickstart.yaml", words), Devices(kind, 1), length)
    return recipe.plan(DeviceLayout(in_process=True), rates=rates)


def seconds_of(plan: StepPlan) -> dict[str, float]:
    """Of its two sides."""
    generate, rest = plan.sides
    return {"generate": generate, "train": rest, "step": generate + rest}


def fitted(kind: DeviceKind, words: list[str], found: dict[str, float]) -> Rates:
    """The rates of an accelerator, with no launches of kernels, and these two as in the run: products in training, and
    the decoder's share of what a step of it takes."""
    rates = replace(fitted_rates(), layer=0.0, step=max(0.0, found["step"] - found["generate"] - found["train"]))
    for _ in range(30):  # the parts are not proportional to a rate
        training = seconds_of(planned(words, kind, found["length"], rates))["train"] - rates.step
        rates = replace(rates, products=rates.products * (training / found["train"]) ** 0.7)
        late = found["generate"] - seconds_of(planned(words, kind, found["length"], rates))["generate"]
        rates = replace(rates, layer=max(0.0, rates.layer + 0.7 * late / found["length"] / LAYERS))
    return rates


def compare_here(model: str, threads: int, steps: int, settings: Any = SETTINGS) -> dict[str, Any]:
    """A line for each setting."""
    kind = machine_kind(threads)
    rows: list[dict[str, Any]] = []
    rates, bare = None, 0.0
    for setting in settings:
        words = words_of(model, setting)
        found = measured(words, steps, threads)
        rates = rates or fitted(kind, words, found)
        plan = planned(words, kind, found["length"], rates)
        size = sum(plan.memory.trainer.values()) + sum(plan.memory.engine.values())
        bare = bare or found["memory"] - size
        figures = seconds_of(plan) | {"memory": size + bare}
        for name in ("generate", "train", "step", "memory"):
            ratio = figures[name] / found[name] if found[name] else 1.0
            within = abs(ratio - 1) <= BOUNDS.get(name, 1.0)
            row = {"setting": setting, "figure": name, "measured": found[name], "planned": figures[name]}
            rows.append(row | {"ratio": round(ratio, 3), "within": within, "fitted": setting == settings[0]})
    assert rates is not None
    device = {"gemm": kind.bf16 * 1e12, "bandwidth": kind.bandwidth * 1e12, "bare_process": bare}
    return {"device": device, "rates": {"products": rates.products, "layer": rates.layer}, "rows": rows}
