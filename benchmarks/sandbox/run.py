"""Run unit tests and calls of the tool `python` in bubblewrap and without: at most 1.5 times as long, 10 ms more."""

import statistics
from collections.abc import Callable
from time import perf_counter

from benchmarks.harness import finish, parser, table
from proxima.process.code_runner import run_program
from proxima.process.sandbox import Sandbox, bubblewrap_problem
from proxima.reward.workers.run_unit_tests import run_unit_tests

ADD = "def add(a, b):\n    return a + b"
TESTS = {"assertions": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add([], [1]) == [1]"]}
RATIO, MORE_MS = 1.5, 10.0
NONE, COLD, AHEAD = "no sandbox", "bubblewrap, started for the call", "bubblewrap, started ahead"
SIDES = {NONE: Sandbox(), COLD: Sandbox(kind="bubblewrap"), AHEAD: Sandbox(kind="bubblewrap", ahead=True)}


def unit_test(sandbox: Sandbox) -> None:
    """Three assertions about a function."""
    result = run_unit_tests(
        code=ADD, tests=TESTS, setup="", entry_point=None, seconds=600.0, memory_mb=1024, sandbox=sandbox
    )
    if result["passed"] != 1:
        raise RuntimeError(f"right code fails in {sandbox}")


def tool_call(sandbox: Sandbox) -> None:
    """A program of one line."""
    ended, printed = run_program("print(sum(range(10)))", (5, 512), 600, errors=True, sandbox=sandbox)
    if (ended, printed) != (0, "45\n"):
        raise RuntimeError(f"a program prints {printed!r} in {sandbox}")


def timed(call: Callable[[Sandbox], None], calls: int, orders: list[list[str]]) -> dict[str, list[float]]:
    """Milliseconds of each call: for each list of sides, `calls` calls of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for order in orders:
        for name in order:
            call(SIDES[name])
        for _ in range(calls):
            for name in order:
                start = perf_counter()
                call(SIDES[name])
                taken[name].append(1000 * (perf_counter() - start))
    return taken


def main() -> None:
    o = parser(__doc__, repeats=100).parse_args()
    if why := bubblewrap_problem():
        raise RuntimeError(why)
    result: dict[str, dict[str, list[float]]] = {}
    rows, ratios, more = [], [], []
    for name, call in (("unit test", unit_test), ("tool call", tool_call)):
        # what is started ahead runs beside the call before it; or, with a pause, beside a call of the other side
        for way, orders in (("no pause", [[NONE, COLD], [AHEAD]]), ("pauses", [[NONE, AHEAD]])):
            taken = {side: times for side, times in timed(call, o.repeats, orders).items() if times}
            base = statistics.median(taken[NONE])
            for side, times in taken.items():
                median, p95 = statistics.median(times), sorted(times)[int(0.95 * len(times))]
                rows.append([name, way, side, f"{median:.1f}", f"{p95:.1f}", f"{median / base:.2f}"])
                result.setdefault(f"{name}, {way}", {})[side] = [round(median, 2), round(p95, 2)]
                if side == AHEAD:
                    ratios.append(median / base)
                    more.append(median - base)
    print(table(["call", "between calls", "side", "median, ms", "95 %, ms", "ratio"], rows))
    holds = max(ratios) <= RATIO and max(more) <= MORE_MS
    print(f"\nclaim {'holds' if holds else 'does NOT hold'}: {max(ratios):.2f} x, {max(more):+.1f} ms at most\n")
    facts = {"claim": "sandbox", "ratio": round(max(ratios), 2), "more_ms": round(max(more), 1), "ms": result}
    finish(facts, o.json_out)
