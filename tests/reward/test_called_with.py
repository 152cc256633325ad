"""A function that can't be called with what it is called with is refused before any weights are loaded."""

import pytest

from proxima.reward.function import Function, FunctionBatch

SOURCE = """
def noargs(): return 1.0
def one(groups): return 1.0
def two(prompt, completion): return 1.0
def three(prompt, completion, judge): return 1.0
def keyword(prompt, *, completion): return 1.0
def only(completion): return 1.0
def before(prompt, completion, gold, /): return 1.0
def spare(prompt, completion, weight=1.0): return 1.0
def several(*args, **kwargs): return 1.0
class Judge:
    def __call__(self, prompt, completion): return 1.0
judge = Judge()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ["two", "three", "keyword", "only", "spare", "several", "judge"])
def test_a_function_that_takes_them(file, name):
    Function(path=f"{file}:{name}").check_code()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noargs", "name a parameter completion"),
        ("one", "name a parameter completion"),
        ("before", "'gold' is positional-only, but columns are passed by name"),
    ],
)
def test_a_function_that_does_not(file, name, why):
    called = r"calls with \(prompt, completion\) and columns by name, and it is defined with \(.*\)"
    with pytest.raises(ValueError, match=rf"mine.py:{name}' names a function that 'function' {called}: {why}$"):
        Function(path=f"{file}:{name}").check_code()


def test_of_the_whole_batch(file):
    for name in ("one", "several"):
        FunctionBatch(path=f"{file}:{name}").check_code()
    wrong = {"noargs": r"\(\): too many positional arguments", "two": "missing a required argument: 'completion'"}
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=rf"'function_batch' calls with \(groups\), .*{message}"):
            FunctionBatch(path=f"{file}:{name}").check_code()
