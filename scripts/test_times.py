"""Measure the tests: where their time goes (tests/README.md), and which are slow.

    python scripts/test_times.py          # names what is slow among the tests of `make check`: mark it `slow`
    python scripts/test_times.py --all    # runs `make test` alone on the machine, and writes the tables anew
    python scripts/test_times.py --read FOLDER    # writes the tables of a run whose times were kept there

Each test process writes, for every test, its seconds, the CPU seconds of the process and those of the processes that it
started, and the seconds by cause. A fixture shared within a module is charged to each test that uses it when tests are
called slow, because the next of them would pay for it if the first were skipped; the tables charge it once. This file
is also the pytest plugin that takes the times.
"""

import argparse
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "README.md"
LIMIT = 0.1  # seconds
FILES = 10  # the most expensive, in the table
KEPT = {  # slow, but kept in `make check`: the house rules, a whole run of each kind
    "tests/test_house.py::test_no_name_says_old",
    "tests/test_house.py::test_nothing_is_unpickled",
    "tests/test_house.py::test_the_package_breaks_no_rule",
    "tests/cli/test_run.py::test_quiet_prints_the_outcome_and_what_is_odd_stands_in_the_log",
    "tests/runtime/offline/test_dpo_run.py::test_from_python",
    "tests/runtime/test_critic.py::test_behind_it_pruning_and_dynamic_sampling",
}
FOLDER = "PROXIMA_TEST_TIMES"  # environment variable: the folder in which each test process writes its times
CAUSES = {  # (module, function): what its seconds are spent on
    ("tests.tiny", "tiny"): "building tiny models",
    ("tests.tiny", "make_tiny"): "building tiny models",
    ("tests.model.families", "make"): "building tiny models",
    ("proxima.kernels.compiled", "library"): "compiling and loading kernels",
    ("ray", "init"): "starting Ray clusters",
    ("ray.cluster_utils", "Cluster"): "starting Ray clusters",
}
EARLY = ("tests.tiny", "tests.model.families", "proxima.kernels.compiled")  # before other modules take their functions
Row = dict[str, Any]  # test, seconds, charged, cpu, children, causes


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this process, and of the processes that it started and that have ended."""
    here, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    warm = sys.modules.get("tests.warm")
    forked = warm.CPU_SECONDS[0] if warm else 0.0
    return here.ru_utime + here.ru_stime, children.ru_utime + children.ru_stime + forked


class Times:
    """The seconds of each test; fixtures with a wider scope than a test are counted separately."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.rows: list[Row] = []
        self.skipped: set[str] = set()
        self.shared: dict[int, float] = {}
        self.elsewhere = 0.0
        self.causes: dict[str, float] = defaultdict(float)
        self.watched: set[tuple[str, str]] = set()
        self.inside = False

    def watch(self) -> None:
        """Time the functions of CAUSES in the modules that have been imported by now."""
        for module, name in CAUSES.keys() - self.watched:
            place = sys.modules.get(module)
            if place and hasattr(place, name):
                setattr(place, name, self.timed(getattr(place, name), CAUSES[module, name]))
                self.watched.add((module, name))

    def timed(self, function: Callable[..., Any], cause: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if self.inside:
                return function(*arguments, **options)
            start, self.inside = time.perf_counter(), True
            try:
                return function(*arguments, **options)
            finally:
                self.inside = False
                self.causes[cause] += time.perf_counter() - start

        for name in ("cache_clear", "cache_info"):
            if hasattr(function, name):
                setattr(call, name, getattr(function, name))
        return call

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("numprocesses", None):
            for module in EARLY:
                importlib.import_module(module)
            self.watch()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.watch()
        seconds = time.perf_counter() - self.start
        cpu, children = cpu_seconds()
        self.rows.append(_row("", seconds, cpu, children, {"importing and collecting": seconds}))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                seconds = time.perf_counter() - start
                self.elsewhere += seconds
                if fixturedef.scope != "session":
                    self.shared[id(fixturedef)] = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        self.watch()
        start, cpu, self.elsewhere = time.perf_counter(), cpu_seconds(), 0.0
        self.causes.clear()
        result = yield
        used = [some[-1] for some in item._fixtureinfo.name2fixturedefs.values() if some]
        seconds, after = time.perf_counter() - start, cpu_seconds()
        charged = seconds - self.elsewhere + sum(self.shared.get(id(fixture), 0.0) for fixture in used)
        row = _row(item.nodeid, seconds, after[0] - cpu[0], after[1] - cpu[1], self.causes)
        self.rows.append(row | {"charged": charged})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:  # a skip says nothing about machines on which the test runs
            self.skipped.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "reversed" in os.environ[FOLDER]:
            items.reverse()

    def pytest_sessionfinish(self) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        rows = [row | {"skipped": row["test"] in self.skipped} for row in self.rows]
        if rows:
            (Path(os.environ[FOLDER]) / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def _row(test: str, seconds: float, cpu: float, children: float, causes: dict[str, float]) -> Row:
    numbers = {"seconds": seconds, "charged": seconds, "cpu": cpu, "children": children}
    return {"test": test, **{name: round(value, 3) for name, value in numbers.items()}, "causes": dict(causes)}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times())


def measure(folder: Path, options: list[str]) -> list[Row]:
    """Run pytest once and return the rows of all its processes; that of the whole run comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {"PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | single | {FOLDER: str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "test_times", "-p", "no:cacheprovider", *options]
    start, busy = time.perf_counter(), machine_cpu_seconds()
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"error: pytest ended with exit code {code}; nothing was written")
    total = _row("run", time.perf_counter() - start, machine_cpu_seconds() - busy, 0.0, {})
    (folder / "run.json").write_text(json.dumps([total]), encoding="utf-8")
    return read(folder)


def machine_cpu_seconds() -> float:
    """Return the CPU seconds that all processes of this machine have used; NaN where there is no /proc."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)
    except OSError:
        return float("nan")
    return sum(map(int, (*fields[1:4], *fields[6:8]))) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk


def read(folder: Path) -> list[Row]:
    """Return the rows that test processes wrote."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.name == "run.json")
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def slow(seconds: dict[str, float], limit: float = LIMIT) -> set[str]:
    """Return the tests of at least `limit` seconds: a function if most of its cases are, single cases otherwise."""
    functions: dict[str, dict[str, float]] = defaultdict(dict)
    for test, spent in seconds.items():
        functions[test.partition("[")[0]][test] = spent
    names: set[str] = set()
    for function, cases in functions.items():
        long = {test for test, spent in cases.items() if spent >= limit}
        names |= {function} if len(long) > len(cases) / 2 else long
    return names


def waited(row: Row) -> float:
    """Return the seconds in which neither the test process nor a process that has ended since computed."""
    return max(0.0, row["seconds"] - row["cpu"] - row["children"])


def tables(rows: list[Row]) -> str:
    """Return the two tables of tests/README.md: by cause and by file."""
    (run,) = (row for row in rows if row["test"] == "run")
    tests = [row for row in rows if row["test"] not in ("run", "")]
    workers = [row for row in rows if row["test"] == ""]
    worker_seconds = sum(row["seconds"] for row in tests + workers)
    causes: dict[str, float] = defaultdict(float)
    cases: dict[str, list[float]] = defaultdict(list)
    for row in tests + workers:
        for cause, seconds in row["causes"].items():
            causes[cause] += seconds
    for row in tests:
        cases[row["test"].partition("[")[0]].append(row["seconds"])
        causes["waiting, for processes or for time"] += waited(row)
        causes["CPU time of other processes, which import or are forked"] += row["children"]
    causes["cases of a test after its longest"] = sum(sum(times) - max(times) for times in cases.values())
    lines = [
        f"{len(tests):,} tests in {run['seconds'] / 60:.1f} minutes; {run['cpu'] / 60:.1f} minutes of CPU time on the "
        f"machine; {worker_seconds / 60:.1f} minutes of {len(workers)} test processes.",
        "",
        "| seconds of test processes, by cause | seconds | share |",
        "|---|---|---|",
    ]
    for cause, seconds in sorted(causes.items(), key=lambda pair: -pair[1]):
        lines.append(f"| {cause} | {seconds:.0f} | {seconds / worker_seconds:.0%} |")
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for row in tests:
        sums = files[row["test"].partition("::")[0]]
        for i, value in enumerate((row["seconds"], row["cpu"], row["children"], waited(row))):
            sums[i] += value
    order = sorted(files, key=lambda file: -files[file][0])
    rest = [sum(column) for column in zip(*(files[file] for file in order[FILES:]), strict=True)] or [0.0] * 4
    lines += ["", "| file | seconds | its CPU | other processes' CPU | waited |", "|---|---|---|---|---|"]
    named = [*((f"`{file}`", files[file]) for file in order[:FILES]), (f"{len(order[FILES:])} more", rest)]
    lines += [f"| {name} | " + " | ".join(f"{value:.1f}" for value in sums) + " |" for name, sums in named]
    return "\n".join(lines)


def write_tables(rows: list[Row]) -> None:
    """Put the tables in the place of those in tests/README.md."""
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(r"(<!-- now -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{tables(rows)}\n{m[2]}", text, flags=re.DOTALL)
    PAGE.write_text(new, encoding="utf-8")


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--all", action="store_true", help="measure the slow tests too, and write the tables anew")
    p.add_argument("--read", type=Path, metavar="FOLDER", help="write the tables of a run whose times are there")
    p.add_argument("--workers", default="3", help="test processes (default: %(default)s)")
    o = p.parse_args()
    if o.read:
        write_tables(read(o.read))
        return
    options = ["-n", o.workers, "--dist", "worksteal", "-m", "not campaign" if o.all else "not slow and not campaign"]
    with tempfile.TemporaryDirectory() as place:
        runs = [measure(Path(place) / order, options) for order in ("forward", "reversed")]
    if o.all:
        write_tables(runs[0])
    times = [{r["test"]: r["charged"] for r in run if "::" in r["test"] and not r["skipped"]} for run in runs]
    shorter = {test: min(run.get(test, seconds) for run in times) for test, seconds in times[0].items()}
    if not o.all:
        unmarked = sorted(slow(shorter) - KEPT)
        print(
            "\n".join([f"{len(unmarked)} tests of `make check` take at least {LIMIT:g} s: mark them slow", *unmarked])
        )


if __name__ == "__main__":
    main()
