"""`make demo`: train a small real model on arithmetic, and show what it has learned and what that is worth.

python scripts/demo.py [--model FOLDER_OR_GGUF] [key=value…]        key=value goes to `proxima train`, over the recipe
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PROXIMA = [sys.executable, "-m", "proxima.cli.main"]
RECIPE = "recipes/quickstart.yaml"
FOLDER = "runs/quickstart"
SHOWN = 5
# What the untrained model gets with the same questions and prompt when it may finish its sentences: without this, an
# answer in 12 tokens where there was none could be taken for learning to add.
ROOM = {"--max-tokens": 96, "--limit": 100}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a model that is already here: a Hugging Face folder or a .gguf file; nothing is downloaded"
    )
    parser.add_argument("override", nargs="*", help="key=value, as for `proxima train`")
    options = parser.parse_args()
    model = str(Path(options.model).expanduser().resolve()) if options.model else None
    words = [f"folder={FOLDER}", *([f"model.path={json.dumps(model)}"] if model else []), *options.override]
    code = run([*PROXIMA, "train", RECIPE, *words, "--overwrite"])
    if code == 130:
        print(
            f"make demo begins anew; to go on: {os.path.relpath(Path(sys.executable).parent / 'proxima')} train "
            f"{FOLDER} --resume"
        )
    if code:
        return code
    folder = REPOSITORY / FOLDER
    print("\n" + result(folder))
    print(f"\nthe untrained model once more, with {ROOM['--max-tokens']} tokens for an answer", flush=True)
    started = json.loads((folder / "summary.json").read_text())["model"]
    room = [str(word) for pair in ROOM.items() for word in pair]
    out = f"{FOLDER}/untrained_with_room"
    code = run([*PROXIMA, "eval", model or started, RECIPE, *room, "--out", out, "--overwrite", "--json"], quiet=True)
    if code == 0:
        print(with_room(REPOSITORY / out))
    return code


def run(command: list[str], quiet: bool = False) -> int:
    """The command's exit code. A Ctrl-C is for the command, which has it too: it writes its checkpoint, and we wait
    until it has."""
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL if quiet else None)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def result(folder: Path) -> str:
    """Accuracy before and after, the first five held-out questions with both answers, and where the report lies."""
    summary = json.loads((folder / "summary.json").read_text())
    machine = json.loads((folder / "environment.json").read_text())
    before, after = (summary["eval"][label] for label in ("before", "after"))
    first, last = (rows_of(folder, label) for label in ("before", "after"))
    where = machine["torch"]["devices"][0]
    if where == "cpu":
        where = f"{machine['torch']['threads']} threads of {machine['machine']['processor']}"
    lines = [
        f"held-out accuracy   {before['accuracy']:.3f} -> {after['accuracy']:.3f}   "
        f"({before['correct']}/{before['questions']} -> {after['correct']}/{after['questions']} questions, none of "
        "them trained on)",
        f"{summary['steps']} steps of {summary['algorithm']} in {summary['seconds'] / 60:.1f} minutes on {where}",
        "",
        "the first five held-out questions",
    ]
    for uid in sorted(first)[:SHOWN]:
        lines += [f"  {first[uid]['question']}   answer {json.loads(first[uid]['answer'])}"]
        lines += [
            f"      {label:<7}{mark(row)} {shorten(row['text'])}"
            for label, row in (("before", first[uid]), ("after", last[uid]))
        ]
    return "\n".join([*lines, "", f"report: {os.path.relpath(folder / 'report.html')}"])


def with_room(folder: Path) -> str:
    """What the untrained model gets when its answers are not cut off."""
    (found,) = json.loads((folder / "result.json").read_text())["suites"].values()
    right, questions = found["correct"], found["questions"]
    return f"held-out accuracy   {right / questions:.3f}   ({right}/{questions}); more than that is skill, not brevity"


def rows_of(folder: Path, label: str) -> dict[int, dict[str, Any]]:
    """uid of a question → its first completion in that evaluation."""
    import pyarrow.parquet as parquet

    (path,) = sorted((folder / "evals").glob(f"*-{label}.parquet"))
    return {row["prompt_uid"]: row for row in parquet.read_table(path).to_pylist() if row["sample"] == 0}


def mark(row: dict[str, Any]) -> str:
    return "right" if row["correct"] else "wrong"


def shorten(text: str, width: int = 70) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
