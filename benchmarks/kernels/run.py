"""How many kernels a layer of an update takes, what they read and write, and the share of a GPU's product rate that is
in reach; needs no GPU.

The real modules run without data, as eager torch runs them, on a fake device, and what is compiled is arranged by the
scheduler of torch's compiler.
"""

import math
from typing import Any

import numpy as np

from benchmarks.harness import finish, parser, table
from benchmarks.kernels.counted import counted_head, counted_pass
from benchmarks.kernels.scheduled import Fused, scheduled_head, scheduled_layer
from proxima.data.trajectory import Trajectory
from proxima.model.log_prob import ROWS_ON_CPU, rows_of_logits
from proxima_plan.devices import GIB, DeviceKind, device_kinds
from proxima_plan.rehearsal.fake_device import fake_device

BEFORE = ROWS_ON_CPU  # rows of logits that were alive at once whatever the device
# outside of the graphs of a layer, keys in the order of sequences; of one with experts, in kernels of torch's own
ENDS = ("index_select", "index_add", "new_zeros", "sort", "topk", "histc")
GROUPS, SIZE, PROMPT, LENGTH = 2, 8, 256, 1024  # of a micro-batch
TOKENS, RESPONSES = GROUPS * (PROMPT + SIZE * (LENGTH - 1)), GROUPS * SIZE * LENGTH
ROWS = (BEFORE, 2048, 4096, 8192)
SIDES = ("eager", "rows", "compiled", "flash3", "fused_head")
GOAL = 0.45
SHAPES = {  # hidden and intermediate size (of an expert), layers, heads, key heads
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8),
    "Qwen3-4B": (2560, 9728, 36, 32, 8),
    "Qwen3-30B-A3B": (2048, 768, 48, 32, 4),
}
EXPERTS = {"Qwen3-30B-A3B": (128, 8)}  # and those of a token


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="published models")
    p.add_argument("--devices", nargs="+", default=["H100-80G", "H200-141G"], help="of devices.toml")
    p.add_argument(
        "--eager", action="store_true", help="compile nothing, which takes a minute: only count eager kernels"
    )
    o = p.parse_args()
    fake_device()  # before the first backward pass of this process
    head = None if o.eager else scheduled_head()
    models = {}
    for name in o.shapes:
        if o.eager:
            layer = None
        else:
            layer = scheduled_layer(shape(name, 1, SHAPES[name][-1]))
        models[name] = eager_counts(name)
        if head is not None and layer is not None:
            models[name] |= compiled_counts(models[name], head, layer)
    rows = [row(model, device_kinds()[device]) for model in models.values() for device in o.devices]
    header = ["model", "kernels forward, backward", "compiled", "bytes of a token", "compiled"]
    print(table(header, [cells(model) for model in models.values()]))
    header = ["model", "device", "512 rows, eager", "rows by memory", "and compiled"]
    header += ["and flash attention 3", "or a fused head, at most"]
    sides = [[percent(side, each) for side in SIDES] for each in rows]
    print(table(header, [[each["model"], each["device"], *own] for each, own in zip(rows, sides, strict=True)]))
    reached = min(each.get("compiled", 0.0) for each in rows)
    finish({"claim": "kernels", "models": models, "rows": rows, "goal": GOAL, "reached": reached}, o.json_out)


def shape(name: str, layers: int = 0, factor: int = 1) -> Any:
    """The config of a published model, with so many layers (0: its own), and its sizes divided by `factor`."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    hidden, intermediate, own, heads, key_heads = SHAPES[name]
    sizes = {
        "hidden_size": hidden // factor,
        "intermediate_size": intermediate // factor,
        "num_hidden_layers": layers or own,
        "num_attention_heads": heads // factor,
        "num_key_value_heads": key_heads // factor,
        "head_dim": 128,
        "vocab_size": 151936 if factor == 1 else 64,
        "tie_word_embeddings": name not in EXPERTS,
    }
    if name not in EXPERTS:
        return Qwen3Config(**sizes)

    count, chosen = EXPERTS[name]
    experts = {"num_experts": count, "num_experts_per_tok": chosen, "norm_topk_prob": True}
    return Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=intermediate // factor)


def micro_batch() -> list[Trajectory]:
    return [
        Trajectory(
            uid=group,
            sample=sample,
            group=group,
            prompt_tokens=np.full(PROMPT, group, np.int32),
            tokens=np.zeros(LENGTH, np.int32),
        )
        for group in range(GROUPS)
        for sample in range(SIZE)
    ]


def eager_counts(name: str) -> dict[str, Any]:
    """Kernels, bytes and FLOPs of a layer, of the head and of the rest, in both passes over a micro-batch."""
    items, config = micro_batch(), shape(name)
    one, two = (counted_pass(shape(name, layers), items, BEFORE) for layers in (1, 2))
    layer = [after.minus(before) for after, before in zip(two, one, strict=True)]
    size = {"hidden": config.hidden_size, "vocabulary": config.vocab_size, "tokens": RESPONSES}
    heads = {rows: counted_head(**size, rows=rows) for rows in ROWS}
    outside = [sum(n for op, n in part.operations.items() if any(end in op for end in ENDS)) for part in layer]
    layer_bytes = sum(part.bytes for part in layer)
    return {
        "model": name,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "kernels": [part.count for part in layer],
        "layer_bytes": layer_bytes,
        "layer_flops": sum(part.flops for part in layer),
        "attention": attention_flops(config),
        "not_compiled": [part.products + part.attended + of for part, of in zip(layer, outside, strict=True)],
        "not_compiled_bytes": 5 * 2 * TOKENS * 2 * config.head_dim * config.num_key_value_heads,
        "head_bytes": {rows: head.bytes for rows, head in heads.items()},
        "head_flops": heads[BEFORE].flops,
        "head_weights": config.hidden_size * config.vocab_size,
        "vocabulary": config.vocab_size,
        "rest_bytes": sum(part.bytes for part in one) - layer_bytes - heads[BEFORE].bytes,
    }


def compiled_counts(model: dict[str, Any], head: tuple[Fused, int], layer: tuple[Fused, int]) -> dict[str, Any]:
    """Kernels and bytes of a compiled layer, and bytes of a logit."""
    (fused, scale), (of_logits, logits) = layer, head
    moved = sum(fused.forward + fused.backward) * TOKENS * model["hidden"] / scale
    kernels = zip(model["not_compiled"], (fused.forward, fused.backward), strict=True)
    return {
        "compiled_kernels": [before + len(after) for before, after in kernels],
        "compiled_layer_bytes": round(moved + model["not_compiled_bytes"]),
        "compiled_logit_bytes": round(sum(of_logits.forward + of_logits.backward) / logits, 2),
    }


def attention_flops(config: Any) -> float:
    """FLOPs of a micro-batch's attention in a layer's forward pass."""
    prompts = GROUPS * PROMPT * PROMPT / 2
    pairs = prompts + GROUPS * SIZE * LENGTH * (PROMPT + LENGTH / 2)
    return float(4 * config.num_attention_heads * config.head_dim * pairs)


def row(model: dict[str, Any], device: DeviceKind) -> dict[str, Any]:
    """The share of a device's bfloat16 peak that a forward and a backward pass reach at most: the FLOPs of the model
    over the time of products, of attention, and of what the other kernels read and write."""
    rates, depth = device.rates, model["layers"]
    peak, bandwidth = device.bf16 * 1e12, device.bandwidth * 1e12 * rates.decode
    useful = depth * (model["layer_flops"] + 3 * model["attention"]) + 0.75 * model["head_flops"]  # one is recomputed
    computes = (depth * model["layer_flops"] + model["head_flops"]) / (peak * (device.products or rates.products))
    attended = depth * 3.5 * model["attention"] / peak
    rows = rows_of_logits(int(device.memory * GIB), model["vocabulary"])
    moved = {
        "eager": depth * model["layer_bytes"] + model["head_bytes"][BEFORE],
        "rows": depth * model["layer_bytes"] + model["head_bytes"][rows],
    }
    if "compiled_logit_bytes" in model:
        summed = 10 * model["head_weights"] * math.ceil(RESPONSES / rows)  # the gradient of the head, chunk by chunk
        fused = model["compiled_logit_bytes"] * RESPONSES * model["vocabulary"] + summed
        moved["compiled"] = moved["flash3"] = depth * model["compiled_layer_bytes"] + fused
        moved["fused_head"] = depth * model["compiled_layer_bytes"]
    seconds = {
        name: computes + attended / (rates.flash3 if name == "flash3" else rates.flash2) + size / bandwidth
        for name, size in moved.items()
    }
    rest = model["rest_bytes"] / bandwidth
    shares = {name: useful / (each + rest) / peak for name, each in seconds.items()}
    facts = {
        "model": model["model"],
        "device": device.name,
        "logit_rows": rows,
        "products_alone": useful / (computes + attended / rates.flash2) / peak,
    }
    return facts | {name: round(share, 3) for name, share in shares.items()}


def cells(model: dict[str, Any]) -> list[str]:
    """A line of the first table; bytes are of a token in a layer."""
    out = [model["model"]]
    for kernels, size in (("kernels", "layer_bytes"), ("compiled_kernels", "compiled_layer_bytes")):
        known = kernels in model
        out.append("{}, {}".format(*model[kernels]) if known else "-")
        out.append(f"{model[size] / TOKENS / 1024:.0f} KiB" if known else "-")
    return [out[0], out[1], out[3], out[2], out[4]]


def percent(name: str, shares: dict[str, Any]) -> str:
    return f"{shares[name]:.0%}" if name in shares else "-"
