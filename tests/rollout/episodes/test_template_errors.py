from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.environment.interface import EnvironmentInterface
from proxima.rollout.episodes.conversation import ForkRefused, TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.worlds import Play, World, _tried, _unseen_tools, template_errors
from tests.reward.make import prompt
from tests.rollout.episodes.chat_families import MISTRAL, speaker
from tests.rollout.episodes.episode_proof import TOOLS
from tests.rollout.episodes.test_player import DONE
from tests.rollout.episodes.test_player import World as Hosts

OPENING = [{"role": "user", "content": "What is 2 + 5?"}]


def found(name, template=None, roles=("tool", "user")):
    return [*template_errors(TurnTemplate(speaker(name, template), {}, TOOLS), OPENING, roles)]


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "xml"])
def test_templates_that_leave_the_past_alone(name):
    assert found(name) == []


def test_a_fork_names_what_is_rewritten():
    (thought,) = found("qwen3")
    assert isinstance(thought, ForkRefused)
    assert str(thought).startswith("the chat template rewrites what the model saw: '<think>")
    assert found("qwen3", roles=["tool"]) == []


def test_what_makes_a_run_impossible_is_no_fork():
    refuses = "{%- for m in messages if m.role == 'tool' %}{{ raise_exception('unknown role') }}{%- endfor %}"
    fails = [error for error in found("mistral", refuses + MISTRAL) if not isinstance(error, ForkRefused)]
    assert ["fails for 'Right.': TemplateError: unknown role" in str(error) for error in fails] == [True]
    latest = MISTRAL.replace("ns.first and tools", "tools and loop.last")  # tools stand before the last question
    moved, *_ = found("mistral", latest)
    assert isinstance(moved, ForkRefused) and "saw: 'AVAILABLE_TOOLS]" in str(moved)


@pytest.mark.parametrize("name", ["qwen3-off", "thinks"])
def test_a_generation_prompt_that_is_rewritten_is_a_fork(name):
    errors = found(name)
    assert [isinstance(error, ForkRefused) for error in errors] == [True, True]


def test_a_column_of_tools_that_the_model_does_not_see_is_named():
    rows = [replace(prompt(), metadata={"tools": tools}) for tools in ([], TOOLS)]
    (note,) = _unseen_tools(rows, "task")
    assert note.startswith("task: the rows' column 'tools' is not shown to the model, which sees the tools of its")
    assert _unseen_tools(rows[:1], "task") == []


def world_of(name, forks):
    """Its environment answers turns with the user's messages."""
    hosts = Hosts([DONE])
    hosts.interface = EnvironmentInterface(responds=True)
    hosts.spec = SimpleNamespace(kind="guess", tools=())
    hosts.log_to = lambda file: setattr(hosts, "log", file)
    play = Play(settings=EpisodeSettings(forks=forks), system=None, arguments={}, seed=1)
    return World(play, hosts, SimpleNamespace(tokenizer=speaker(name), context=400))


def test_a_trial_warns_of_a_template_that_rewrites_or_refuses_it():
    assert _tried(world_of("qwen2.5", "refuse"), [prompt()], 1, "task") == []
    assert _tried(world_of("qwen3", "train"), [], 1, "task") == []
    (note,) = _tried(world_of("qwen3", "train"), [prompt()], 1, "task")
    assert note.startswith("task: the chat template rewrites what the model saw: '<think>")
    assert note.endswith(": what follows such a turn is trained as a separate sequence")
    with pytest.raises(FieldError, match="environment='guess' can't be played with this model: the chat template rewr"):
        _tried(world_of("qwen3", "refuse"), [prompt()], 1, "task")


def test_what_environments_print_goes_to_the_log_of_the_player():
    world = world_of("qwen2.5", "train")
    for log in (Path("a.log"), None):
        world.player(None, log)
        assert world.hosts.log == log
