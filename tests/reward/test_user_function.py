"""Which code a reward runs: that of the start of the run, and of its own folder."""

import sys

import pytest

from proxima.reward.base import unscored
from proxima.reward.function import Function, FunctionBatch
from tests.reward.make import ask, completions, prompt, runner, scored, values

pytestmark = pytest.mark.usefixtures("lent_servers")

VALUE = """
import os
def f(prompt, completion: str):
    if completion == "exit": os._exit(1)
    return VALUE
"""


def told(made, *texts):
    return values(ask(made, None, *texts))


@pytest.fixture
def importable(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_edited_rewards", None)


@pytest.mark.slow
def test_an_edit_in_the_middle_of_a_run_changes_nothing(tmp_path):
    file = tmp_path / "rw.py"
    file.write_text(VALUE.replace("VALUE", "1"))
    with runner(Function(path=f"{file}:f")) as made:
        assert told(made, "a") == [1.0]
        file.write_text(VALUE.replace("VALUE", "1000"))
        assert told(made, "a", "exit", "b") == [1.0, "f: its worker ended", 1.0]
        file.unlink()
        assert told(made, "exit", "b") == ["f: its worker ended", 1.0]
    file.write_text(VALUE.replace("VALUE", "1000"))
    with runner(Function(path=f"{file}:f")) as made:
        assert told(made, "a") == [1000.0]


@pytest.mark.slow
def test_an_edited_module_is_not_run(importable):
    file = importable / "my_edited_rewards.py"
    file.write_text(VALUE.replace("VALUE", "1"))
    with runner(Function(path="my_edited_rewards:f")) as made:
        assert told(made, "a") == [1.0]
        file.write_text(VALUE.replace("VALUE", "1000"))
        first, two = told(made, "exit", "b")
        assert first == "f: its worker ended"
        assert two.endswith(f"ValueError: {file} has changed since the run started; restore it")
        file.write_text(VALUE.replace("VALUE", "1"))
        assert told(made, "b") == [1.0]


NEIGHBOURS = {
    "rw.py": "from common import VALUE\ndef f(prompt, completion: str): return VALUE\n",
    "late.py": "def f(prompt, completion: str):\n    from parts.common import VALUE\n    return VALUE\n",
    "lists.py": "def f(completions):\n    import later\n    for _ in completions: yield later.VALUE\n",
}


@pytest.fixture
def folders(tmp_path):
    for value, name in enumerate("ab", 1):
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        for file, text in NEIGHBOURS.items():
            (folder / file).write_text(text)
        for module in ("common", "parts/common", "later"):
            (folder / f"{module}.py").write_text(f"VALUE = {value}\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("file", NEIGHBOURS)
def test_a_file_imports_from_its_own_folder(folders, file):
    rewards = [Function(path=f"{folders}/{name}/{file}:f", name=name) for name in "abab"]
    in_process = [values(reward.score(prompt(), completions("x"))) for reward in rewards]
    assert in_process == [[1.0], [2.0], [1.0], [2.0]] and not any(str(folders) in path for path in sys.path)
    for score in scored(rewards[:2], None, "x", "y"):
        assert score.parts == {"a": 1.0, "b": 2.0}


def test_a_module_of_another_folder_is_not_found(folders):
    assert values(Function(path=f"{folders}/a/rw.py:f").score(prompt(), completions("x"))) == [1.0]
    (folders / "b" / "common.py").unlink()
    with pytest.raises(ValueError, match="b/rw.py', which can't be loaded: ModuleNotFoundError: No module named 'comm"):
        Function(path=f"{folders}/b/rw.py:f").check_code()


@pytest.mark.parametrize("returned", ["{0: 5, 1: 6}", "'12'", "{1, 2}", "b'12'", "1.0", "np.float64(1)", "np.array(1)"])
def test_what_is_no_list_of_scores_is_refused(tmp_path, returned):
    functions = f"def f(completions): return {returned}\ndef g(groups): return [{returned}]\n"
    (tmp_path / "rw.py").write_text(f"import numpy as np\n{functions}")
    with pytest.raises(ValueError, match="returned .*, expected a list of 2 numbers"):
        Function(path=f"{tmp_path}/rw.py:f").score(prompt(), completions("a", "b"))
    with pytest.raises(ValueError, match="returned .*, expected 1 lists with one score for each completion"):
        FunctionBatch(path=f"{tmp_path}/rw.py:g").score_batch([unscored(prompt(), completions("a", "b"))])


@pytest.mark.parametrize("returned", ["(5, 6)", "np.array([5, 6])", "(n for n in (5, 6))", "map(int, '56')"])
def test_what_holds_scores_in_order(tmp_path, returned):
    (tmp_path / "rw.py").write_text(f"import numpy as np\ndef f(completions): return {returned}\n")
    assert values(Function(path=f"{tmp_path}/rw.py:f").score(prompt(), completions("a", "b"))) == [5.0, 6.0]
