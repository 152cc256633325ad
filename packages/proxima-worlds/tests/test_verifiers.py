"""What an environment of verifiers says before a run: its rows, and one line about what is wrong. A stand-in takes the
place of the library."""

import json
import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.rollout.environment_rows import EnvironmentRows
from proxima.system import foreign_folder
from proxima_worlds import foreign_environment, foreign_runner
from proxima_worlds.foreign_agents import Verifiers
from proxima_worlds.foreign_environment import _answered

STAND_IN = Path(__file__).with_name("stand_in")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    _answered.cache_clear()


def task(split="train", skip=0, size=None, **environment):
    given = {"kind": "verifiers", "name": "six_words", **environment}
    return EnvironmentRows(environment=given, split=split, skip=skip, size=size)


def test_the_rows_are_the_environments_with_its_first_messages():
    rows = task(args={"system": "Say it."}).rows(1)
    assert len(rows) == 6 and rows[1].answer == "blue" and rows[1].chat
    assert [message["content"] for message in rows[1].messages] == ["Say it.", "Say blue."]
    own = rows[1].metadata["environment_row"]
    assert own["answer"] == "blue" and own["prompt"] == [*rows[1].messages]


def test_rows_drawn_without_a_seed_are_the_same_in_every_process():
    rows = task().rows(1)
    first = [rows[i].metadata["environment_row"]["draw"] for i in range(6)]
    _answered.cache_clear()
    again = task().rows(2)
    assert first == [again[i].metadata["environment_row"]["draw"] for i in range(6)] and len({*first}) == 6


def test_a_part_of_the_rows():
    rows = task(skip=2, size=3).rows(1)
    assert [rows[i].answer for i in range(len(rows))] == ["green", "pink", "gold"]
    assert len(task("eval", args={"evaluated": True}).rows(1)) == 2


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"python": "no/python"}, "environment.python='no/python' can't be started as a Python interpreter"),
        ({"python": "/bin/true"}, "environment.python='/bin/true' is not a Python interpreter: its process ended with"),
        ({"python": sys.executable, "name": ""}, "environment.name='' must be the name of an installed environment"),
        (
            {"name": "nowhere"},
            r"environment.name='nowhere' is not an environment that .* can import; install its package",
        ),
        ({"name": "without_its_package"}, "can't be imported: ModuleNotFoundError: No module named 'a_package_that"),
        ({"name": "json"}, "environment.name='json' has no function load_environment"),
        ({"args": {"size": 3}}, "environment.args=.*'size': 3.* are refused by the environment 'six_words': TypeError"),
        ({"args": {"grouped": True}}, "environment.name='six_words' has a reward function of whole groups, of_all"),
        ({"split": "eval"}, "split='eval' has no rows: the environment has no evaluation data"),
        ({"skip": 6}, "skip=6 leaves no row"),
        ({"args": {"shown": [{"type": "image_url"}]}}, "environment.name='six_words' has a row with an image"),
    ],
)
def test_each_wrong_field_is_one_line(fields, line):
    with pytest.raises(FieldError, match=line) as caught:
        task(**fields).rows(1)
    assert "\n" not in str(caught.value)


def test_the_environments_own_processes_find_its_modules(monkeypatch, tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "beside.py").write_text("word = 'beside'")
    (tmp_path / "here.py").write_text("word = 'here'")
    ask = "import here, beside; print(here.word, beside.word)"
    (tmp_path / "with_a_process.py").write_text(
        "import subprocess, sys\nimport verifiers as vf\n"
        "def load_environment():\n"
        f"    said = subprocess.run([sys.executable, '-c', {ask!r}], cwd='/', capture_output=True, text=True).stdout\n"
        "    return vf.SingleTurnEnv([{'prompt': said}], None, vf.Rubric([], []))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["packages", str(STAND_IN)]))
    assert task(name="with_a_process").rows(1)[0].messages[0]["content"] == "here beside\n"


def test_rows_without_an_end_need_a_size(monkeypatch):
    def loaded(kind, name, args):
        return SimpleNamespace(endless=True, rows=lambda split: ({"number": n} for n in count())), {}

    monkeypatch.setattr(foreign_runner, "loaded_environment", loaded)
    given = {"kind": "verifiers", "name": "names", "args": {}, "split": "train", "skip": 2, "size": None}

    def answers(**changes):
        messages = []
        foreign_runner.give_rows(given | changes, messages.append)
        return [message for message in messages if "facts" not in message]

    assert answers() == [{"problem": ["size", None, "must be given: the environment draws rows without an end"]}]
    assert answers(size=2) == [{"row": {"number": 2}}, {"row": {"number": 3}}, {"end": True}]


def test_an_environment_that_never_loads_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "endless.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(STAND_IN)]))
    monkeypatch.setattr(foreign_environment, "LOAD_SECONDS", 5.0)
    with pytest.raises(
        FieldError, match="environment.name='endless' can't be loaded: its process took longer than 5 s"
    ):
        task(name="endless").rows(1)


def test_without_the_library_a_line_says_so(monkeypatch, tmp_path):
    (tmp_path / "verifiers.py").write_text("raise ImportError('no verifiers here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FieldError, match=r"environment.python=.* can't import the package verifiers: ImportError"):
        task().rows(1)


def test_the_agents_are_checked_before_they_are_built():
    with pytest.raises(FieldError, match="name='nowhere' is not an environment"):
        Verifiers(name="nowhere").build()
    agents = Verifiers(name="six_words", workers=2).build()
    agents.close()
    with pytest.raises(FieldError, match="workers=-1 must be >= 0"):
        Verifiers(name="six_words", workers=-1)


def test_an_environment_without_rows_of_its_own_is_refused():
    with pytest.raises(
        FieldError, match="environment='guess' has no rows of its own; name one of .*nemo_gym, verifiers"
    ):
        EnvironmentRows(environment="guess")


def test_a_file_of_an_environment_that_is_no_file(tmp_path, monkeypatch):
    """Nothing waits for what never comes."""
    package = tmp_path / "piped"
    package.mkdir()
    (package / "__init__.py").write_text((STAND_IN / "six_words.py").read_text())
    os.mkfifo(package / "pipe.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), str(tmp_path)]))
    with pytest.raises(FieldError, match=r"name='piped' has a file that can't be read: .*'pipe.py' is not a regular"):
        task(name="piped").rows(1)


def test_rows_of_a_server_of_nemo_gym(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_runner, "bounded", foreign_folder)
    server = foreign_runner.ResourcesServer.__new__(foreign_runner.ResourcesServer)
    server.folder = str(tmp_path)
    rows = [{"responses_create_params": {"input": text}, "expected_answer": text.upper()} for text in ("a", "é")]
    data = tmp_path / "data" / "example.jsonl"
    data.parent.mkdir()
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), encoding="utf-8")
    read = [*server.rows("train")]
    assert [row["environment_row"] for row in read] == rows and [row["answer"] for row in read] == ["A", "É"]
    data.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="'example.jsonl' is not UTF-8"):
        next(server.rows("train"))
