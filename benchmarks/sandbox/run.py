"""Run unit tests and calls of the tool `python` in bubblewrap, in a container and without a sandbox: in bubblewrap they
take at most 1.5 times as long and 10 ms more."""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from benchmarks.harness import finish, parser, table
from proxima.process.code_runner import run_by_servers, run_program
from proxima.process.sandbox import Sandbox, bubblewrap_problem
from proxima.reward.workers.run_unit_tests import run_unit_tests
from proxima_worlds.contained import CodeContainers
from proxima_worlds.containers import ContainerFailed

ADD = "def add(a, b):\n    return a + b"
TESTS = {"assertions": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add([], [1]) == [1]"]}
RATIO, MORE_MS = 1.5, 10.0
NONE, COLD, AHEAD = "no sandbox", "bubblewrap, started for the call", "bubblewrap, started ahead"
CONTAINER = "container"
SIDES = {NONE: Sandbox(), COLD: Sandbox(kind="bubblewrap"), AHEAD: Sandbox(kind="bubblewrap", ahead=True)}
SIDES[CONTAINER] = Sandbox(kind="container")


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


def percentile_95(times: list[float]) -> float:
    """The time that 95 % of the calls take at most."""
    return sorted(times)[int(0.95 * len(times))]


def main() -> None:
    o = parser(__doc__, repeats=100).parse_args()
    why = bubblewrap_problem()
    if why:
        raise RuntimeError(why)
    with contained() as container:
        compare(o, container)


@contextmanager
def contained() -> Iterator[list[str]]:
    """The side of containers, if podman or docker can start one here; prints how long the first took to start."""
    start = perf_counter()
    try:
        containers = CodeContainers(1, 1024)
    except ContainerFailed as error:
        print(f"no containers: {error}\n")
        yield []
        return
    print(f"the first container was ready after {perf_counter() - start:.1f} s\n")
    run_by_servers("container", containers.address)
    try:
        yield [CONTAINER]
    finally:
        containers.close()


def compare(o: Namespace, container: list[str]) -> None:
    """Run the calls, print and write the figures."""
    result: dict[str, dict[str, list[float]]] = {}
    rows, ratios, more = [], [], []
    for name, call in (("unit test", unit_test), ("tool call", tool_call)):
        # what is started ahead runs beside the call before it; or, with a pause, beside a call of the other side
        for way, orders in (("no pause", [[NONE, COLD], [AHEAD], container]), ("pauses", [[NONE, AHEAD, *container]])):
            taken = {side: times for side, times in timed(call, o.repeats, orders).items() if times}
            base, base95 = statistics.median(taken[NONE]), percentile_95(taken[NONE])
            for side, times in taken.items():
                median, p95 = statistics.median(times), percentile_95(times)
                ratio = f"{median / base:.2f}, {p95 / base95:.2f}"
                rows.append([name, way, side, f"{median:.1f}", f"{p95:.1f}", ratio])
                result.setdefault(f"{name}, {way}", {})[side] = [round(median, 2), round(p95, 2)]
                if side == AHEAD:
                    ratios += [median / base, p95 / base95]
                    more += [median - base, p95 - base95]
    print(table(["call", "between calls", "side", "median, ms", "95 %, ms", "ratios"], rows))
    holds = max(ratios) <= RATIO and max(more) <= MORE_MS
    print(f"\nclaim {'holds' if holds else 'does NOT hold'}: {max(ratios):.2f} x, {max(more):+.1f} ms at most\n")
    facts = {"claim": "sandbox", "ratio": round(max(ratios), 2), "more_ms": round(max(more), 1), "ms": result}
    finish(facts, o.json_out)
