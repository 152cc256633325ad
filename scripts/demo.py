"""`make demo`: train a small real model on arithmetic, and show what it has learned and what that is worth.

python scripts/demo.py [--model FOLDER_OR_GGUF] [--engine vllm] [key=value…]

key=value is passed to `proxima train` and overrides the recipe. If the engine is a server, its environment is created
first, the run starts and stops the server, and every proof that it had the trainer's weights is shown.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PROXIMA = [sys.executable, "-m", "proxima.cli.main"]
RECIPE = "recipes/quickstart.yaml"
FOLDER = "runs/quickstart"
CONTEXT = 1024  # tokens of prompt and completion: a server reserves memory for them
ENVIRONMENTS = {"vllm": ".venv-vllm"}  # of servers
SHOWN = 5
# What the untrained model gets with the same questions and prompt when it may finish its sentences: without this, an
# answer in 12 tokens where there was none could be taken for learning to add.
ROOM = {"--max-tokens": 96, "--limit": 100}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a model that is already here: a Hugging Face folder or a .gguf file; nothing is downloaded"
    )
    parser.add_argument("--engine", choices=tuple(ENVIRONMENTS), help="generate with this server; default: local")
    parser.add_argument("--executable", help="the server's program, already installed: nothing is downloaded")
    parser.add_argument("override", nargs="*", help="key=value, as for `proxima train`")
    options = parser.parse_args()
    model = None
    if options.model:
        model = str(Path(options.model).expanduser().resolve())
    name = FOLDER + (f"-{options.engine}" if options.engine else "")
    words = [f"folder={name}"]
    if options.engine:
        if not options.executable:
            into = ENVIRONMENTS[options.engine]
            code = run([*PROXIMA, "engine", "install", options.engine, "--into", into])
            if code:
                return code
        if model and model.endswith(".gguf"):
            model = as_folder(model)
        words += [f"engine={engine_section(options.engine, options.executable)}", f"model.max_length={CONTEXT}"]
    words += [*([f"model.path={json.dumps(model)}"] if model else []), *options.override]
    code = run([*PROXIMA, "train", RECIPE, *words, "--overwrite"])
    if code == 130:
        print(
            f"make demo begins anew; to go on: {os.path.relpath(Path(sys.executable).parent / 'proxima')} train "
            f"{name} --resume"
        )
    if code:
        return code
    folder = REPOSITORY / name
    print("\n" + result(folder))
    if options.engine:
        print("\n" + probes(folder))
    print(f"\nthe untrained model once more, with {ROOM['--max-tokens']} tokens for an answer:", flush=True)
    started = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["model"]
    room = [str(word) for pair in ROOM.items() for word in pair]
    out = f"{name}/untrained_with_room"
    code = run([*PROXIMA, "eval", model or started, RECIPE, *room, "--out", out, "--overwrite", "--json"], quiet=True)
    if code == 0:
        print(with_room(folder, REPOSITORY / out))
        print("\n" + next_commands(folder))
    return code


def engine_section(kind: str, executable: str | None) -> str:
    """Return the recipe's `engine` for a server that the run starts itself."""
    if executable:
        where = {"executable": str(Path(executable).absolute())}
    else:
        where = {"environment": ENVIRONMENTS[kind]}
    return json.dumps({"kind": kind, "serve": where | {"dtype": "bfloat16"}})


def as_folder(gguf: str) -> str:
    """Return a Hugging Face folder with the model of a .gguf file, for servers that can't load such a file."""
    from proxima.model.load import load, save

    folder = REPOSITORY / "models" / Path(gguf).stem.lower()
    if not (folder / "config.json").exists():
        print(f"{folder.relative_to(REPOSITORY)}: the model of {gguf} as the server reads it", flush=True)
        loaded = load(gguf, device="cpu")
        save(loaded.model, loaded.tokenizer, folder)
    return str(folder)


def run(command: list[str], quiet: bool = False) -> int:
    """Run the command and return its exit code. Ctrl-C reaches the command too: it writes its checkpoint, and we wait
    for that."""
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL if quiet else None)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def result(folder: Path) -> str:
    """Return accuracy before and after, the first five held-out questions with both answers, and the report's path."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    machine = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    before, after = (summary["eval"][label] for label in ("before", "after"))
    first, last = (rows_of(folder, label) for label in ("before", "after"))
    where = machine["torch"]["devices"][0]
    if where == "cpu":
        threads = machine["torch"]["threads"]
        where = f"{threads} thread{'s' * (threads != 1)} of {machine['machine']['processor']}"
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


def probes(folder: Path) -> str:
    """Return, for each weight sync, how far the server's log-probs of known tokens were from the trainer's."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    probed = [record for record in records if "sync/probe_mean" in record]
    lines = ["did the server have the trainer's weights? |log-prob of the server - of the trainer|, nats, known tokens"]
    lines += ["  step    mean      max   bounds         seconds"]
    for record in probed:
        bounds = " ".join(f"{record[key]:.3g}" for key in ("sync/bound_mean", "sync/bound_max") if key in record)
        lines.append(
            f"  {record['step']:>4}  {record['sync/probe_mean']:.4f}  {record.get('sync/probe_max', 0):>7.4f}   "
            f"{bounds:<13}  {record.get('sync/seconds', 0):>6.2f}"
        )
    means = [
        record["mismatch/log_prob_absdiff_mean"] for record in probed if "mismatch/log_prob_absdiff_mean" in record
    ]
    if means:
        lines.append(f"mismatch of the completions trained on, mean of all steps: {sum(means) / len(means):.4f} nats")
    return "\n".join(lines)


def with_room(folder: Path, untrained: Path) -> str:
    """Return the accuracy of the untrained model when its answers are not cut off, and what it says of the gain.

    Args:
        folder: the run. untrained: the result of that evaluation.
    """
    (suite,) = json.loads((untrained / "result.json").read_text(encoding="utf-8"))["suites"].values()
    right, questions = suite["correct"], suite["questions"]
    evals = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["eval"]
    before, after = evals["before"]["accuracy"], evals["after"]["accuracy"]
    share = right / questions
    meaning = "the trained model is not above that: nothing shows that it has learned to add"
    if after > max(before, share):
        meaning = (
            f"so of the gain from {before:.3f} to {after:.3f}, about {max(0.0, share - before):.3f} is only that its "
            f"answers got shorter;\nthe other {after - max(before, share):.3f} is addition that it has learned"
        )
    return f"held-out accuracy   {share:.3f}   ({right}/{questions})\n{meaning}"


def next_commands(folder: Path) -> str:
    """Return the three commands to go on with, to be pasted where `make demo` was typed."""
    activate = Path(sys.prefix) / "bin" / "activate"
    commands = [
        (
            f"proxima view {shlex.quote(os.path.relpath(folder))}",
            "each token of this run, in a browser; Ctrl-C ends it",
        ),
        ("proxima init mine", "a reward of your own: files to edit and train"),
    ]
    if activate.is_file():
        commands.insert(0, (f"source {shlex.quote(os.path.relpath(activate))}", "this terminal then finds proxima"))
    width = max(len(command) for command, _ in commands)
    return "\n".join(["next", *(f"  {command:<{width}}   # {comment}" for command, comment in commands)])


def rows_of(folder: Path, label: str) -> dict[int, dict[str, Any]]:
    """Return the first completion of each question in that evaluation, by uid."""
    import pyarrow.parquet as parquet

    (path,) = sorted((folder / "evals").glob(f"*-{label}.parquet"))
    return {row["prompt_uid"]: row for row in parquet.read_table(path).to_pylist() if row["sample"] == 0}


def mark(row: dict[str, Any]) -> str:
    return "right" if row["correct"] else "wrong"


def shorten(text: str, width: int = 70) -> str:
    flat = " ".join(text.split())
    if len(flat) <= width:
        return flat
    return flat[: width - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
