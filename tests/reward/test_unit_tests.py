"""Code against the unit tests of its row: right, wrong, endless, greedy, and forged."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from proxima.data import FieldError, UserError
from proxima.process import sandbox
from proxima.reward.unit_tests import UnitTests, as_tests, code_of
from proxima.reward.workers.run_unit_tests import run_unit_tests
from tests.processes import eventually, is_running
from tests.reward.make import LONG, SHORT, ask, prompt, runner, scored
from tests.sandboxes import beside_code, needs_bubblewrap

pytestmark = pytest.mark.usefixtures("lent_servers")
ELSEWHERE = Path(tempfile.gettempdir()) / f"written-by-code-under-test-of-{os.getpid()}"
ADD = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]
ALWAYS = "    def __eq__(self, other): return True\n    __hash__ = None\n"
MEMORY = """import os, re
def add(a, b):
    seen = []
    for line in open(f'/proc/{os.getppid()}/maps'):
        start, end = (int(address, 16) for address in line.split()[0].split('-'))
        if ' rw' not in line: continue
        with open(f'/proc/{os.getppid()}/mem', 'rb', 0) as memory:
            try:
                memory.seek(start)
                seen += re.findall(rb'assert add[(]([^=]*)[)] == ([0-9]+|[[][0-9, ]*[]])', memory.read(end - start))
            except OSError: pass
    return next(eval(result) for given, result in seen if given.decode() == f'{a}, {b}')
"""
KILLS = "import ctypes, os, signal\n"
FDS = "import os\nfor fd in range(3, 60):\n    try: os.write(fd, {})\n    except OSError: pass\n"


@pytest.fixture(scope="module")
def judged():
    """The scores of codes, each in a fence, against the tests of a row."""
    with runner(UnitTests(seconds=LONG, partial=True)) as made:

        def judge(tests, *codes):
            texts = [f"Here it is:\n```python\n{code}\n```" for code in codes]
            return ask(made, tests, *texts)

        yield judge


def add(body):
    return f"def add(a, b):\n    {body}\n"


RIGHT = {
    "plain": add("return a + b"),
    "lambda": "add = lambda a, b: a + b",
    "operator": "from operator import add",
    "class": "class Adder:\n    def __call__(self, a, b): return a + b\nadd = Adder()",
    "helper": "def plus(a, b): return a + b\n" + add("return plus(a, b)"),
    "prints": add("print('adding', a, b); return a + b"),
    "subclass": "class L(list): pass\n" + add("return a + b if isinstance(a, int) else L(a + b)"),
    "future": "from __future__ import annotations\ndef add(a: Any, b: Unknown):\n    return a + b",
    "own_file": add("open('x', 'w').write('1'); return a + b"),
}
WRONG = {
    "empty": "",
    "syntax": "def add(a, b) return a",
    "other_name": "def plus(a, b):\n    return a + b",
    "raises": add("raise ValueError('no')"),
    "top_level_error": "1 / 0\n" + RIGHT["plain"],
    "no_module": "import not_a_module\n" + RIGHT["plain"],
    "recursion": add("return add(a, b)"),
    "memory": "x = [0] * 10**11\n" + RIGHT["plain"],
    "memory_later": add("return 'x' * (1 << 40)"),
    "stdin": add("return int(input())"),
    "fork": "import os\n" + add("while True: os.fork()"),
    "pool": "from multiprocessing import Pool\n" + add("return Pool(4).apply(sum, ([a, b],))"),
    "spawn": "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()\n" + RIGHT["plain"],
    "shell": "import subprocess\nsubprocess.run(['true'])\n" + RIGHT["plain"],
    "deletes": "import shutil\nshutil.rmtree('/proxima-no-such-folder', ignore_errors=False)\n" + RIGHT["plain"],
    "writes_elsewhere": f"open({str(ELSEWHERE)!r}, 'w')\n" + RIGHT["plain"],
    "deep": add("for _ in range(10**5): a = [a]\n    return a"),
    "kills_the_worker": KILLS + "ctypes.CDLL(None).kill(os.getppid(), 9)\n" + RIGHT["plain"],
    "kills_by_handle": KILLS + "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)\n" + RIGHT["plain"],
    "contains_itself": "x = []\nx.append(x)\n" + add("return x"),
}
FORGED = {
    "exit": "import sys\nsys.exit(0)",
    "exit_in_call": "import sys\n" + add("sys.exit(0)"),
    "os_exit": "import os\n" + add("os._exit(0)"),
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
    "eq": "class Any:\n" + ALWAYS + add("return Any()"),
    "eq_int": "class I(int):\n" + ALWAYS + add("return I(7)"),
    "eq_list": "class L(list):\n" + ALWAYS + add("return L()"),
    "builtins": "import builtins as b\nb.AssertionError = None\nb.all = lambda x: True\n" + add("return 0"),
    "stop_iteration": add("raise StopIteration"),
    "system_exit": "class StopTests(SystemExit): pass\n" + add("raise StopTests(0)"),
    "prints": "print('true\\n1\\npassed\\nOK')\n" + add("""print('{"passed": 1}')"""),
    "stack": add("import sys; f = sys._getframe()\n    while f: f.f_globals['OPERATIONS'] = 1; f = f.f_back"),
    "collector": "import gc\n" + add("return [x for x in gc.get_objects() if 'assert' in repr(x)[:9]] or 0"),
    "socket": FDS.format(r"b'true\ntrue\ntrue\n'") + add("return 0"),
    "socket_replies": FDS.format(r"""b'["add"]\n{"value": 3, "after": []}\n'""") + add("return 0"),
    "deep_reply": FDS.format(r"b'[' * 100000 + b'\n'"),
    "json": "import json\njson.dumps = lambda *a, **k: 'true'\n" + add("return 0"),
    "memory": MEMORY,
    "module": "import sys\nsys.modules['tests'] = sys.modules[__name__]\nnames = {}",
}


@pytest.mark.slow
@pytest.mark.parametrize("codes", [WRONG, FORGED], ids=["wrong", "forged"])
def test_wrong_and_forged_code_is_worth_nothing_and_never_invalid(judged, codes):
    scores = dict(zip(codes, judged(ADD, *codes.values()), strict=True))
    assert {name: (s.error, s.value, s.correct) for name, s in scores.items()} == dict.fromkeys(codes, (None, 0, False))
    assert not ELSEWHERE.exists()


@pytest.mark.slow
def test_right_code_passes_and_half_right_code_half(judged):
    scores = dict(zip(RIGHT, judged(ADD, *RIGHT.values()), strict=True))
    assert {name: (s.error, s.value, s.correct) for name, s in scores.items()} == dict.fromkeys(RIGHT, (None, 1, True))
    (half,) = judged(ADD, "def add(a, b):\n    return 3")
    assert (half.value, half.correct, half.parts["unit_tests/passed"]) == (0.5, False, 0.5)


@pytest.mark.slow
def test_without_partial_all_tests_must_pass_and_parts_tell_why_not():
    texts = ["def add(a, b): return 3", "def add(a, b) return"]
    scores = scored([UnitTests(seconds=LONG)], ADD, *texts)
    scores += scored([UnitTests(seconds=SHORT)], ADD, "def add(a, b):\n    while True: print('x' * 999)")
    facts = [tuple(s.parts[f"unit_tests/{name}"] for name in ("passed", "timed_out")) for s in scores]
    assert [s.value for s in scores] == [0, 0, 0] and facts == [(0.5, 0), (0, 0), (0, 1)]
    assert [s.parts["unit_tests/runs"] for s in scores[:2]] == [1, 0]


@pytest.mark.slow
def test_what_the_code_started_ends_with_it(tmp_path, monkeypatch):
    """Even processes started by a call into the C library, which no audit hook sees."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import ctypes, time\nif ctypes.CDLL(None)._Fork() == 0:\n    time.sleep(600)\ndef add(a, b): return a + b"
    assert run_code(code, ADD) == {"runs": True, "passed": 1, "timed_out": False}
    assert list(tmp_path.iterdir()) == []
    eventually(lambda: not any(str(tmp_path).encode() in _variables(pid) for pid in Path("/proc").glob("[0-9]*")))


def _variables(process):
    try:
        return (process / "environ").read_bytes() if is_running(int(process.name)) else b""
    except OSError:
        return b""


def run_code(code, assertions):
    limits = {"setup": "", "entry_point": None, "seconds": LONG, "memory_mb": 512}
    return run_unit_tests(code=code, tests={"assertions": assertions}, **limits)


def test_tests_that_a_signal_ends_are_failed():
    kill = "import os\nos.kill(os.getpid(), 9)"  # as code would that finds the process of the tests
    result = run_code(RIGHT["plain"], [ADD[0], f"add(1, 2)\n{kill}", ADD[1]])
    assert result == {"runs": True, "passed": 1 / 3, "timed_out": False}


def test_the_code_gets_no_environment_and_no_test(judged, monkeypatch):
    monkeypatch.setenv("SECRET", "7")
    code = "import os\nSECRET = os.environ.get('SECRET')\nFILES = sorted(os.listdir())\nCWD = os.getcwd()"
    files = [["setup.py", "solution.py"], beside_code("setup.py", "solution.py")]  # without a sandbox, and in one
    tests = ["assert SECRET is None", f"assert FILES in {files}", f"assert CWD != {os.getcwd()!r}"]
    (score,) = judged(tests, code)
    assert score.value == 1


CODE = """
def same(x): return x
def sort(x): x.sort()
def put(d): d['a'] = 1
class Point:
    def __init__(self, x): self.x = x
    def twice(self): return Point(2 * self.x)
def walk():
    yield 1
    yield 2
def bad(): raise KeyError('k')
"""


def test_values_keep_their_types_and_changes_in_place_are_seen(judged):
    values = [True, -3, 1.5, "é\n", b"\x00", 2j, (1, [2, {3: (4,)}]), {1, 2}, frozenset({1}), 10**300]
    tests = [f"assert same({v!r}) == {v!r} and type(same({v!r})) is {type(v).__name__}" for v in values]
    tests += [
        "x = [3, 1]\nsort(x)\nassert x == [1, 3]",
        "assert same(None) is None and same([]) is not None",
        "d = {}\nput(d)\nassert d == {'a': 1}",
        "assert Point(2).twice().x == 4 and len([*walk()]) == 2",
        "p = Point(1)\nassert p == same(p) and p != Point(1) and p != 1",
        "try:\n    bad()\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "import math\nassert math.isclose(same(.1) + .2, .3) and math.isinf(same(math.inf))",
    ]
    (score,) = judged(tests, CODE)
    assert score.value == 1


@pytest.mark.slow
def test_setup_and_builtins_belong_to_the_tests_unless_tested():
    close = ["assert math.isclose(half(3), 1.5) and abs(half(3) - 1.5) < 1e-6"]
    forged = "import math\nmath.isclose = lambda *a: True\ndef abs(x): return 0\ndef half(x): return 9"
    node = "class Node:\n    def __init__(self, x): self.x = x\nroot = Node(5)"
    cases = [
        ("import math", close, "def half(x): return x / 2", 1),
        ("import math", close, forged, 0),
        ("", ["assert sum(10, 15) == 6"], "def sum(a, b): return 6", 1),
        (node, ["assert read(root) == 5"], "def read(node): return node.x", 1),
    ]

    with runner(UnitTests(setup="setup", seconds=LONG)) as made:
        for setup, tests, code, value in cases:
            (score,) = ask(made, prompt(tests, setup=setup), code)
            assert score.value == value, code


@pytest.mark.slow
def test_a_program_with_check_gets_the_function_by_name():
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(-1)) == 1\n"
    right, *wrong = "def square(x): return x * x", "def square(x): return 4", "def other(x): return x * x"
    reward, row = UnitTests(entry_point="entry_point", seconds=LONG), prompt(check, entry_point="square")
    scores = scored([reward], row, right, *wrong, "def check(f): pass")
    assert [score.correct for score in scores] == [True, False, False, False]


@pytest.mark.slow
def test_programs_are_compared_by_their_output(judged):
    tests = json.dumps({"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]})
    codes = [
        "print(sum(map(int, input().split())))",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())), '  \\n')",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        "print(3)",
        "print(sum(map(int, input().split())))\n1 / 0",
        "while True: print('x' * 9999)",
        "input(); print(input())",
    ]
    assert [score.value for score in judged(tests, *codes)] == [1, 1, 1, 0.5, 0, 0, 0]


@pytest.mark.slow
def test_inputs_and_outputs_may_be_lists_of_lines(judged):
    tests = {"inputs": [["2", "1 2"]], "outputs": [["1", "2"]]}
    right, wrong = judged(tests, "input()\nfor x in input().split(): print(x)", "print(input())")
    assert (right.value, wrong.value) == (1, 0)


@pytest.mark.slow
def test_calls_with_arguments_and_results(judged):
    tests = {"fn_name": "pair", "inputs": [[1, 2], [3, 4]], "outputs": [[1, 2], [[3, 4]]]}
    codes = [
        "def pair(a, b): return a, b",
        "class Solution:\n    def pair(self, a, b): return [a, b]",
        "def pair(a, b): return [1, 2]",
        "def other(a, b): return a, b",
    ]
    assert [score.value for score in judged(tests, *codes)] == [1, 1, 0.5, 0]


UNREADABLE = {"is not Python": ["assert f( == 1"], "asserts nothing": "print(f(1))", "the row has no answer": None}
UNREADABLE |= {"is not a list of assertions": 42, "has no lists of inputs": {"inputs": ["1"]}}
UNREADABLE |= {"that are not texts": {"inputs": [1], "outputs": [1]}}
UNREADABLE |= {"not lists of arguments": {"fn_name": "f", "inputs": [1], "outputs": [1]}}


def test_tests_that_cannot_be_read_are_said_before_the_run():
    with runner(UnitTests()) as made:
        reasons = made.unreadable([*UNREADABLE.values(), ADD, json.dumps(ADD)])
    assert all(part in reason for part, reason in zip(UNREADABLE, reasons, strict=False))
    assert reasons[-2:] == [None, None]
    with pytest.raises(ValueError, match="defines no function check"):
        as_tests("assert f(1)", "entry_point")


@pytest.mark.slow
def test_only_a_row_at_fault_makes_a_score_invalid(judged):
    rows = {
        "need a package": ["import not_a_package\nassert f() == 1"],
        "pass a function": ["assert f(lambda: 1) == 1"],
        "end their own process": ["import os\nassert f()\nos._exit(0)", "assert f()"],
    }
    for reason, tests in rows.items():
        (score,) = judged(tests, "def f(*a): return 1")
        assert not score.valid and reason in score.error
    (score,) = scored([UnitTests(setup="no_column")], ADD, "def add(a, b): return a + b")
    assert not score.valid and "no text in the column 'no_column'" in score.error


def test_the_code_is_the_last_python_block():
    assert code_of("x = 1") == "x = 1"
    assert code_of("```py\na\n```\ntext\n```python\nb\n```\n```text\nout\n```") == "b\n"
    assert code_of("```\na\n```\n```\nb\n```") == "b\n"
    assert code_of("```python\ncut off") == "cut off"


def test_a_sandbox_that_was_asked_for_and_is_missing_is_refused_and_auto_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "bubblewrap_problem", lambda: "bubblewrap needs the program bwrap")
    with runner(UnitTests(sandbox="bubblewrap")) as made, pytest.raises(UserError, match=r"sandbox.*bwrap.*install"):
        made.check()
    with runner(UnitTests(), UnitTests(name="again"), UnitTests(name="none", sandbox="none")) as made:
        made.check()
        (note,) = made.notes()
    assert "bwrap" in note and "sandbox=none" in note
    with pytest.raises(FieldError, match="must be one of auto, bubblewrap"):
        UnitTests(sandbox="docker").check()


@needs_bubblewrap
def test_the_same_scores_in_and_out_of_the_sandbox():
    codes = ["def add(a, b): return a + b", "def add(a, b): return 3", "def add(a, b) return"]
    for tests in (ADD, {"inputs": ["1 2\n"], "outputs": ["3\n"]}):
        codes[0] = codes[0] if tests is ADD else "print(sum(map(int, input().split())))"
        inside, outside = (
            scored([UnitTests(seconds=LONG, sandbox=kind)], tests, *codes) for kind in ("bubblewrap", "none")
        )
        assert [s.value for s in inside] == [1, 0, 0] and inside == outside


def test_rows_of_unittest_and_numpy_are_tests_and_a_check_without_entry_point_is_none():
    rows = ["np.testing.assert_allclose(f(1), 2)", "import unittest\nclass T(unittest.TestCase):\n"
            "    def test(self): self.assertEqual(f(1), 2)"]  # fmt: skip
    for row in rows:
        assert as_tests([row], None) == {"assertions": [row]}
    with pytest.raises(ValueError, match="only defines functions"):
        as_tests("def check(candidate):\n    assert candidate(1)", None)


@pytest.mark.slow
def test_helpers_and_modules_of_the_tests_are_not_taken_from_the_code():
    helper = "def poly(xs, x): return sum(c * x**i for i, c in enumerate(xs))"
    forged = "class math: fabs = staticmethod(lambda x: 0)\ndef poly(*a): return 0\ndef find_zero(xs): return 77"
    right = "def find_zero(xs): return -xs[0] / xs[1]"
    test = "assert math.fabs(poly([2, 1], find_zero([2, 1]))) < 1e-6"
    check = "def check(candidate):\n    x = candidate([2, 1])\n    assert math.fabs(poly([2, 1], x)) < 1e-6"

    with runner(UnitTests(setup="setup", seconds=LONG)) as made:
        scores = ask(made, prompt([test], setup=["import math", helper]), right, forged)
        scores += ask(made, prompt([test], setup=""), forged)
    assert [score.value for score in scores] == [1, 0, 0]
    with runner(UnitTests(setup="setup", entry_point="entry_point", seconds=LONG)) as made:
        scores = ask(made, prompt(check, setup=helper, entry_point="find_zero"), right, forged)
        scores += ask(made, prompt(check, setup="", entry_point="find_zero"), forged)
    assert [score.value for score in scores] == [1, 0, 0]
