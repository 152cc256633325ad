"""The same job in TRL's GRPOTrainer: `make evidence CLAIM=trl`."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import HERE, peer_python
from evidence.curves import Outcome, Run, at_look, difference, mean, panel, print_table, run_claim, shown, told, total
from evidence.figure import draw
from evidence.tasks import ChainSums
from proxima.experiments.sweep_file import read_sweep
from proxima.system.jsonl import read_lines
from proxima.task.prompts import Cursor

CLAIM = Path(__file__).parent
STEPS, MARGIN = 30, 0.02
MODEL = "models/evidence/chain_15"
SETTINGS = {"model": MODEL, "steps": STEPS, "updates": 4, "prompts": 16, "completions": 8, "max_tokens": 68}
SETTINGS |= {"lr": 1e-4, "warmup": 5}
# By cell of TRL: its sweeps of seeds, and whether the four updates of a step share its answers at random, as TRL does.
SIDES = {"trl": (("sweep", "more"), True), "trl_groups": (("more",), False)}


def run_trl() -> None:
    """Make the runs of TRL that are not in its results yet, one after the other."""
    python, results = peer_python(HERE / "step_vs_trl"), CLAIM / "trl.jsonl"
    folder = Path("runs/evidence/trl")
    folder.mkdir(parents=True, exist_ok=True)
    have = {(line["cell"], line["seed"]) for line in read_lines(results)}
    for cell, (names, shuffled) in SIDES.items():
        for seed in (seed for name in names for seed in read_sweep(CLAIM / f"{name}.yaml").seeds):
            if (cell, seed) in have:
                continue
            questions = folder / f"questions_{seed}.jsonl"
            write_questions(questions, seed)
            own = {"seed": seed, "shuffled": shuffled, "folder": str(folder / cell), "questions": str(questions)}
            command = [python, str(CLAIM / "trl_side.py"), json.dumps(SETTINGS | own)]
            with (folder / f"{cell}_{seed}.log").open("w", encoding="utf-8") as log:
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=log, encoding="utf-8", errors="replace", check=True
                )
            run = {"sweep": "trl", "cell": cell, "status": "done", **json.loads(done.stdout.splitlines()[-1])}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"{cell} seed {seed}: {total(run, 'seconds'):.0f} CPU seconds", flush=True)


def write_questions(path: Path, seed: int) -> None:
    """Write the questions of our side with this seed in its order, and the tokens that our prompts have."""
    from transformers import AutoTokenizer

    from proxima.model.chat.encode import prompt_tokens

    tokenizer, lines = AutoTokenizer.from_pretrained(MODEL), []
    rows = ChainSums(terms=(15,), size=STEPS * 16).rows(seed)
    cursor = Cursor(len(rows), seed)
    for i in map(cursor.row, range(len(rows))):
        text, tokens = f"{rows[i].messages[0]['content']}\n", prompt_tokens(rows[i].messages, tokenizer)
        lines.append(json.dumps({"prompt": text, "tokens": tokens.tolist(), "answer": rows[i].answer}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(runs: Sequence[Run]) -> None:
    both = [*runs, *read_lines(CLAIM / "trl.jsonl")]
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of all steps": (mean("reward", STEPS), 3),
        "of the last five": (mean("reward", STEPS, last=5), 3),
        "tokens an answer at the end": (mean("length", STEPS, last=5), 1),
    }
    every, ends = mean("reward", STEPS), mean("reward", STEPS, last=5)
    cells = ("proxima", *SIDES)
    print_table(both, cells, columns)
    found = difference(both, "proxima", "trl", every)
    print(f"- T1, all steps, proxima − TRL: {told(found, MARGIN)}; as a second look {told(at_look(found, 2), MARGIN)}")
    second = [run for run in both if run["seed"] > 5]
    new = difference(second, "proxima", "trl", every)
    print(f"- of the new seeds alone: {told(new, MARGIN)}; as a second look {shown(at_look(new, 2))}")
    tens = mean("reward", STEPS, last=10)
    print(f"- the last ten steps, all seeds, proxima − TRL: {told(difference(both, 'proxima', 'trl', tens), MARGIN)}")
    for text, a, b in (
        ("T2, the last five, whole groups in TRL − TRL", "trl_groups", "trl"),
        ("the last five, proxima − TRL", "proxima", "trl"),
        ("the last five, proxima − whole groups in TRL", "proxima", "trl_groups"),
    ):
        print(f"- {text}: {told(difference(second, a, b, ends), MARGIN)}")
    curves = panel(both, cells, "reward", STEPS, title="the same job, 13 seeds", y="share right")
    draw(CLAIM / "trl.svg", [curves])


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "more", beside=run_trl)
