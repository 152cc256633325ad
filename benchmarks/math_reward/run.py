"""Score ten thousand answers with the reward `math`, one in a hundred hostile: none rewarded wrongly, at least 300 a
second."""

from typing import Any

from benchmarks.harness import Side, Spread, alternate, finish, parser, table

NEEDED = 300.0  # answers a second, on two cores


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--answers", type=int, default=10_000, help="completions to score (default: %(default)s)")
    p.add_argument("--group", type=int, default=8, help="completions a prompt (default: %(default)s)")
    p.add_argument("--hostile", type=float, default=0.01, help="share that means harm (default: %(default)s)")
    p.add_argument("--workers", type=int, default=2, help="worker processes (default: %(default)s)")
    p.add_argument("--plain", type=int, default=2000, help="answers to math-verify alone (default: %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="of the answers (default: %(default)s)")
    o = p.parse_args()
    settings = {name: getattr(o, name) for name in ("answers", "group", "hostile", "workers", "plain", "seed")}
    ours = Side("proxima", "math_reward.side", settings, threads=1)
    plain = Side("math-verify alone", "math_reward.plain_side", settings, threads=1)
    measured = alternate([ours, plain], o.repeats, discard=0)
    scored, alone = measured[ours.name], measured[plain.name]
    rate = Spread([o.answers / x["seconds"] for x in scored])
    cpu = Spread([1000 * x["cpu_seconds"] / o.answers for x in scored])
    alone_rate = Spread([x["answers"] / x["seconds"] for x in alone])
    alone_cpu = Spread([1000 * x["cpu_seconds"] / x["answers"] for x in alone])
    start = Spread([x["start"] for x in scored])
    about = ours.about
    print(
        f"{o.answers:,} answers, {o.hostile:.1%} hostile, in groups of {o.group}; {o.workers} workers; median "
        f"[min-max] of {o.repeats}"
    )
    print(
        f"of {about['ordinary']:,} ordinary ones {about['to_workers']:,} need algebra, {about['different']:,} of "
        "them different\n"
    )
    rows = [
        [f"proxima, {o.workers} workers", rate.text(), cpu.text(".1f"), start.text(".1f")],
        ["math-verify alone, in one process, no hostile answers", alone_rate.text(), alone_cpu.text(".1f"), ""],
    ]
    print(table(["side", "answers/s", "CPU ms an answer", "start, s"], rows))
    fates = sorted(
        {fate for x in scored for fate in x["fates"]} | {"hostile rewarded", "ordinary misjudged", "ordinary invalid"}
    )
    counts = {fate: Spread([x["fates"].get(fate, 0) for x in scored]) for fate in fates}
    print("\n" + table(["fate", "answers"], [[fate, count.text()] for fate, count in counts.items()]))
    problems = complaints(scored, o.answers, o.workers)
    replaced = Spread([x["replaced"] for x in scored])
    print(
        f"\nworkers replaced on the way: {replaced.text()}; at work at the end: "
        f"{min(x['workers_at_the_end'] for x in scored)}"
    )
    print(
        "; ".join(problems)
        if problems
        else "every answer has its verdict, nothing was rewarded that should not be, no worker is missing"
    )
    print(
        f"claim {'holds' if not problems and rate.median >= NEEDED else 'does NOT hold'}: {rate.median:,.0f} of "
        f"{NEEDED:.0f} answers/s\n"
    )
    result = {
        "claim": "math_reward",
        "per_second": rate.json(),
        "ratio": round(rate.median / NEEDED, 2),
        "cpu_ms": cpu.json(),
        "alone": {"per_second": alone_rate.json(), "cpu_ms": alone_cpu.json()},
        "start": start.json(),
        "fates": {fate: count.json() for fate, count in counts.items()},
        "replaced": replaced.json(),
        "problems": problems,
        "answers": {key: about[key] for key in ("ordinary", "to_workers", "different")},
        "settings": settings,
        "versions": math_versions(),
    }
    finish(result, o.json_out)


def complaints(scored: list[dict[str, Any]], answers: int, workers: int) -> list[str]:
    """Return the findings that contradict the claim, apart from the speed."""
    problems = []
    for fate in ("hostile rewarded", "ordinary misjudged", "ordinary invalid"):
        if any(x["fates"].get(fate) for x in scored):
            problems.append(f"{max(x['fates'].get(fate, 0) for x in scored)} {fate}")
    if any(x["answered"] != answers for x in scored):
        problems.append("answers without a verdict")
    if any(x["workers_at_the_end"] != workers for x in scored):
        problems.append("a worker is missing at the end")
    return problems


def math_versions() -> dict[str, str]:
    """Return the versions of the packages that do the algebra."""
    from importlib import metadata

    return {
        name: metadata.version(name)
        for name in ("math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime")
    }
