"""Compare a training step of SFT and of DPO with TRL's SFTTrainer and DPOTrainer."""

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, Side, Spread, alternate, finish, need_model, parser, peer_python, table

WORDS = ["a", "first", "each", "number", "of", "apples", "costs", "three", "dollars", "so", "they", "half"]


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--rows", type=int, default=16, help="rows, or pairs of DPO, a step (default: %(default)s)")
    p.add_argument("--words", type=int, default=110, help="of an answer; a prompt has half (default: %(default)s)")
    p.add_argument("--micro-batch", type=int, help="rows TRL forwards at once (default: all, its fastest)")
    p.add_argument("--float32", action="store_true", help="both sides in float32 instead of bf16")
    p.add_argument(
        "--peer-python", help="an interpreter that has TRL, instead of the environment of step_vs_trl/peer.lock"
    )
    o = p.parse_args()
    python = o.peer_python or peer_python(HERE / "step_vs_trl")  # the same environment
    by_method: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in ("sft", "dpo"):
            steps = o.repeats + 2  # the first is discarded, the last ends the run
            settings = {
                "method": method,
                "model": need_model(o.model),
                "rows": o.rows,
                "steps": steps,
                "data": str(write_rows(Path(folder) / f"{method}.jsonl", method, o.rows * steps, o.words)),
                "threads": o.threads,
                "bf16": not o.float32,
                "lr": 1e-5,
                "seed": 1,
            }
            by_method[method] = measure(settings, python, o)
    rows = [[method, *row] for method, measurement in by_method.items() for row in measurement["rows"]]
    dtype = "float32" if o.float32 else "bf16 on float32 weights"
    peer_versions = next(iter(by_method.values()))["peer_versions"]
    print(f"{Path(o.model).name}, {o.rows} rows a step, {dtype}, {o.threads} threads, TRL {peer_versions['trl']};")
    print(f"median [min-max] of {o.repeats} steps, sides alternating, the first step discarded\n")
    print(table(["method", "side", "seconds a step", "times as fast"], rows))
    print("\nEqual: checkpoint, rows, AdamW at 1e-5, bf16, no gradient checkpointing; DPO's reference log-probs are")
    print("computed before the first step on both sides. Not equal: the order of the rows, and so a step's tokens.\n")
    result = {f"ratio_{method}": measurement["ratio"] for method, measurement in by_method.items()}
    result |= {
        "ratio": min(result.values()),
        "seconds": {method: measurement["seconds"] for method, measurement in by_method.items()},
    }
    kept = {"rows": o.rows, "micro_batch": o.micro_batch or o.rows, "bf16": not o.float32, "threads": o.threads}
    result |= {"claim": "offline_vs_trl", "model": Path(o.model).name, "settings": kept, "peer_versions": peer_versions}
    finish(result, o.json_out)


def measure(settings: Mapping[str, Any], python: str, o: Any) -> dict[str, Any]:
    """Measure both sides of a method."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = {**settings, "folder": folder, "micro_batch": o.micro_batch or o.rows}
        name = {"sft": "TRL SFTTrainer", "dpo": "TRL DPOTrainer"}[settings["method"]]
        peer = Side(name, "offline_vs_trl.trl_side", theirs, threads=o.threads, python=python)
        ours = Side("proxima", "offline_vs_trl.proxima_side", settings, threads=o.threads)
        taken = alternate([peer, ours], o.repeats)
    seconds = {name: Spread([x["seconds"] for x in runs]) for name, runs in taken.items()}
    base = seconds[peer.name].median
    return {
        "rows": [[name, s.text(".2f"), f"{base / s.median:.2f}"] for name, s in seconds.items()],
        "ratio": round(base / seconds[ours.name].median, 3),
        "seconds": {name: s.json() for name, s in seconds.items()},
        "peer_versions": peer.about["versions"],
    }


def write_rows(file: Path, method: str, count: int, words: int) -> Path:
    """Write rows with lengths spread as in GSM8K: questions of about 60 tokens, answers of about 120."""
    draw = random.Random(1)

    def text(median: float) -> str:
        length = min(300, max(5, round(draw.lognormvariate(0, 0.5) * median)))
        return " ".join(draw.choice(WORDS) for _ in range(length))

    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            row = {"prompt": text(words / 2)}
            row |= {"completion": text(words)} if method == "sft" else {"chosen": text(words), "rejected": text(words)}
            out.write(json.dumps(row) + "\n")
    return file
