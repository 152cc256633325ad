"""`make demo`: bring a small real model, train it on arithmetic, show what it has learned.

python scripts/demo.py [--model FOLDER_OR_GGUF] [key=value…]        key=value goes to `proxima train`, over the recipe
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bring_model import REPOSITORY, bring

RECIPE = "recipes/quickstart.yaml"
FOLDER = "runs/quickstart"
SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a model that is already here: a Hugging Face folder or a .gguf file; nothing is downloaded"
    )
    parser.add_argument("override", nargs="*", help="key=value, as for `proxima train`")
    options = parser.parse_args()
    try:
        model = str(Path(options.model).expanduser().resolve()) if options.model else str(bring())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = [
        sys.executable,
        "-m",
        "proxima.cli.main",
        "train",
        RECIPE,
        f"folder={FOLDER}",
        f"model.path={model}",
        "--overwrite",
    ]
    code = run([*command, *options.override])
    if code == 0:
        print("\n" + result(REPOSITORY / FOLDER))
    elif code == 130:
        print(
            f"make demo begins anew; to go on: {os.path.relpath(Path(sys.executable).parent / 'proxima')} train "
            f"{FOLDER} --resume"
        )
    return code


def run(command: list[str]) -> int:
    """The command's exit code. A Ctrl-C is for the command, which has it too: it writes its checkpoint, and we wait
    until it has."""
    process = subprocess.Popen(command, cwd=REPOSITORY)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def result(folder: Path) -> str:
    """Accuracy before and after, the first five held-out questions with both answers, and where the report lies."""
    summary = json.loads((folder / "summary.json").read_text())
    before, after = (summary["eval"][label] for label in ("before", "after"))
    first, last = (rows_of(folder, label) for label in ("before", "after"))
    lines = [
        f"held-out accuracy   {before['accuracy']:.3f} -> {after['accuracy']:.3f}   "
        f"({before['correct']}/{before['questions']} -> {after['correct']}/{after['questions']} questions, none of "
        "them trained on)",
        f"{summary['steps']} steps of {summary['algorithm']} in {summary['seconds'] / 60:.1f} minutes",
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
