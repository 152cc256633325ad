"""Measure the cost of ranks: compare a step on one rank, and on two with twice the batch, with that of one process."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, finish, gemm_rate, need_model, parser, table

SIDES = {
    "one process": ("", 1),
    "one rank": ("torchrun", 1),
    "one rank on Ray": ("ray", 1),
    "two ranks": ("torchrun", 2),
}


def main() -> None:
    p = parser(__doc__, repeats=2)
    p.add_argument("--steps", type=int, default=8, help="of a run, of which the first two don't count (default: 8)")
    p.add_argument("--examples", type=int, default=32, help="of a step on one rank (default: %(default)s)")
    p.add_argument("--length", type=int, default=200, help="tokens of an example, about (default: %(default)s)")
    p.add_argument("--sharding", default="replicate", help="of the ranks, as in a recipe (default: %(default)s)")
    p.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="what is measured (default: all)")
    o = p.parse_args()
    model, rows = need_model(o.model), {name: list[dict[str, float]]() for name in o.sides}
    gemm = gemm_rate(1, "float32") / 1e9
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        text = " ".join(["word"] * (o.length // 2))
        data.write_text(f'{{"question": "Say it.", "answer": "{text}"}}\n' * 4 * o.examples, encoding="utf-8")
        for repeat in range(o.repeats):
            for name in o.sides:
                launcher, ranks = SIDES[name]
                examples = o.examples * ranks
                words = [f"model.path={model}", f"task.path={data}", f"train.steps={o.steps}"]
                words += [f"train.examples_per_step={examples}", f"folder={folder}/{name.replace(' ', '-')}-{repeat}"]
                rows[name].append(step_of(words, launcher, ranks, o.sharding, Path(words[-1].removeprefix("folder="))))
    middle = {name: statistics.median(row["rate"] for row in runs) for name, runs in rows.items()}
    alone = middle["one process"]
    examples = f"{o.examples} examples of about {o.length} tokens a rank"
    print(f"{Path(model).name}, SFT, {examples}, {o.sharding}, float32, one thread a rank")
    print(f"GEMM, one thread: {gemm:,.0f} GFLOP/s\n")
    cells = [[name, f"{rate:,.0f}", f"{rate / alone:.2f}"] for name, rate in middle.items()]
    print(table(["", "tokens/s of training", "of one process"], cells))
    finish(
        {
            "claim": "rank_speed",
            **{name.replace(" ", "_"): round(rate / SIDES[name][1] / alone, 4) for name, rate in middle.items()},
            "gemm": gemm,
            "rows": rows,
            "settings": {"steps": o.steps, "examples": o.examples, "length": o.length, "sharding": o.sharding},
            "model": Path(model).name,
        },
        o.json_out,
    )


def step_of(words: list[str], launcher: str, ranks: int, sharding: str, folder: Path) -> dict[str, float]:
    """Return the median tokens per second of a run's steps."""
    import json

    common = ["model.device=cpu", "model.compute_dtype=float32", "runtime.threads=1", "eval.before=false"]
    common += ["eval.after=false", "checkpoint.every=0", "train.tokens_per_micro_batch=2048"]
    recipe = str(HERE / "rank_speed" / "sft.yaml")
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        common += [f"placement={{kind: torchrun, sharding: {sharding}}}"]
    if launcher == "ray":
        common += [f"placement={{kind: ray, ranks: {ranks}, gpus_per_rank: 0, sharding: {sharding}}}"]
    command += ["-m", "proxima.cli.main", "train", recipe, *words, *common, "--quiet"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=HERE.parent, env=env, check=True, stdout=subprocess.PIPE)
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [record for record in records if record["kind"] == "train"][2:]
    return {"rate": statistics.median(record["tokens_per_second/train"] for record in steps)}
