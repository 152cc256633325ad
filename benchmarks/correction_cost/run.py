"""Measure the cost of corrections, and of the mismatch measured in every run, as shares of a step's time and memory."""

from pathlib import Path

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--sequences", type=int, default=64, help="completions in the batch (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=512, help="tokens of a completion (default: %(default)s)")
    o = p.parse_args()
    settings = {"model": need_model(o.model), "threads": o.threads, "sequences": o.sequences, "tokens": o.tokens}
    side = Side("proxima", "correction_cost.side", settings, threads=o.threads)
    runs = alternate([side], o.repeats, discard=1)[side.name]
    names = side.about["measures"]
    seconds = {name: Spread([x["seconds"][name] for x in runs]) for name in ("step", *names)}
    memory = {name: max(x["memory"][name] for x in runs) for name in ("step", *names)}
    step = seconds["step"].median
    rows = [["forward, loss, backward, optimizer", seconds["step"].text(".2f"), "1", megabytes(memory["step"]), "1"]]
    rows += [
        [
            name,
            seconds[name].text(".4f"),
            f"{seconds[name].median / step:.5f}",
            megabytes(memory[name]),
            f"{memory[name] / memory['step']:.5f}",
        ]
        for name in names
    ]
    name = Path(o.model).name
    print(f"{name}, bf16 on float32 weights, {o.sequences} completions x {o.tokens} tokens, {o.threads} threads;")
    print(f"median [min-max] of {o.repeats}; the step's memory is the peak RSS of its process\n")
    print(table(["part of a step", "seconds", "share", "MB", "share"], rows))
    print("\nA correction is weights, veto, rejection and every metric, quantiles too, of the whole batch.\n")
    settings.pop("model")
    finish(
        {
            "claim": "correction_cost",
            "share": round(max(seconds[n].median for n in names) / step, 5),
            "memory_share": round(max(memory[n] for n in names) / memory["step"], 5),
            "seconds": {n: spread.json() for n, spread in seconds.items()},
            "memory_bytes": {n: round(size) for n, size in memory.items()},
            "settings": settings,
            "model": name,
        },
        o.json_out,
    )


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}"
