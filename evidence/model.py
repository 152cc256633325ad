"""`make evidence-model`: the models that the evidence starts from, trained from nothing until a third of their answers
are right.

python -m evidence.model [--out models/evidence]

Two supervised runs, on short and then on all solutions; for each length a checkpoint of whose answers,
sampled at temperature 1, 25 to 40 % are right. Finished stages are not repeated.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from evidence.start_model import make_start_model

RECIPES = Path(__file__).parent / "recipes"
PROXIMA = [sys.executable, "-m", "proxima.cli.main"]
RIGHT = (0.25, 0.40)  # share of right answers that a model may start with


@dataclass(frozen=True)
class Stage:
    """A supervised run: its name, the stage that it continues, and its overrides."""

    name: str
    after: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """A model to start from: its name, its stage, and what makes recipes/chain.yaml ask its questions."""

    name: str
    stage: str
    words: tuple[str, ...]


def task_words(task: str, asked: str) -> tuple[str, str]:
    """The overrides that put other tasks, to train on and to ask, into recipes/sft.yaml."""
    kind = "kind: evidence.tasks:"
    return f"task={{{kind}{task}, size: 15000}}", f"eval.task={{{kind}{asked}, split: test, size: 200}}"


COUNTDOWN = task_words("Countdown", "Countdown")
PROGRAMS = task_words("Programs, lines: [3, 4, 5, 6, 8]", "Programs, lines: [8]")
STAGES = (
    Stage("short", "start", ("task.terms=[3, 8]", "train.steps=600", "checkpoint.every=20")),
    Stage("long", "short", ("train.steps=420", "checkpoint.every=5")),
    Stage("countdown_all", "start", (*COUNTDOWN, "train.steps=1500", "checkpoint.every=25")),
    Stage("programs_all", "start", (*PROGRAMS, "train.steps=2000", "checkpoint.every=25")),
)
SEARCHED = "reward={kind: function, path: evidence.tasks:countdown_reward}"  # any solution is right
STARTS = (
    *(
        Start(
            f"chain_{terms}",
            "short" if terms < 8 else "long",
            (f"eval.task.terms=[{terms}]", f"sampling.max_tokens={tokens}"),
        )
        for terms, tokens in ((3, 18), (15, 68), (49, 206), (99, 410))
    ),
    Start("countdown", "countdown_all", (COUNTDOWN[1], SEARCHED, "sampling.max_tokens=24")),
    Start("programs", "programs_all", (PROGRAMS[1], "sampling.max_tokens=24")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/evidence"), help="(default: %(default)s)")
    out = parser.parse_args().out
    if not (out / "start").exists():
        make_start_model(out / "start")
    for stage in STAGES:
        train(stage, out)
    table = [choose(start, out) for start in STARTS]
    (out / "starts.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def train(stage: Stage, out: Path) -> None:
    """Train a stage, or resume it, and export its last weights."""
    run = out / "runs" / stage.name
    words = [f"model.path={out / stage.after}", *stage.words, f"folder={run}", "--resume"]
    call("train", str(RECIPES / "sft.yaml"), *words)
    if not (out / stage.name).exists():
        call("export", str(run), str(out / stage.name))


def choose(start: Start, out: Path) -> dict[str, object]:
    """Export the first checkpoint found whose share of right answers is in RIGHT: a search by halves, then its
    neighbours, because accuracy grows with the steps, but not from each to the next."""
    run = out / "runs" / start.stage
    steps = sorted(int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdigit())
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        too_few = accuracy(start, run, steps[middle]) < sum(RIGHT) / 2
        low, high = (middle + 1, high) if too_few else (low, middle)
    for step in sorted(steps, key=lambda step: abs(steps.index(step) - low)):
        share = accuracy(start, run, step)
        if RIGHT[0] <= share <= RIGHT[1]:
            break
    else:
        sys.exit(f"error: no checkpoint of {run} has {RIGHT[0]} to {RIGHT[1]} right answers of {start.name}")
    if not (out / start.name).exists():
        call("export", str(run), str(out / start.name), "--checkpoint", str(step))
    print(f"{start.name}: step {step} of {start.stage}, {share:.3f} right")
    return {"model": start.name, "stage": start.stage, "step": step, "right": share}


def accuracy(start: Start, run: Path, step: int) -> float:
    """The share of right answers of a checkpoint, sampled at temperature 1; an evaluation that exists is read."""
    out = run / "evals" / f"{start.name}_{step}"
    if not (out / "result.json").exists():
        options = ["--checkpoint", str(step), "--temperature", "1", "--samples", "1", "--out", str(out), "--overwrite"]
        call("eval", str(run), str(RECIPES / "chain.yaml"), *start.words, *options)
    (suite,) = json.loads((out / "result.json").read_text(encoding="utf-8"))["suites"].values()
    return float(suite["estimates"]["reward/mean"]["value"])


def call(*words: str) -> None:
    """Run a command of proxima; if it fails, exit with its code."""
    if code := subprocess.run([*PROXIMA, *words]).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
