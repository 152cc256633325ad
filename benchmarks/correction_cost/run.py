"""What a correction with all its metrics costs, as a share of a training step."""

from pathlib import Path

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--sequences", type=int, default=64, help="completions in the batch (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=512, help="tokens of a completion (default: %(default)s)")
    o = p.parse_args()
    settings = {"model": need_model(o.model), "threads": o.threads, "sequences": o.sequences, "tokens": o.tokens}
    side = Side("proxima", "correction_cost.side", settings, threads=o.threads)
    found = alternate([side], o.repeats, discard=1)[side.name]
    step = Spread([x["step"] for x in found])
    levels = {name: Spread([x[name] for x in found]) for name in side.about["corrections"]}
    rows = [["forward, loss, backward, optimizer", step.text(".2f"), "1"]]
    rows += [[f"correction, {name}", t.text(".4f"), f"{t.median / step.median:.4f}"] for name, t in levels.items()]
    name = Path(o.model).name
    print(f"{name}, bf16 on float32 weights, {o.sequences} completions x {o.tokens} tokens, {o.threads} threads;")
    print(f"median [min-max] of {o.repeats}\n")
    print(table(["part of a step", "seconds", "share"], rows))
    print("\nA correction is weights, veto, rejection and every metric, quantiles too, of the whole batch.\n")
    worst = max(t.median for t in levels.values()) / step.median
    settings.pop("model")
    seconds = {"step": step.json()} | {name: t.json() for name, t in levels.items()}
    finish(
        {"claim": "correction_cost", "share": round(worst, 5), "seconds": seconds, "settings": settings, "model": name},
        o.json_out,
    )
