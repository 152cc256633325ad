"""A package outside the repository brings an environment, an agent, a sandbox and a task, by entry points: they are
explained, trained, killed, resumed and evaluated as those of proxima are."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.cli.main import main
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import AGENT_SANDBOXES
from proxima.task import TASKS
from tests.processes import eventually
from tests.runtime.episode_world import STOPS
from tests.runtime.tiny_run import assert_same, traces

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lent_servers")]
PACKAGE = '''
import asyncio, json, os, time, urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from proxima.environment.agent_kinds import AgentKind, AgentSandbox
from proxima.environment.agents import LocalRunner
from proxima.environment.protocol import Environment, Reply
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message


class Door(Environment):
    """It opens for a text with the letter."""

    needs: ClassVar[Mapping[str, str]] = {"json": "json"}

    def __init__(self, letter: str = "e") -> None:
        self.letter, self.reward = letter, 0.0

    def respond(self, text: str) -> Reply:
        self.reward += len(text + self.letter) / 24
        return Reply("again", done=len(text) > 3)


def asked(base_url: str, api_key: str, text: str, model: str = "policy") -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer = json.load(opener.open(urllib.request.Request(f"{base_url}/chat/completions", body, head)))
    return answer["choices"][0]["message"]["content"] or ""


@dataclass(frozen=True, kw_only=True)
class Caller(AgentKind):
    """Asks once, and gives the share of letters; waits at the third question if `waits` names a file that is missing.

    Args:
        waits: a file.
    """

    waits: str = ""

    def build(self) -> "Calls":
        return Calls(self)

    def inputs(self) -> Mapping[str, str]:
        return {"version of maze_lab": "7"}

    def rows(self, split: str, skip: int, size: int | None) -> list[Mapping[str, Any]]:
        asked = [[{"role": "user", "content": f"Own {i}"}] for i in range(5)]
        return [{"messages": messages, "answer": None, "kept": True} for messages in asked][skip:]


class Calls:
    def __init__(self, spec: Caller) -> None:
        self.spec, self.count = spec, 0

    async def play(self, job: Any) -> float:
        self.count += 1
        if self.spec.waits and self.count > 4 and not Path(self.spec.waits).exists():
            Path(self.spec.waits + ".reached").touch()
            await asyncio.sleep(1000)
        text = await asyncio.to_thread(asked, job.base_url, job.api_key, job.row["messages"][0]["content"])
        return len(text) / 12

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Pair(AgentKind):
    """Two of them, who speak one after the other; the longer answer wins."""

    roles: ClassVar[tuple[str, ...]] = ("first", "second")

    def build(self) -> "Two":
        return Two()


class Two:
    async def play(self, job: Any) -> dict[str, float]:
        said = {}
        for role in Pair.roles:
            given = (job.base_url, job.api_key, f"{role}: {job.row['messages'][0]['content']}", f"policy/{role}")
            said[role] = len(await asyncio.to_thread(asked, *given))
        return {role: said[role] / 12 for role in said}

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Jail(AgentSandbox):
    """Keeps a list of who was in it.

    Args:
        book: the file.
    """

    text_field: ClassVar[str] = "book"
    book: str

    def runner(self, spec: Any) -> LocalRunner:
        Path(self.book).write_text(" ".join(spec.command))
        return LocalRunner(spec.command)

    def inputs(self) -> Mapping[str, str]:
        return {"the jail's rules": "strict"}


@dataclass(frozen=True, kw_only=True)
class Riddles(PlayedTask):
    """Riddles.

    Args:
        count: how many.
    """

    count: int = 6

    def rows(self, seed: int) -> Rows:
        return MappedRows(range(self.count), lambda i, item: Row(messages=user_message(f"Riddle {i}?"), answer=str(i)))
'''
ENTRY_POINTS = """
[proxima.environments]
door = maze_lab:Door
caller = maze_lab:Caller
pair = maze_lab:Pair

[proxima.agent_sandboxes]
jail = maze_lab:Jail

[proxima.tasks]
riddles = maze_lab:Riddles
"""
PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import maze_lab
json.loads(sys.stdin.read())
print(len(maze_lab.asked(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "Hello")) / 12)
"""
RECIPE = {
    "reward": [{"kind": "environment"}],
    "algorithm": "grpo",
    "engine": {"slots": 8, "dtype": "float32"},
    "sampling": {"max_tokens": 12, "stop": STOPS},
    "episode": {"turns": 2},
    "train": {"steps": 2, "prompts_per_step": 2, "completions_per_prompt": 2, "optimizer": {"lr": 1e-4}},
    "checkpoint": {"every": 1},
    "runtime": {"threads": 1},
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder in which the package is installed, outside the repository."""
    folder = tmp_path / "site"
    (folder / "maze_lab-1.0.dist-info").mkdir(parents=True)
    (folder / "maze_lab.py").write_text(PACKAGE)
    (folder / "maze_lab-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: maze-lab\nVersion: 1.0\n")
    (folder / "maze_lab-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    tables = (ENVIRONMENTS, AGENT_SANDBOXES, TASKS)
    for table in tables:
        vars(table).pop("brought", None)
    yield folder
    sys.modules.pop("maze_lab", None)
    for table in tables:
        vars(table).pop("brought", None)


def recipe_of(model, name, environment, **task):
    """A recipe that plays in this environment, in training and evaluation."""
    own = {"kind": "riddles", "environment": environment, **task}
    tree = {"model": {"path": str(model), "compute_dtype": "float32"}, "task": own, **RECIPE}
    tree["eval"] = {"task": {**own, **({} if task.get("kind") else {"count": 3})}}
    Path(f"{name}.yaml").write_text(json.dumps(tree))
    return f"{name}.yaml"


def proxima(capsys, *words):
    """The output of a command that works."""
    try:
        code = main([*map(str, words)])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert not code, err
    return out + err


def test_an_environment_and_a_task(package, tiny_model, capsys):
    recipe = recipe_of(tiny_model("llama"), "door", {"kind": "door", "letter": "a"})
    said = proxima(capsys, "explain", recipe)
    assert "riddles" in said and "door" in said
    assert "done: 2 steps" in proxima(capsys, "train", recipe, "folder=run")
    rows = traces(Path("run"))["rollouts"]
    assert rows and all(json.loads(row["episode"])["failure"] == "" for step in rows.values() for row in step)
    assert "reward" in proxima(capsys, "eval", "run", "--limit", "3")


def test_an_agent_is_killed_and_resumed(package, tiny_model, capsys):
    model = tiny_model("llama")
    environment = {"kind": "caller", "waits": str(Path("waits").absolute())}
    recipe = recipe_of(model, "caller", environment, kind="environment")
    assert "caller" in proxima(capsys, "explain", recipe)
    command = [sys.executable, "-m", "proxima", "train", recipe, "folder=run"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        eventually(lambda: Path("waits.reached").exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        errors = process.stderr.read().decode()
    assert process.returncode == -signal.SIGKILL, errors
    Path("waits").touch()
    assert "done: 2 steps" in proxima(capsys, "train", recipe, "folder=run", "--resume")
    assert "done: 2 steps" in proxima(capsys, "train", recipe, "folder=unbroken")
    assert_same(traces(Path("run")), traces(Path("unbroken")))
    assert "reward" in proxima(capsys, "eval", "run", "--limit", "3")
    named = package / "maze_lab.py"
    named.write_text(named.read_text().replace('"7"', '"8"'))
    sys.modules.pop("maze_lab")
    with pytest.raises(AssertionError, match=r"task.environment: maze_lab.py.*version of maze_lab: changed since"):
        proxima(capsys, "train", recipe, "folder=run", "train.steps=3", "--resume")


@pytest.mark.parametrize("kind", ["pair", "maze_lab:Pair"])
def test_an_agent_class_has_roles(package, tiny_model, capsys, kind):
    """Those of a class without an entry point are known once its world is built, which is before weights load."""
    recipe = recipe_of(tiny_model("llama"), "pair", {"kind": kind})
    words = ["train", recipe, "train.steps=1", "eval.task=null"]
    assert "done: 1 step" in proxima(capsys, *words, "folder=run")
    rollouts = traces(Path("run"))["rollouts"].values()
    for row in [row for step in rollouts for row in step]:
        assert json.loads(row["episode"])["failure"] == ""
        assert row["players"].keys() == {"first", "second"}
    for changes, line in (
        (["algorithm.advantage=remax"], "compares with one greedy episode, not with each role; use rloo or grpo"),
        (["algorithm=online_dpo"], "compares whole answers; set it to null, or use an agent without roles"),
    ):
        with pytest.raises(AssertionError, match=line):
            proxima(capsys, *words, "folder=refused", *changes)
        assert not Path("refused").exists()


def test_a_sandbox_and_a_class_without_an_entry_point(package, tiny_model, capsys):
    Path("program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(package)]
    recipe = recipe_of(tiny_model("llama"), "jail", {"kind": "agent", "command": command, "jail": "book"})
    assert "riddles" in proxima(capsys, "explain", recipe)
    assert "done: 1 step" in proxima(capsys, "train", recipe, "folder=run", "train.steps=1", "eval.task=null")
    assert Path("book").read_text().startswith(sys.executable)
    with pytest.raises(AssertionError, match=r"environment.jail.size=3 .*'jail' has no field 'size'"):
        proxima(capsys, "explain", recipe, "task.environment.jail={book: book, size: 3}")
    recipe = recipe_of(tiny_model("llama"), "class", {"kind": "maze_lab:Caller"})
    proxima(capsys, "explain", recipe, "--import-code")
    assert "done: 1 step" in proxima(capsys, "train", recipe, "folder=other", "train.steps=1", "eval.task=null")
