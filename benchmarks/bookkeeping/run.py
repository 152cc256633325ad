"""Measure the cost of versions, journal, hooks and timeline in a synchronous run, as a share of a quickstart step."""

from benchmarks.harness import Side, Spread, finish, need_model, parser, table

PARTS = ("journal", "timeline", "hooks", "versions")
AT_MOST = 0.02


def main() -> None:
    p = parser(__doc__, repeats=3)
    o = p.parse_args()
    settings = {"model": need_model(o.model), "threads": o.threads, "steps": o.repeats}
    side = Side("proxima", "bookkeeping.side", settings, threads=o.threads)
    steps = side.about["steps"]
    side.close()
    seconds = {part: Spread([step.get(part, 0.0) for step in steps]) for part in (*PARTS, "waiting", "cpu")}
    shares = [sum(step.get(part, 0.0) for part in PARTS) / step["cpu"] for step in steps]
    whole = seconds["cpu"].median
    rows = [[part, f"{spread.median * 1e3:,.2f}", f"{spread.median / whole:.3%}"] for part, spread in seconds.items()]
    print(f"a step of recipes/quickstart.yaml, CPU; median of {len(steps)} steps after the first\n")
    print(table(["part", "ms", "of the step"], rows))
    print(f"\ntogether {max(shares):.3%} at most; the claim: less than {AT_MOST:.0%}\n")
    finish(
        {
            "claim": "bookkeeping",
            "share": max(shares),
            "reached": max(shares) < AT_MOST,
            "seconds": {name: spread.json() for name, spread in seconds.items()},
            "threads": o.threads,
        },
        o.json_out,
    )
