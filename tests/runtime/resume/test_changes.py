"""What a resume compares: the files that a task names, and what changes the last bits."""

import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.data import UserError
from proxima.runtime.resume import changes
from proxima.runtime.resume.changes import environment_hashes
from proxima.system import foreign_folder, machine
from proxima_worlds.foreign_environment import _answered
from tests.containers import busybox_image as busybox_image

STAND_IN = Path(__file__).parents[3] / "packages" / "proxima-worlds" / "tests" / "stand_in"


class Journal(dict):
    set, path = dict.__setitem__, Path("run/run.sqlite")


@pytest.fixture
def note(monkeypatch):
    """note(compiler, dtype): that of the next resume of a run on a CPU."""
    monkeypatch.setattr(changes, "flat_values", lambda config: config)
    monkeypatch.setattr(changes.torch.cuda, "is_available", lambda: False)

    def noted(compiler, dtype="bfloat16"):
        monkeypatch.setattr(machine.shutil, "which", {"g++": "/usr/bin/g++"}.get)
        monkeypatch.setenv("CXX", compiler)
        return changes.numerics_note(noted.journal, {"model.compute_dtype": dtype, "engine.dtype": dtype})

    noted.journal = Journal()
    return noted


def test_another_compiler_is_noted(note):
    assert note("g++") is note("") is None
    assert note("none").startswith("compiler=None (was /usr/bin/g++): the run continues, but differs in the last bits")
    assert note("none") is None
    assert note("g++").startswith("compiler=/usr/bin/g++ (was None): ")


def test_a_compiler_does_not_concern_a_float32_run(note):
    assert note("g++", "float32") is note("none", "float32") is None


def test_a_journal_that_does_not_name_it(note):
    note("g++")
    del note.journal["numerics"]["compiler"]
    assert note("none") is None


ENVIRONMENTS = {
    "a class": "worlds_of_mine:World",
    "a class with arguments": {"kind": "worlds_of_mine:World", "size": 3},
    "an agent, a function": {"kind": "agent", "run": "worlds_of_mine:play"},
    "an agent, a program": {"kind": "agent", "command": ["/usr/bin/env", "worlds_of_mine.py", "--fast"]},
    "a tool": None,
}


@pytest.mark.parametrize("given", ENVIRONMENTS)
def test_the_file_of_an_environment_is_compared(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "worlds_of_mine.py"
    file.write_text("one = 1\n")
    task = SimpleNamespace(environment=ENVIRONMENTS[given], tools=["worlds_of_mine:add"] if given == "a tool" else [])
    before = environment_hashes("task", task)
    assert list(before) == ["task.environment: worlds_of_mine.py"]  # neither the interpreter nor `--fast`
    file.write_text("one = 2\n")
    now = environment_hashes("task", task)

    with pytest.raises(UserError, match="task.environment: worlds_of_mine.py: changed .* --accept-changes resumes"):
        changes.check_inputs(Journal(inputs=before), now)
    assert changes.check_inputs(Journal(inputs=before), now, accept=True) == list(before)
    with pytest.raises(UserError, match="task: its rows: changed .* start another run with folder=PATH$"):
        changes.check_inputs(
            Journal(inputs=before | {"task: its rows": "x"}), now | {"task: its rows": "y"}, accept=True
        )


def test_the_files_of_an_environment_of_another_library_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(STAND_IN)]))
    package = tmp_path / "words_of_mine"
    (package / "tools").mkdir(parents=True)
    (package / "__init__.py").write_text("from six_words import load_environment\n")
    (package / "tools" / "lookup.py").write_text("one = 1\n")
    task = SimpleNamespace(environment={"kind": "verifiers", "name": "words_of_mine"}, tools=[])
    before = environment_hashes("task", task)
    files = ["words_of_mine: __init__.py", "words_of_mine: tools/lookup.py", "verifiers"]
    assert list(before) == [f"task.environment: {file}" for file in files]
    assert before["task.environment: verifiers"] == "0.1.14"
    (package / "tools" / "lookup.py").write_text("one = 2\n")
    _answered.cache_clear()
    now = environment_hashes("task", task)
    with pytest.raises(UserError, match="^task.environment: words_of_mine: tools/lookup.py: changed .* --accept-ch"):
        changes.check_inputs(Journal(inputs=before), now)


def test_a_single_module_is_compared_alone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    task = SimpleNamespace(environment={"kind": "verifiers", "name": "six_words"}, tools=[])
    assert "task.environment: six_words: six_words.py" in environment_hashes("task", task)


def test_an_environment_of_ours_has_no_file_of_the_user():
    for given in ("calculator", {"kind": "guess", "low": 1}, None):
        assert environment_hashes("task", SimpleNamespace(environment=given, tools=[])) == {}


@pytest.mark.slow
def test_the_image_of_a_container_is_an_input(busybox_image):
    agent = {"kind": "agent", "container": busybox_image, "command": ["sh", "-c", "x" * 5000]}
    (named,) = environment_hashes("task", SimpleNamespace(environment=agent, tools=[])).items()
    assert named[0] == f"task.environment: image {busybox_image}" and len(named[1]) >= 64


@pytest.mark.parametrize("given", ENVIRONMENTS)
def test_no_file_is_read_whole(given, tmp_path, monkeypatch):
    """A file that a command names may be larger than memory; its hash is that of all of it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "worlds_of_mine.py"
    file.write_bytes(b"one = 1\n" * 1000)
    digest = sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(foreign_folder, "PART", 100)
    monkeypatch.setattr(Path, "read_bytes", None)
    task = SimpleNamespace(environment=ENVIRONMENTS[given], tools=["worlds_of_mine:add"] if given == "a tool" else [])
    assert environment_hashes("task", task) == {"task.environment: worlds_of_mine.py": digest}
