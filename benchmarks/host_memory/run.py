"""Memory of a rank in a step and while new weights go to servers: planned, and held by two processes of a small model.

On a CPU the memory of a rank is that of the host. On GPUs the same bytes are on the devices, and the host has none.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser, table
from benchmarks.rank_memory.run import RECIPE, measured
from proxima_plan.memory import sync_memory

RANKS = 2
WORDS = (
    "placement=torchrun",
    "placement.sharding=full",
    "model.device=cpu",
    "sampling.max_tokens=64",
    "model.compute_dtype=float32",
)
WITHIN = 0.15  # of what the processes hold in a step; while weights are sent they hold at most what is planned


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--layers", type=int, default=8, help="of the model, of width 256 (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=600, help="of a micro-batch (default: %(default)s)")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *WORDS,
            f"model.path={small_model(Path(folder), o.layers)}",
            f"train.tokens_per_micro_batch={o.tokens}",
        ]
        rows = rows_of(words)
    cells = []
    for row in rows:
        sizes = [f"{row[name] / 2**20:,.0f}" for name in ("planned", "tensors", "resident")]
        cells.append([row["what"], *sizes, f"{row['planned'] / row['tensors']:.2f}"])
    print(f"{RANKS} ranks, gloo, {o.layers} layers of width 256; MiB of rank 0\n")
    print(table(["", "planned", "tensors", "resident", "planned / tensors"], cells))
    print(
        "\nTensors: the most that are alive at once; of a sync those beside the weights. Resident: their peak in RSS."
    )
    step, *syncs = rows
    ratio = step["planned"] / step["tensors"]
    within = abs(ratio - 1) <= WITHIN and all(row["tensors"] <= row["planned"] for row in syncs)
    finish({"claim": "host_memory", "rows": rows, "step": round(ratio, 3), "within": within}, o.json_out)


def rows_of(words: list[str]) -> list[dict[str, Any]]:
    """Return a step, the first sync and a later one: bytes of rank 0."""
    from proxima.config.resolution import resolve
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import plan_recipe

    (devices,) = read_devices(f"{RANKS}xB200-180G")
    plan = plan_recipe(resolve(RECIPE, words), devices)
    recipe = plan.recipe
    step = measured(words, RANKS, RANKS)
    sync = measured(words, RANKS, RANKS, program="served", transfer="ipc", weights="layers")
    rows = [{"what": "a step", "planned": sum(plan.memory.trainer.values())} | step]
    for what, first in (("first sync", True), ("later sync", False)):
        planned = sync_memory(recipe.spec, recipe.model, replace(plan.layout, node=RANKS), first=first)
        held = sync["first" if first else "later"]
        rows.append({"what": what, "planned": planned, "tensors": held["tensors"], "resident": held["resident"]})
    return rows


def small_model(folder: Path, layers: int) -> Path:
    """Write a Llama of random weights, with the tokenizer of the tests."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    sizes: Any = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=8192, num_hidden_layers=layers, max_position_embeddings=2048, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
