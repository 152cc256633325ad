"""Compare the tokens per second of the local engine with and without n-gram drafts, on repetitive and other texts."""

from pathlib import Path
from statistics import median

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table
from benchmarks.speculation.tasks import TASKS


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--rows", type=int, default=8, help="completions at once (default: %(default)s)")
    p.add_argument("--completions", type=int, default=64, help="of each task (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=64, help="most of a completion (default: %(default)s)")
    p.add_argument("--drafts", type=int, default=4, help="engine.num_speculative_tokens (default: %(default)s)")
    p.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    o = p.parse_args()
    settings = {"model": need_model(o.model), "threads": o.threads, "rows": o.rows, "tokens": o.tokens}
    settings |= {"completions": max(o.completions, o.rows), "tasks": o.tasks}
    plain, drafts = (
        Side(name, "speculation.engine_side", settings | {"num_speculative_tokens": most}, threads=o.threads)
        for name, most in (("without", 0), ("drafts", o.drafts))
    )
    measured = alternate([plain, drafts], o.repeats, discard=0)
    lines, result = [], {}
    for task in o.tasks:
        pairs = [(a[task], b[task]) for a, b in zip(measured[plain.name], measured[drafts.name], strict=True)]
        if any(a["digest"] != b["digest"] for a, b in pairs):
            raise RuntimeError(f"{task}: the completions differ")
        ratio = Spread([b["rate"] / a["rate"] for a, b in pairs])
        steps, drafted, accepted = (sum(b[name] for _, b in pairs) for name in ("steps", "drafted", "accepted"))
        result[task] = {
            "ratio": ratio.json(),
            "tok_per_s": [round(median(side["rate"] for side in sides)) for sides in zip(*pairs, strict=True)],
            "acceptance_rate": round(accepted / max(1, drafted), 3),
            "tokens_per_step": round(1 + accepted / steps, 3),
        }
        rates = [f"{rate:,}" for rate in result[task]["tok_per_s"]]
        figures = f"{result[task]['acceptance_rate']:.2f}", f"{result[task]['tokens_per_step']:.2f}"
        lines.append([task, *rates, ratio.text(".2f"), *figures])
    name = Path(o.model).name
    print(
        f"{name}, bfloat16, {o.rows} rows, at most {o.tokens} tokens, drafts of up to {o.drafts}, {o.threads} threads,"
    )
    print(f"temperature 1: median [min-max] of {o.repeats} pairs with the same completions, to the bit\n")
    print(table(["task", "tok/s", "with drafts", "ratio", "accepted", "tokens a step"], lines))
    del settings["model"]
    finish(
        {"claim": "speculation", "tasks": result, "model": name, "settings": settings | {"drafts": o.drafts}},
        o.json_out,
    )
