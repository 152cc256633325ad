"""Measure the CPU time of a step as on lesser processors: with the dtype that `auto` takes, and with the others."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import HERE, finish, need_model, parser, table
from benchmarks.processors.emulated import PROCESSORS, environment, why_not

DTYPES = ("bfloat16", "float32")
LIMIT = 3.0  # times the CPU time of a step with `auto`: a run whose steps take longer is stopped
START = 60.0  # CPU seconds that a run may take for its start


def main() -> None:
    p = parser(__doc__, repeats=2)
    p.add_argument("--processors", nargs="+", choices=PROCESSORS, default=list(PROCESSORS), help="(default: all)")
    p.add_argument("--prompts", type=int, default=2, help="of a step (default: %(default)s)")
    p.add_argument("--completions", type=int, default=8, help="of a prompt (default: %(default)s)")
    p.add_argument("--steps", type=int, default=1, help="of a run (default: %(default)s)")
    o = p.parse_args()
    model = need_model(o.model)
    words = [
        f"model.path={model}",
        f"train.prompts_per_step={o.prompts}",
        f"train.completions_per_prompt={o.completions}",
    ]
    measured, skipped = dict[str, dict[str, Any]](), list[str]()
    for name in o.processors:
        reason = why_not(name)
        if reason is not None:
            skipped.append(reason)
            continue
        measured[name] = step_on(name, words, o.steps, o.repeats, o.threads)
    rows = [[name, *cells(result)] for name, result in measured.items()]
    print(f"{Path(model).name}, {o.prompts} x {o.completions} completions, {o.threads} threads; CPU seconds a step\n")
    print(table(["processor", "auto takes", *DTYPES, "auto / best"], rows))
    for reason in skipped:
        print(f"skipped: {reason}")
    settings = {name: getattr(o, name) for name in ("prompts", "completions", "steps", "repeats", "threads")}
    result = {"claim": "processors", "processors": measured, "skipped": skipped}
    finish(result | {"model": Path(model).name, "settings": settings}, o.json_out)


def cells(result: Mapping[str, Any]) -> list[str]:
    """The cells of a processor's row: a run that was stopped took at least the limit."""
    seconds = [f"{result['seconds'][dtype]:,.1f}" if dtype in result["seconds"] else "stopped" for dtype in DTYPES]
    return [result["auto"], *seconds, f"{result['ratio']:.2f}"]


def step_on(name: str, words: Sequence[str], steps: int, repeats: int, threads: int) -> dict[str, Any]:
    """Measure a step as on a processor of this kind.

    The least CPU time of a step counts, over the steps of a run and its repeats. What `auto` takes is then one of the
    dtypes, and its runs are repeats of that one: they compute the same numbers. So other work on the machine can't make
    them differ.

    Returns:
        auto: the dtype that it takes, those of trainer and engine joined if they differ. seconds: of a step, by dtype,
        without those that were stopped. ratio: of what `auto` takes to the best.
    """
    seconds = dict[str, float]()
    words = [*words, f"train.steps={steps}"]
    chosen, first = run_on(name, words, threads, None)
    longest = LIMIT * first * steps + START
    runs = [(dtype, step) for dtype, step in [(chosen, first)] if dtype in DTYPES]
    for repeat in range(repeats):
        for dtype in DTYPES:
            if dtype != chosen or repeat:
                pair = [f"model.compute_dtype={dtype}", f"engine.dtype={dtype}"]
                runs.append((dtype, run_on(name, [*words, *pair], threads, longest)[1]))
    for dtype, step in runs:
        if step < float("inf"):
            seconds[dtype] = min(step, seconds.get(dtype, step))
    of_auto = seconds.get(chosen, first)
    ratio = of_auto / min([of_auto, *seconds.values()])
    return {"auto": chosen, "seconds": {dtype: round(s, 3) for dtype, s in seconds.items()}, "ratio": round(ratio, 3)}


def run_on(name: str, words: Sequence[str], threads: int, longest: float | None) -> tuple[str, float]:
    """Train as on a processor of this kind.

    Args:
        words: settings of the quickstart.
        longest: CPU seconds after which the run is stopped; None: it is not.

    Returns: the dtypes of its trainer and engine, joined if they differ; and the CPU seconds of its fastest step. If it
        was stopped before the first one ended, no dtype and infinity.
    """
    common = ["eval.before=false", "eval.after=false", "eval.every=0", "checkpoint.every=0"]
    common += [f"runtime.threads={threads}", "algorithm.skip_zero_advantage=false"]
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "proxima.cli.main", "train", str(HERE.parent / "recipes" / "quickstart.yaml")]
        command += [*words, *common, f"folder={folder}", "--quiet"]
        pipe = subprocess.PIPE
        variables = environment(name, os.environ) | limits
        with subprocess.Popen(
            command, cwd=HERE.parent, env=variables, stdout=pipe, stderr=pipe, encoding="utf-8"
        ) as process:
            if longest is not None:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (round(longest), round(longest)))
            _, errors = process.communicate()
        stopped = longest is not None and process.returncode < 0
        if process.returncode not in (0, 1) and not stopped:  # 1: no answer was right, so that nothing was learned
            raise RuntimeError(f"{name}: the run failed: {errors[-2000:]}")
        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(encoding="utf-8").splitlines()
        else:
            lines = []
        records = [json.loads(line) for line in lines]
        steps = [record["time/cpu"] for record in records if record["kind"] == "train"]
        if not steps and stopped:
            return "", float("inf")
        if not steps:
            raise RuntimeError(f"{name}: the run made no step: {errors[-2000:]}")
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    dtypes = dict.fromkeys([config["model"]["compute_dtype"], config["engine"]["dtype"]])
    return " and ".join(dtypes), min(steps)
