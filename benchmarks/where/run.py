"""Measure where the time of decoding, of an update and of a whole step goes, and the least needed on this machine."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Side, alternate, finish, need_model, parser, table
from benchmarks.where.phases import PHASES

SIZES = ("decode", "long", "prefill", "update", "step")
PARTS = ("decode", "long", "prefill", "update", "publish", "step")
NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "copies": "copies, casts, fills",
    "elementwise": "elementwise",
    "vocabulary": "sampling, log-probs",
    "fused": "fused, not divided",
    "overhead": "Python, dispatch, waiting",
}


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of a step (default: all)")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of products and cache")
    shape = {"nargs": "+", "type": int, "metavar": "N"}
    p.add_argument("--decode", default=[64, 64], help="rows, new tokens (default: 64 64)", **shape)
    p.add_argument("--long", default=[32, 1024, 48], help="rows, length, measured (default: 32 1024 48)", **shape)
    p.add_argument("--prefill", default=[16, 128], help="prompts, tokens (default: 16 128)", **shape)
    p.add_argument("--update", default=[64, 256, 64], help="sequences, prompt, response (default: 64 256 64)", **shape)
    p.add_argument("--step", default=[16, 8, 12], help="prompts, completions, tokens (default: 16 8 12)", **shape)
    p.add_argument("--attention", default="auto", help="of the update, as model.attention (default: %(default)s)")
    p.add_argument("--at-once", type=int, default=4096, help="tokens of a forward pass of it (default: %(default)s)")
    p.add_argument("--tiny", action="store_true", help="smallest sizes: tests the command, says nothing about speed")
    o = p.parse_args()
    if o.tiny:
        vars(o).update(decode=[8, 3], long=[8, 32, 4], prefill=[2, 8], update=[2, 8, 4], step=[2, 2, 3])
    model = need_model(o.model)
    import torch

    torch.set_num_threads(o.threads)
    from benchmarks.where.parts import Parts, Phase

    parts = Parts(model, o.dtype, o.repeats, tiny=o.tiny)
    rows, length, measured = o.long
    calls: Mapping[str, Callable[[], dict[str, Phase]]] = {
        "decode": lambda: parts.decode(*o.decode),
        "long": lambda: parts.decode(rows, measured, max(1, (length - measured) // 2)),
        "prefill": lambda: parts.prefill(*o.prefill),
        "update": lambda: parts.update(*o.update, attention=o.attention, at_once=o.at_once),
        "publish": parts.publish,
    }
    titles = {
        "decode": f"{o.decode[0]} rows x {o.decode[1]} tokens",
        "long": f"{measured} tokens in the middle of {rows} rows x {length}",
        "prefill": f"{o.prefill[0]} prompts x {o.prefill[1]} tokens",
        "update": f"{o.update[0]} sequences of {o.update[1]} + {o.update[2]} tokens, shared prompts",
        "publish": "weights to the engine",
    }
    phases: dict[str, Any] = {}
    for name in o.only:
        if name == "step":
            continue
        for phase, measured_phase in calls[name]().items():
            key = phase if name != "long" else "decode, long"
            phases[key] = measured_phase
            print(f"{describe(key, titles[name], measured_phase)}\n", flush=True)
    if phases:
        machine = parts.machine
        print(f"{summary(phases)}\n\n{o.threads} threads; {machine.text()}\n")
    result: dict[str, Any] = {
        "claim": "where",
        "phases": {name: measured_phase.json() for name, measured_phase in phases.items()},
    }
    if phases:
        result["roofs"] = machine.json()
    if "forward" in phases:  # 6 operations a weight and token, of the product rate: what others report as MFU
        seconds = phases["forward"].median + phases["backward"].median
        result["mfu"] = 6 * parts.shapes.parameters * phases["forward"].tokens / seconds / machine.flops
        print(f"model FLOP/s of forward and backward: {result['mfu']:.1%} of the product rate\n")
    if "step" in o.only:
        result["step"] = step(o, model)
    shapes = {name: getattr(o, name) for name in (*SIZES, "attention", "at_once")}
    settings = {"threads": o.threads, "dtype": o.dtype, "repeats": o.repeats, "device": str(parts.device), **shapes}
    finish(result | {"model": Path(model).name, "settings": settings}, o.json_out)


def describe(name: str, title: str, phase: Any) -> str:
    """Format a phase by kind: seconds, share, the least that each takes, and the longest operations."""
    rows = []
    for kind in NAMES:
        seconds, limit = phase.kinds.get(kind, 0.0), phase.limits.get(kind, 0.0)
        if seconds or limit:
            cells = [NAMES[kind], ms(seconds), f"{seconds / phase.median:.0%}"]
            rows.append([*cells, ms(limit) if limit else "0", f"{limit / seconds:.0%}" if limit and seconds else ""])
    if phase.limit:
        share = f"{phase.limit / phase.median:.0%}"
    else:
        share = ""
    rows.append(["all", ms(phase.median), "", ms(phase.limit), share])
    longest = ", ".join(f"{each.partition(' ')[2]} {ms(s)}" for each, s in list(phase.operations.items())[:6])
    head = f"{name}: {title}; {ms(min(phase.seconds))} to {ms(max(phase.seconds))} ms"
    cells = table([name, "ms", "share", "limit ms", "limit / time"], rows)
    return f"{head}\n{cells}" + (f"\nlongest: {longest}" if longest else "")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def summary(phases: Mapping[str, Any]) -> str:
    """Return one line per phase: its rate, the share of each kind, and the share of the limit."""
    rows = []
    for name, phase in phases.items():
        shares = [f"{phase.kinds.get(kind, 0.0) / phase.median:.0%}" for kind in NAMES]
        if phase.tokens:
            rate = f"{phase.tokens / phase.median:,.0f}"
        else:
            rate = ""
        products = phase.limits.get("products", 0.0) / phase.median
        limits = [f"{products:.0%}" if products else "", f"{phase.limit / phase.median:.0%}" if phase.limit else ""]
        rows.append([name, ms(phase.median), rate, *shares, *limits])
    kinds = ["products", "attention", "copies", "elementwise", "sampling", "fused", "Python"]
    return table(["", "ms", "tok/s", *kinds, "products alone / time", "limit / time"], rows)


def step(o: Any, model: str) -> dict[str, list[float]]:
    """Print and return the median and range of each phase's seconds in a whole step of the demo; `host` is the rest."""
    prompts, completions, tokens = o.step
    settings = {"model": model, "threads": o.threads, "prompts": prompts, "completions": completions, "updates": 2}
    settings |= {"max_tokens": tokens, "bf16": o.dtype == "bfloat16", "lr": 1e-5, "seed": 1, "steps": o.repeats + 3}
    settings |= {"algorithm": "cppo", "skip": False}
    side = Side("step", "where.step_side", settings, threads=o.threads)
    steps = alternate([side], o.repeats)["step"]
    columns = {name: [step_figures["phases"][name] for step_figures in steps] for name in PHASES}
    total = [step_figures["seconds"] for step_figures in steps]
    columns["host"] = [whole - sum(column[i] for column in columns.values()) for i, whole in enumerate(total)]
    columns["whole step"] = total
    middle = statistics.median(total)
    rows = [
        [name, ms(statistics.median(own)), f"{statistics.median(own) / middle:.0%}"] for name, own in columns.items()
    ]
    print(
        f"a step of `proxima train`: {prompts} prompts x {completions} completions x {tokens} tokens, nothing skipped"
    )
    print(f"{table(['phase', 'ms', 'share'], rows)}\n")
    return {name: [round(x, 5) for x in (statistics.median(own), min(own), max(own))] for name, own in columns.items()}
