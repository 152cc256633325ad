"""Reward functions and environments of a user in a sandbox, and without one."""

import socket
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.data import UserError
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.process import sandbox
from proxima.reward.function import Function
from tests.containers import left
from tests.containers import podman as podman
from tests.environment.worlds import called
from tests.reward.make import ask, prompt, runner
from tests.sandboxes import needs_bubblewrap

SOURCE = Path(__file__).with_name("own_code.py")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the user's modules, with a secret that the code may read where it is in no sandbox."""
    (tmp_path / "own_code.py").write_text(SOURCE.read_text())
    (tmp_path / "own_neighbour.py").write_text("VALUE = 0.5")
    (tmp_path / "secret.txt").write_text("secret")
    for name in ("own_code", "own_neighbour"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXIMA_TEST_SECRET", "1")
    return tmp_path


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "container"])
def kind(request):
    """A kind of sandbox."""
    if request.param == "container":
        request.getfixturevalue("podman")
    yield request.param
    if request.param == "container":
        assert left() == []


def test_a_reward_function_is_alone_in_a_sandbox_and_beside_one_that_is_in_none(folder, port, kind):
    inside = Function(path="own_code:reward", sandbox=kind, name="inside")
    outside = Function(path="./own_code.py:reward", name="outside")
    with runner(inside, outside) as made:
        made.check()
        row = replace(prompt("x"), metadata={"path": str(folder / "secret.txt"), "port": port})
        (score,) = ask(made, row, "a text")
    seen = {name: [score.parts[f"{name}/{fact}"] for fact in ("reads", "connects", "knows")]
            for name in ("inside", "outside")}  # fmt: skip
    assert seen == {"inside": [0, 0, 0], "outside": [1, 1, 1]} and score.value == 1


def test_a_function_is_found_through_a_link_and_its_neighbour_on_the_search_path(folder, port, kind, monkeypatch):
    (folder / "elsewhere").mkdir()
    (folder / "own_neighbour.py").rename(folder / "elsewhere" / "own_neighbour.py")
    (folder / "real").mkdir()
    (folder / "own_code.py").rename(folder / "real" / "own_code.py")
    (folder / "shown").symlink_to(folder / "real")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")  # relative to the folder of the run
    monkeypatch.syspath_prepend("elsewhere")
    monkeypatch.syspath_prepend(str(folder / "shown"))
    with runner(Function(path="own_code:reward", sandbox=kind)) as made:
        made.check()
        row = replace(prompt("x"), metadata={"path": str(folder / "secret.txt"), "port": port})
        (score,) = ask(made, row, "a text")
    assert score.value == 0.5, score


def test_an_environment_sees_its_modules_and_in_a_sandbox_nothing_else(folder, port, kind):
    assert seen_by_an_environment(folder, port, kind) == [False] * 3


def test_an_environment_in_no_sandbox_sees_everything(folder, port):
    assert seen_by_an_environment(folder, port, "none") == [True] * 3


def seen_by_an_environment(folder, port, kind):
    with closing(Hosts(EnvironmentSpec(kind="own_code:World"), workers=1, sandbox=kind)) as hosts:
        call = ("look", {"path": str(folder / "secret.txt"), "port": port})
        _, (answer,), _ = called(hosts, {"messages": [{"role": "user", "content": "?"}]}, call)
    facts = eval(answer.messages[0]["content"])
    assert facts["value"] == 0.5 and (facts["processes"] < 8) == (kind != "none")
    return [bool(facts[name]) for name in ("reads", "connects", "knows")]


def test_a_sandbox_that_is_missing_or_meant_for_others_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sandbox, "bubblewrap_problem", lambda: "bubblewrap needs the program bwrap")
    with pytest.raises(UserError, match=r"episode.sandbox='bubblewrap'.*bwrap.*install"):
        Hosts(EnvironmentSpec(kind="own_code:World"), sandbox="bubblewrap")
    with pytest.raises(UserError, match=r"python.*episode.sandbox=none"):
        Hosts(EnvironmentSpec(kind="python"), sandbox="auto")
    function = Function(path="./own_code.py:reward", sandbox="bubblewrap")
    with pytest.raises(UserError, match=r"sandbox='bubblewrap'.*bwrap"), runner(function) as made:
        made.check()
    with closing(Hosts(EnvironmentSpec(kind="own_code:World"), workers=1, sandbox="auto")) as hosts:
        assert "bwrap" in hosts.notes[0]
