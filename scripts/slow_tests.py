"""Measure the tests, and list in tests/slow.txt those that `make check` skips.

    python scripts/slow_tests.py          # adds what is slow among the tests that count as fast
    python scripts/slow_tests.py --all    # measures every test and writes the list anew

Every test runs twice, the second time in reversed order, and the shorter time counts: whichever test comes first pays
for imports and session fixtures. A fixture shared within a module is charged to each test that uses it, because the
next of them would pay for it if the first were skipped. This file is also the pytest plugin that takes the times.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "slow.txt"
LIMIT = 0.1  # seconds
KEPT = {  # slow, but kept in `make check`: the house rules, a whole run of each kind
    "tests/test_house.py::test_no_name_says_old",
    "tests/test_house.py::test_nothing_is_unpickled",
    "tests/test_house.py::test_the_package_breaks_no_rule",
    "tests/cli/test_run.py::test_quiet_prints_the_outcome",
    "tests/runtime/offline/test_dpo_run.py::test_from_python",
    "tests/runtime/test_async_run.py::test_it_resumes_with_the_same_bounds_only",
    "tests/runtime/test_critic.py::test_behind_it_pruning_and_dynamic_sampling",
    "tests/runtime/state/test_resume.py::test_many_interruptions",
}
FOLDER = "PROXIMA_TEST_TIMES"  # environment variable: the folder in which each test process writes its times


class Times:
    """The seconds of each test; fixtures with a wider scope than a test are counted separately."""

    def __init__(self) -> None:
        self.tests: dict[str, float] = {}
        self.skipped: set[str] = set()
        self.shared: dict[int, float] = {}
        self.elsewhere = 0.0

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
        start, self.elsewhere = time.perf_counter(), 0.0
        result = yield
        used = [some[-1] for some in item._fixtureinfo.name2fixturedefs.values() if some]
        own = time.perf_counter() - start - self.elsewhere
        self.tests[item.nodeid] = own + sum(self.shared.get(id(fixture), 0.0) for fixture in used)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:  # a skip says nothing about machines on which the test runs
            self.skipped.add(report.nodeid)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "reversed" in os.environ[FOLDER]:
            items.reverse()

    def pytest_sessionfinish(self) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        (Path(os.environ[FOLDER]) / f"{name}.json").write_text(
            json.dumps({test: seconds for test, seconds in self.tests.items() if test not in self.skipped})
        )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times())


def measure(folder: Path, options: list[str]) -> dict[str, float]:
    """Run pytest once and return the seconds of each test."""
    folder.mkdir()
    environment = os.environ | {FOLDER: str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "slow_tests", "-p", "no:cacheprovider", *options]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"error: pytest ended with exit code {code}; tests/slow.txt is as it was")
    return {test: seconds for file in folder.glob("*.json") for test, seconds in json.loads(file.read_text()).items()}


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


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--all", action="store_true", help="measure the slow tests too and write the list anew")
    p.add_argument("--workers", default="2", help="test processes (default: %(default)s)")
    o = p.parse_args()
    options = ["-n", o.workers, "--dist", "worksteal", *([] if o.all else ["-m", "not slow"])]
    with tempfile.TemporaryDirectory() as place:
        runs = [measure(Path(place) / order, options) for order in ("forward", "reversed")]
    shorter = {test: min(run.get(test, seconds) for run in runs) for test, seconds in runs[0].items()}
    measured = {test.partition("[")[0] for test in shorter} if o.all else set()
    old = {test for test in LIST.read_text().splitlines() if test.partition("[")[0] not in measured}
    new = slow(shorter) - KEPT
    LIST.write_text("".join(f"{test}\n" for test in sorted(old | new)))
    print(f"{len(new - old)} added, {len(old | new)} in {LIST.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
