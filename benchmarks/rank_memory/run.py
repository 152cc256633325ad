"""Compare a rank's memory as estimated by `proxima plan`, counted by `proxima plan --exact`, and held by processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, finish, need_model, parser, table

RECIPE = HERE.parent / "recipes" / "quickstart.yaml"
LIMIT = 900  # seconds for the ranks of one row
LAYOUTS: dict[str, tuple[str, ...]] = {
    "full": ("placement.sharding=full",),
    "update": ("placement.sharding=full", "placement.sharding.sum_gradients=update"),
    "offload": ("placement.sharding={kind: full, offload: true}",),
    "LoRA": ("placement.sharding=full", "model.lora={rank: 16}"),
    "hybrid": ("placement.sharding=hybrid",),
}
ALONE = ("full", "LoRA")  # layouts that one process has too
NODE = {"hybrid": 2}  # ranks per node; otherwise all are on one


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    p.add_argument("--tokens", type=int, default=1100, help="of a micro-batch (default: %(default)s)")
    p.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="of several ranks (default: all)")
    p.add_argument("--served", action="store_true", help="instead: rank 0 that stages weights for servers")
    p.add_argument("--length", type=int, default=256, help="tokens of a completion (default: %(default)s)")
    o = p.parse_args()
    words = [f"model.path={need_model(o.model)}", f"sampling.max_tokens={o.length}"]
    words += [f"train.tokens_per_micro_batch={o.tokens}", "model.device=cpu"]
    if o.served:
        served_rows(words, [ranks for ranks in o.ranks if ranks > 1], Path(o.model).name, o.json_out)
        return
    rows = []
    for ranks in o.ranks:
        for name in (name for name in o.layouts if (name in ALONE if ranks == 1 else name != "hybrid" or ranks > 2)):
            rows.append(row_of(words, ranks, name))
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    print(f"{Path(o.model).name}: two micro-batches of at most {o.tokens} tokens, the second update; GiB\n")
    names = ("formula", "rehearsal", "tensors", "resident")
    cells = [
        [str(row["ranks"]), row["layout"]]
        + [f"{row[name] / 2**30:.2f}" for name in names]
        + [f"{row[name] / row['tensors']:.2f}" for name in ("formula", "rehearsal")]
        for row in rows
    ]
    print(table(["ranks", "layout", *names, "formula / tensors", "rehearsal / tensors"], cells))
    print(
        "\nTensors: the most that are alive at once on rank 0, without what is offloaded. Resident: its peak RSS, less"
    )
    print("that before the model.")
    worst = max((abs(row[name] / row["tensors"] - 1) for row in rows for name in ("formula", "rehearsal")), default=0.0)
    settings = {"tokens": o.tokens, "length": o.length}
    finish(
        {
            "claim": "rank_memory",
            "worst": round(worst, 4),
            "rows": rows,
            "settings": settings,
            "model": Path(o.model).name,
        },
        o.json_out,
    )


def served_rows(words: list[str], counts: list[int], model: str, json_out: str | None) -> None:
    """Print what rank 0 holds while it stages the weights for servers, from a whole copy and a layer at a time."""
    rows = []
    words = [*words, "placement=torchrun", "placement.sharding=full"]
    for ranks in counts:
        for transfer in ("ipc", "folder"):
            for weights in ("whole", "layers"):
                options = {"transfer": transfer, "weights": weights}
                answer = measured(words, ranks, ranks, program="served", **options)
                rows.append({"ranks": ranks, **options, **answer})
                print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    names = ("tensors", "resident")
    cells = [
        [str(row["ranks"]), row["transfer"], row["weights"]]
        + [f"{row[when][name] / row['model']:.2f}" for when in ("first", "later") for name in names]
        + [f"{row[when]['seconds']:.1f}" for when in ("first", "later")]
        for row in rows
    ]
    heads = [f"{when}: {name}" for when in ("first", "later") for name in (*names,)]
    print(f"{model}: rank 0 beyond its part of the weights, over the bytes of the model; seconds\n")
    print(table(["ranks", "transfer", "weights", *heads, "first: s", "later: s"], cells))
    print("\nTensors: the most that are alive at once; resident: the peak of RssAnon. Both leave out the staged files.")
    finish({"claim": "rank_memory_served", "rows": rows, "model": model}, json_out)


def row_of(words: list[str], ranks: int, layout: str) -> dict[str, Any]:
    """Return one row of the table, in bytes."""
    from proxima.config.resolution import resolve
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import plan_recipe
    from proxima_plan.rehearsal.rehearsal import rehearse_recipe

    node = NODE.get(layout, ranks)
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    own = [word for word in LAYOUTS[layout] if ranks > 1 or not word.startswith("placement")]
    words = [*words, *(["placement=torchrun"] if ranks > 1 else []), *own]
    (devices,) = read_devices(f"{ranks}xB200-180G")
    formula = sum(plan_recipe(resolve(RECIPE, words), devices).memory.trainer.values())
    counted = rehearse_recipe(str(RECIPE), words, ranks).peak
    return {"ranks": ranks, "layout": layout, "formula": formula, "rehearsal": counted} | measured(words, ranks, node)


def measured(words: list[str], ranks: int, node: int, program: str = "rank", **options: str) -> dict[str, Any]:
    """Return the bytes that rank 0 of real processes holds, as a program of this folder prints them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = json.dumps({"recipe": str(RECIPE), "overrides": words, **options})
    group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(node), "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    group["CXX"] = "none"  # without kernels of a CPU, which keep other tensors than a GPU does
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.rank_memory.{program}", settings],
            cwd=HERE.parent,
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank % node)},
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        for rank in range(ranks)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{ranks} ranks took more than {LIMIT} s") from None
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {ranks} failed; its error is above")
    answer: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return answer
