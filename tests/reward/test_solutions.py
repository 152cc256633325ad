"""No hostile solution passes a test, and each honest one does, in every sandbox."""

from contextlib import closing

import pytest

from proxima.process import code_runner
from proxima.process.sandbox import Sandbox, bubblewrap_problem
from proxima.reward.workers.run_unit_tests import run_unit_tests
from proxima_worlds.contained import CodeContainers
from tests.campaigns import campaign
from tests.containers import podman as podman
from tests.reward.solutions import ATTACKS, HONEST, HOSTILE, ROWS, SETUP, STYLES

HERE = "tests/reward/test_solutions.py"
SECONDS, LONG, MEMORY_MB = 4.0, 60.0, 1024
SANDBOXES = ["none", "bubblewrap", "container"]
SMALL = [("iterators", 0), ("operators", 1), ("arrays", 0), ("equality", 1), ("classes", 6), ("protocol", 4)]


@pytest.fixture
def sandbox(request):
    if request.param != "container":
        if request.param == "bubblewrap" and bubblewrap_problem():
            pytest.skip(bubblewrap_problem())
        yield Sandbox(kind=request.param, ahead=request.param == "bubblewrap")
        return
    request.getfixturevalue("podman")
    with closing(CodeContainers(1, MEMORY_MB)) as made:
        code_runner.run_by_servers("container", made.address)
        yield Sandbox(kind="container")
        code_runner.run_by_servers("container", "")


def passed(code, tests, sandbox, seconds=SECONDS, setup=""):
    """The share of the tests that pass, or what is wrong with the row."""
    try:
        return run_unit_tests(
            code=code, tests={"assertions": tests}, setup=setup, entry_point=None, seconds=seconds,
            memory_mb=MEMORY_MB, sandbox=sandbox,
        )["passed"]  # fmt: skip
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_a_few_hostile_solutions_pass_no_test():
    for kind, number in SMALL:
        assert passed(ATTACKS[kind][number], list(ROWS.values()), Sandbox(), LONG) == 0, (kind, number)


@pytest.mark.slow
def test_a_few_honest_solutions_pass():
    """All values in one process, since many would take long."""
    same = "def f(x): return x"
    tests = [test for code, test in HONEST if code == same]
    assert passed(same, tests, Sandbox(), LONG, SETUP) == 1
    for code, test in STYLES[1:4]:
        assert passed(code, [test], Sandbox(), LONG) == 1, code


@pytest.mark.parametrize(
    "sandbox", campaign(f"{HERE}::test_a_few_hostile_solutions_pass_no_test", SANDBOXES, 5), indirect=True
)
def test_no_hostile_solution_passes_a_test(sandbox):
    assert len({code for *_, code in HOSTILE}) >= 200
    assert len(ATTACKS) == 10
    rewarded = {}
    for place, (kind, number, besides, code) in enumerate(HOSTILE):
        rows = list(ROWS.values())
        first = place % len(rows)  # what ends the process meets another test first each time
        if result := passed(code, rows[first:] + rows[:first], sandbox):
            rewarded[kind, number, besides] = result
    assert rewarded == {}


@pytest.mark.campaign(f"{HERE}::test_a_few_hostile_solutions_pass_no_test", minutes=5)
def test_no_hostile_solution_passes_a_test_alone():
    rewarded = {}
    for kind, number, _, code in (each for each in HOSTILE if each[2] == "nothing"):
        for name, test in ROWS.items():
            if result := passed(code, [test], Sandbox()):
                rewarded[kind, number, name] = result
    assert rewarded == {}


@pytest.mark.parametrize("sandbox", campaign(f"{HERE}::test_a_few_honest_solutions_pass", SANDBOXES, 3), indirect=True)
def test_every_honest_solution_passes(sandbox):
    assert len(HONEST) >= 200
    styles = {(f"{code}\n", test) for code, test in STYLES}
    failed = {}
    for code, test in HONEST:
        result = passed(code, [test], sandbox, LONG, "" if (code, test) in styles else SETUP)
        if result != 1:
            failed[code, test] = result
    assert failed == {}
