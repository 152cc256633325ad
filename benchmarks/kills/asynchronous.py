"""Kill the trainer or the engine of asynchronous runs, resume them, and check what they trained on: each prompt once,
and lengths distributed as in runs that were not killed."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.kills.run import AGAIN, Killed

STEPS, PROMPTS, COMPLETIONS = 12, 2, 2
ENDS = [0, 40, 50, 60, 70, 80, 90, 100]  # token ids that end a completion: the tail of the lengths is geometric
PERMUTATIONS = 10_000
ENGINE_SHARE = 0.6  # of the kills at a random moment, those that hit the engine's process where there is one


def recipe(model: Path) -> dict[str, Any]:
    """Return the recipe of a tiny Llama whose completions end at a random token."""
    from tests.runtime.tiny_run import recipe

    settings = model / "generation_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text(encoding="utf-8")) | {"eos_token_id": ENDS}), encoding="utf-8"
    )
    tree = recipe(
        model,
        train__steps=STEPS,
        train__prompts_per_step=PROMPTS,
        train__completions_per_prompt=COMPLETIONS,
        train__optimizer__lr=1e-6,  # the lengths stay those of the model
        sampling={"max_tokens": 190},
        runtime={"threads": 1, "max_lag": 1, "max_concurrent_rollouts": 8},
        checkpoint={"every": 2, "keep_last": 2},
        algorithm={"preset": "grpo"},
    )
    del tree["eval"]
    return tree


def engine(process: bool) -> dict[str, Any]:
    """Return the settings of an engine in the trainer's process or, with `process`, in a separate one."""
    common = {"dtype": "float32", "slots": 8}
    return common | ({"kind": "local_process", "threads": 1, "restarts": 20} if process else {"kind": "local"})


def campaign(
    root: Path, kills: int, processes: int, whole: int, minutes: float, draws: random.Random
) -> dict[str, Any]:
    """Compare `kills` killed runs, each with another seed, with `whole` intact ones, and these with biased ones.

    Args:
        processes: number of killed runs whose engine has its own process.
        minutes: time after which no further runs start.
    """
    runs = Killed(root, recipe)
    folder, wrong = root / "run", list[str]()
    lengths: dict[str, list[int]] = {"killed": [], "whole": [], "drop": []}
    killed = Counter[str]()
    began = time.monotonic()
    runs.tree["engine"] = engine(False)
    runs.finish(folder)
    seconds, operations = time.monotonic() - began, int(runs.counted.read_text(encoding="utf-8"))

    def measure(name: str, seed: int, over_age: str) -> None:
        try:
            lengths[name] += consumed_lengths(folder, in_order=over_age == "wait")
        except (RuntimeError, OSError, ValueError) as error:
            wrong.append(f"{name} {seed}: {error}")

    began = time.monotonic()
    for number in range(max(kills, whole)):
        if time.monotonic() - began > 60 * minutes:
            break
        for name, count, over_age in (("whole", whole, "wait"), ("drop", whole, "drop"), ("killed", kills, "wait")):
            if number >= count:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            runs.tree["seed"] = 1000 * len(name) + number  # no two runs share their draws
            runs.tree["runtime"]["over_age"] = over_age
            runs.tree["engine"] = engine(name == "killed" and number % max(1, kills // max(1, processes)) == 0)
            try:
                while name == "killed":
                    what = kill(runs, folder, seconds, operations, draws)
                    killed[what] += 1
                    if what == "nothing" or draws.random() > AGAIN:
                        break
                runs.finish(folder)
            except RuntimeError as error:
                wrong.append(f"{name} {number}: {error}")
                continue
            measure(name, number, over_age)
        if (number + 1) % 5 == 0:
            print(f"  {number + 1}: {dict(killed)}, {len(wrong)} wrong", file=sys.stderr, flush=True)
    sizes = {name: np.array(values) for name, values in lengths.items()}
    return {
        "kills": dict(killed),
        "wrong": wrong,
        "completions": {name: len(values) for name, values in sizes.items()},
        "length_mean": {name: float(values.mean()) for name, values in sizes.items()},
        "length_median": {name: float(np.median(values)) for name, values in sizes.items()},
        "killed_against_whole": compare(sizes["killed"], sizes["whole"]),
        "drop_against_whole": compare(sizes["drop"], sizes["whole"]),
    }


def kill(runs: Killed, folder: Path, seconds: float, operations: int, draws: random.Random) -> str:
    """Start or resume the run, kill one of its processes and return which: `trainer`, `engine`, or `nothing` if the run
    had already ended."""
    at, done, moment = draws.randrange(1, operations + 1), draws.random() < 0.5, draws.random() * seconds
    if draws.random() < 0.4:
        pid = runs.start(folder, lambda n, after: (n, after) == (at, done))
        return "nothing" if os.WIFEXITED(os.waitpid(pid, 0)[1]) else "trainer"
    pid = runs.start(folder)
    while runs.tree["engine"]["kind"] == "local_process" and not engines_of(pid):  # it starts for longer than it works
        if os.waitpid(pid, os.WNOHANG)[0]:
            return "nothing"
        time.sleep(0.05)
    time.sleep(moment * (4 if runs.tree["engine"]["kind"] == "local_process" else 1))
    if os.waitpid(pid, os.WNOHANG)[0]:
        return "nothing"
    engines = engines_of(pid)
    if engines and draws.random() < ENGINE_SHARE:
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        if status := os.waitpid(pid, 0)[1]:  # the run goes on with another engine
            raise RuntimeError(f"ended with status {status}: {runs.errors.read_text(encoding='utf-8')[-800:]}")
        return "engine"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "trainer"


def engines_of(pid: int) -> list[int]:
    """Return the process ids of the engines that a trainer has started."""
    engines = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            if parent == pid and b"proxima.engine" in (place / "cmdline").read_bytes():
                engines.append(int(place.name))
        except OSError:  # it has ended
            continue
    return engines


def consumed_lengths(folder: Path, *, in_order: bool) -> list[int]:
    """Return the token count of each completion that a step consumed.

    Raises:
        ValueError: journal and rollouts differ, or a prompt was consumed twice, in parts or, with `in_order`, not at
            all.
    """
    from proxima.runtime.state.folder import RunFolder
    from proxima.runtime.state.journal import Journal
    from proxima.runtime.state.rollouts import read_rows
    from tests.runtime.prompt_rows import consumed_prompts

    run, lengths, seen = RunFolder(folder), list[int](), Counter[int]()
    with Journal(run.journal) as journal:
        if journal.step != STEPS or len(run.read_metrics()) != STEPS:
            raise ValueError(f"{journal.step} steps in the journal, {len(run.read_metrics())} in metrics.jsonl")
        for step in range(1, STEPS + 1):
            rows = read_rows(run.rollout_file(step), ["prompt_uid", "sample", "tokens", "used"])
            keys = Counter((row["prompt_uid"], row["sample"]) for row in rows)
            uids = {uid for uid, _ in keys}
            if uids != {prompt.uid for prompt in consumed_prompts(journal, step)}:
                raise ValueError(f"step {step}: journal and rollouts name other prompts")
            if keys != Counter((uid, sample) for uid in uids for sample in range(COMPLETIONS)):
                raise ValueError(f"step {step}: a completion is missing or doubled: {sorted(keys)}")
            seen.update(uids)
            lengths += [len(row["tokens"]) for row in rows if row["used"]]
        left = set(journal.counts()) - {"consumed"}
    if in_order and sorted(seen.elements()) != list(range(STEPS * PROMPTS)):
        raise ValueError(f"consumed {sorted(seen.elements())}")
    if max(seen.values()) > 1 or (in_order and left):
        raise ValueError(f"consumed twice: {seen.most_common(3)}; left: {left}")
    return lengths


def compare(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Run a two-sample Kolmogorov–Smirnov test: return the largest distance between the two empirical distributions,
    and the share of permutations of the pooled values that reach it, which is exact with ties."""
    rng = np.random.default_rng(0)
    pooled = np.concatenate([first, second])
    order = np.argsort(pooled, kind="stable")
    ends = np.flatnonzero(np.diff(pooled[order], append=np.inf))  # the last of each value
    labels = (order < len(first)).astype(float)

    def distance(mine: np.ndarray) -> float:
        a, b = np.cumsum(mine)[ends] / len(first), np.cumsum(1 - mine)[ends] / len(second)
        return float(np.abs(a - b).max())

    observed = distance(labels)
    reached = sum(distance(rng.permutation(labels)) >= observed - 1e-12 for _ in range(PERMUTATIONS))
    return {"distance": observed, "p": (1 + reached) / (1 + PERMUTATIONS)}


def table(figures: dict[str, Any]) -> str:
    """Format the results as a table, one kind of run per line."""
    names = {"whole": "not killed", "killed": "killed", "drop": "not killed, `over_age: drop`"}
    against = {"killed": figures["killed_against_whole"], "drop": figures["drop_against_whole"]}
    rows = [
        [
            label,
            str(figures["completions"][name]),
            f"{figures['length_mean'][name]:.1f}",
            f"{figures['length_median'][name]:.0f}",
            f"{against[name]['distance']:.3f}" if name in against else "",
            f"{against[name]['p']:.2g}" if name in against else "",
        ]
        for name, label in names.items()
    ]
    kills = ", ".join(f"{count} {what}" for what, count in sorted(figures["kills"].items()))
    return f"kills: {kills}; wrong: {len(figures['wrong'])}\n" + harness.table(
        ["runs", "completions", "tokens, mean", "median", "KS distance", "p"], rows
    )
