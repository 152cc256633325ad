"""The same job in TRL's GRPOTrainer: `make evidence CLAIM=trl`."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import HERE, peer_python
from evidence.curves import Outcome, Run, difference, mean, panel, print_table, run_claim, told, total
from evidence.figure import draw
from evidence.tasks import ChainSums
from proxima.experiments.sweep_file import read_sweep
from proxima.system.jsonl import read_lines
from proxima.task.cursor import Cursor

CLAIM = Path(__file__).parent
STEPS, MARGIN = 30, 0.02
MODEL = "models/evidence/chain_15"
SETTINGS = {"model": MODEL, "steps": STEPS, "updates": 4, "prompts": 16, "completions": 8, "max_tokens": 68}
SETTINGS |= {"lr": 1e-4, "warmup": 5}


def run_trl() -> None:
    """Make the runs of TRL that are not in its results yet, one after the other."""
    python, results = peer_python(HERE / "step_vs_trl"), CLAIM / "trl.jsonl"
    folder = Path("runs/evidence/trl")
    folder.mkdir(parents=True, exist_ok=True)
    for seed in read_sweep(CLAIM / "sweep.yaml").seeds:
        if seed in {line["seed"] for line in read_lines(results)}:
            continue
        questions = folder / f"questions_{seed}.jsonl"
        write_questions(questions, seed)
        settings = SETTINGS | {"seed": seed, "folder": str(folder / "trl"), "questions": str(questions)}
        command = [python, str(CLAIM / "trl_side.py"), json.dumps(settings)]
        with (folder / f"trl_{seed}.log").open("w") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
        run = {"sweep": "trl", "cell": "trl", "status": "done", **json.loads(done.stdout.splitlines()[-1])}
        with results.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(f"trl seed {seed}: {total(run, 'seconds'):.0f} CPU seconds", flush=True)


def write_questions(path: Path, seed: int) -> None:
    """Write the questions of our side with this seed in its order, and the tokens that our prompts have."""
    from transformers import AutoTokenizer

    from proxima.model.chat import prompt_tokens

    tokenizer, lines = AutoTokenizer.from_pretrained(MODEL), []
    rows = ChainSums(terms=(15,), size=STEPS * 16).rows(seed)
    cursor = Cursor(len(rows), seed)
    for i in map(cursor.row, range(len(rows))):
        text, tokens = f"{rows[i].messages[0]['content']}\n", prompt_tokens(rows[i].messages, tokenizer)
        lines.append(json.dumps({"prompt": text, "tokens": tokens.tolist(), "answer": rows[i].answer}))
    path.write_text("\n".join(lines) + "\n")


def report(runs: Sequence[Run]) -> None:
    both = [*runs, *read_lines(CLAIM / "trl.jsonl")]
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward of all steps": (mean("reward", STEPS), 3),
        "of the last five": (mean("reward", STEPS, last=5), 3),
        "tokens an answer at the end": (mean("length", STEPS, last=5), 1),
    }
    print_table(both, ("proxima", "trl"), columns)
    for text, outcome in (("T1, all steps", mean("reward", STEPS)), ("the last five", mean("reward", STEPS, last=5))):
        print(f"- {text}, proxima − TRL: {told(difference(both, 'proxima', 'trl', outcome), MARGIN)}")
    curves = panel(both, ("proxima", "trl"), "reward", STEPS, title="the same job, 5 seeds", y="share right")
    draw(CLAIM / "trl.svg", [curves])


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", beside=run_trl)
