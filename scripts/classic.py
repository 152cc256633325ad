"""`make classic`: the stages of docs/classic.md, from a base model to an aligned one, and their numbers.

python scripts/classic.py [--gsm8k FOLDER] [--solutions FILE] [--steps N]

    --gsm8k       folder with GSM8K's train.jsonl and test.jsonl; without it the hub's copy is read
    --solutions   example_model_solutions.jsonl of github.com/openai/grade-school-math; without it, it is downloaded
    --steps       steps of every stage, and 8 held-out rows, to watch the stages run; without it, as in the recipes

Finished stages are not repeated: delete runs/classic to start over.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROXIMA = [sys.executable, "-m", "proxima.cli.main"]
RUNS = Path("runs/classic")
PAIRS = RUNS / "pairs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--solutions", type=Path, help="example_model_solutions.jsonl of grade-school-math")
    parser.add_argument("--steps", type=int, help="steps of every stage")
    options = parser.parse_args()
    gsm8k = options.gsm8k and options.gsm8k.expanduser().resolve()
    questions = [f"task.path={gsm8k}"] if gsm8k else []
    few = ["eval.limit=8"] if options.steps else []
    if options.steps:
        short = [f"train.steps={options.steps}", *few]
    else:
        short = []

    make_pairs(options.solutions)
    evaluate("models/smollm2-135m-instruct", "base", [*questions, *few])
    stage("sft", [*questions, *([f"eval.task.path={gsm8k}"] if gsm8k else []), *short])
    export("sft")
    evaluate(RUNS / "models/sft", "sft", [*questions, *few])
    stage("reward", short)
    export("reward")
    stage("ppo", [*questions, *short])
    evaluate(RUNS / "ppo", "ppo", [*questions, *few])
    stage("dpo", short)
    evaluate(RUNS / "dpo", "dpo", [*questions, *few])
    print("\n" + table())
    return 0


def make_pairs(solutions: Path | None) -> None:
    """Write runs/classic/pairs from the published solutions."""
    if (REPOSITORY / PAIRS / "questions.jsonl").exists():
        return
    if solutions:
        given = [str(solutions.expanduser().resolve())]
    else:
        given = []
    run([sys.executable, "examples/gsm8k_pairs.py", str(PAIRS), *given])


def stage(name: str, words: list[str]) -> None:
    """Run a training, resuming it if it was interrupted."""
    print(f"\n---- {name}", flush=True)
    if finished(name):
        print(f"{RUNS / name} is done")
        return
    run([*PROXIMA, "train", f"classic/{name}", *words, "--resume"])


def finished(name: str) -> bool:
    summary = REPOSITORY / RUNS / name / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "done"


def export(name: str) -> None:
    """Export the run's weights as a folder that the next stage can start from."""
    if not (REPOSITORY / RUNS / "models" / name).exists():
        run([*PROXIMA, "export", str(RUNS / name), str(RUNS / "models" / name)])


def evaluate(model: str | Path, name: str, words: list[str]) -> None:
    """Evaluate on the held-out questions, into runs/classic/evals/NAME."""
    out = RUNS / "evals" / name
    if not (REPOSITORY / out / "result.json").exists():
        run([*PROXIMA, "eval", str(model), "classic/questions", *words, "--out", str(out), "--overwrite"])


def run(command: list[str]) -> None:
    """Run a command; if it fails, exit with its code."""
    code = subprocess.run(command, cwd=REPOSITORY).returncode
    if code < 0:
        sys.exit(f"error: ended by signal {-code}, 9 often for want of memory; the same command goes on there")
    if code:
        sys.exit(code)


def table() -> str:
    """Return the results of each stage as tables."""
    lines = ["| stage | measured | before | after | steps | minutes |", "|---|---|---|---|---|---|"]
    for name in ("sft", "reward", "ppo", "dpo"):
        summary = json.loads((REPOSITORY / RUNS / name / "summary.json").read_text(encoding="utf-8"))
        before, after = (summary["eval"][label] for label in ("before", "after"))
        figures = [interval(before), interval(after)]
        lines.append(
            f"| {name} | {after['metric']} | {figures[0]} | {figures[1]} | {summary['steps']} | "
            f"{summary['seconds'] / 60:.0f} |"
        )
    lines += ["", "| held-out questions | right | form | n |", "|---|---|---|---|"]
    for name in ("base", "sft", "ppo", "dpo"):
        (suite,) = json.loads((REPOSITORY / RUNS / "evals" / name / "result.json").read_text(encoding="utf-8"))[
            "suites"
        ].values()
        right, form = (interval(suite["estimates"][part]) for part in ("accuracy", "reward/part/form"))
        lines.append(f"| {name} | {right} | {form} | {suite['questions']} |")
    return "\n".join(lines)


def interval(estimate: dict[str, float]) -> str:
    """Return the figure with its 95 % interval."""
    return f"{estimate['value']:.3f} ({estimate['low']:.3f}-{estimate['high']:.3f})"


if __name__ == "__main__":
    sys.exit(main())
