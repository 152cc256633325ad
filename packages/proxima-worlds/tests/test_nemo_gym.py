"""Episodes with a resources server of NeMo Gym, played as those of any other environment. A stand-in takes the place of
the library."""

import asyncio
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.data import FieldError, UserError
from proxima.data.flow import Prompt
from proxima.engine.protocol import Request, Sampling
from proxima.model.chat.encode import prompt_tokens
from proxima.rollout.environment_rows import EnvironmentRows
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.worlds import Play, make_worlds
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima_worlds import nemo_gym
from proxima_worlds.foreign_environment import _answered
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted
from tests.runtime.episode_world import episode_recipe, go
from tests.runtime.tiny_run import NO_EVAL

STAND_IN = Path(__file__).with_name("stand_in")
CONTEXT = 8000
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    given = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    _answered.cache_clear()


def environment(**given):
    return {"kind": "nemo_gym", "name": "counter", **given}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def prompt_of(row, uid):
    tokens = prompt_tokens(row.messages, TOKENIZER)
    return Prompt(uid=uid, messages=row.messages, tokens=tokens, answer=row.answer, metadata=dict(row.metadata))


def play(number, says, samples=1, *, given=None, **settings):
    """The completions of a row, as a run plays them; the policy says what `says` makes of context and request."""
    task = EnvironmentRows(environment=environment(**(given or {})))
    prompt = prompt_of(task.rows(0)[number], uid=3)
    asked = EpisodeSettings(**{"retries": 0, "tool_format": "hermes"} | settings)
    setting = Play(settings=asked, system=None, arguments={}, seed=1)
    model = SimpleNamespace(tokenizer=TOKENIZER, context=CONTEXT)
    policy = Scripted(says)
    with ExitStack() as end:
        world = make_worlds({"task": task}, {"task": [prompt]}, model, setting, [])["task"]
        end.callback(world.close)

        async def run():
            of = Sampling(max_tokens=1000)
            asked = [Request(prompt=prompt, sample=i, sampling=of, seed=1) for i in range(samples)]
            return [completion async for completion in world.player(policy).generate(asked)]

        completions = asyncio.run(run())
    return sorted(completions, key=lambda completion: completion.sample), policy


def in_turn(*texts):
    return lambda context, request: texts[min(request.turn, len(texts) - 1)]


def test_each_episode_has_a_session_and_its_row_has_its_tools(tmp_path):
    record = tmp_path / "record"

    def says(context, request):
        by = 2 + request.sample
        return ["I add. " + call("add", by=by), call("look"), "It is 5."][request.turn]

    (first, second), policy = play(0, says, 2, given={"args": {"record": str(record)}})
    assert [first.episode.failure, second.episode.failure] == ["", ""]
    assert [first.episode.reward, second.episode.reward] == [1.0, 0.0]
    assert first.episode.parts == {"number": 5.0, "near": 1.0}
    assert second.episode.parts == {"number": 6.0, "near": 1.0}
    answers = [span.text for span in first.episode.spans if span.role != "assistant"]
    assert '{"added":2}' in answers[0] and '{"number":5}' in answers[1]
    shown = TOKENIZER.decode(policy.requests[0].prompt.tokens)
    assert "Do add." in shown and "Do look." in shown and "misbehave" not in shown
    verified = [json.loads(line) for line in record.read_text().splitlines()]
    one = next(each for each in verified if '"by": 2' in json.dumps(each["response"]["output"]).replace("\\", ""))
    assert one["expected"] == 5 and one["response"]["tools"][0]["name"] == "add"
    output = one["response"]["output"]
    assert [item["type"] for item in output] == [
        "message",
        "function_call",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert output[0]["content"][0]["text"] == "I add." and output[-1]["content"][0]["text"] == "It is 5."
    assert output[1]["name"] == "add" and json.loads(output[1]["arguments"]) == {"by": 2}
    assert output[2] == {"type": "function_call_output", "call_id": output[1]["call_id"], "output": '{"added":2}'}
    assert output[3]["call_id"] == output[4]["call_id"] != output[1]["call_id"]


def test_a_row_without_tools_ends_with_the_first_message():
    (completion,), policy = play(1, in_turn(call("add", by=1)))
    assert len(policy.requests) == 1 and completion.episode.reward == 1.0
    messages = policy.requests[0].prompt.messages
    assert [message["role"] for message in messages] == ["system", "user"]


def test_what_a_tool_refuses_and_what_can_not_be_called_is_for_the_model():
    says = in_turn(call("add", by="much"), call("look"), "<tool_call>{</tool_call>", call("misbehave"), "done")
    (completion,), _ = play(0, says)
    assert completion.episode.failure == ""
    answers = [span.text for span in completion.episode.spans if span.role != "assistant"]
    assert "by must be integer" in answers[0] and '{"number":3}' in answers[1]
    assert "error:" in answers[2] and "there is no tool 'misbehave'" in answers[3]


def test_at_a_limit_of_the_run_the_server_verifies_what_was_done():
    (completion,), policy = play(0, in_turn(call("add", by=2)), turns=1)
    assert (completion.episode.cut, completion.episode.reward, len(policy.requests)) == ("turns", 1.0, 1)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"masks": True}, "the server can't verify it: the judge is away"),
        ({"nan": True}, "get_reward is a value of type str, expected a number"),
    ],
)
def test_what_the_server_can_not_measure_is_no_reward(args, reason):
    (completion,), _ = play(0, in_turn("done"), given={"args": args})
    assert reason in completion.episode.failure and completion.episode.reward is None


def test_a_tool_that_fails_ends_its_episode_alone():
    def says(context, request):
        return [call("misbehave", how="raises" if request.sample else "prints"), "done"][request.turn]

    (fine, failed), _ = play(2, says, 2)
    assert (fine.episode.failure, fine.episode.reward) == ("", 1.0)
    assert "the environment 'counter' failed: RuntimeError: no such number" in failed.episode.failure


@pytest.mark.parametrize("how", ["waits", "keeps busy"])
def test_a_late_call_is_cancelled_alone(how, monkeypatch):
    monkeypatch.setattr(nemo_gym, "GRACE_SECONDS", 0.5)

    def says(context, request):
        return [call("misbehave", how=how) if request.sample == 0 else call("add", by=0), "done"][request.turn]

    seconds = 3.0 if how == "waits" else 6.0  # in which the others begin anew, in another process
    limits = {"seconds": seconds, "call_seconds": seconds}
    (late, *others), _ = play(2, says, 4, given={"workers": 1}, **limits, retries=1 if how == "keeps busy" else 0)
    assert late.episode.failure == f"its environment took longer than {seconds:g} s (episode.seconds)"
    assert [other.episode.reward for other in others] == [1.0] * 3


def test_episodes_of_a_process_that_ends_are_played_again(tmp_path):
    def says(context, request):
        first = call("add", by=0) if request.sample else call("misbehave", how="exits once")
        return [first, call("add", by=0), "done"][request.turn]

    given = {"workers": 1, "args": {"record": str(tmp_path / "ended")}}
    completions, _ = play(2, says, 3, given=given, retries=1)
    assert (tmp_path / "ended").exists() and completions[0].episode.attempts == 2
    assert [(each.episode.failure, each.episode.reward) for each in completions] == [("", 1.0)] * 3


@pytest.mark.parametrize(("last", "reward"), [(3, 1.0), (4, 0.0)])
def test_a_server_of_the_real_library_keeps_the_state_of_an_episode(last, reward, monkeypatch):
    python = os.environ.get("PROXIMA_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("PROXIMA_NEMO_GYM_PYTHON names no interpreter with nemo-gym")
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])  # without the stand-in
    says = in_turn(call("increment_counter", count=last), call("get_counter_value"), "done")
    completions, _ = play(0, says, 2, given={"name": "example_session_state_mgmt", "python": python})
    for completion in completions:
        assert (completion.episode.failure, completion.episode.reward) == ("", reward)
        assert f'{{"count":{3 + last}}}' in [span.text for span in completion.episode.spans][-2]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"args": {"max_steps": 3}}, "environment.args.max_steps=3 is the loop's own limit; set episode.turns"),
        ({"args": {"max_step": 3}}, "environment.args=.* have 'max_step'; the server's config has domain, .* record"),
        ({"args": {"masks": "perhaps"}}, "environment.args=.* are refused by the environment 'counter'"),
        ({"name": "teller"}, "environment.name='teller' is not a resources server of"),
        ({"name": ""}, "environment.name='' must be the name of a resources server"),
        ({"workers": -1}, "environment.workers=-1 must be a whole number >= 0"),
        ({"python": "no/python"}, "environment.python='no/python' can't be started as a Python interpreter"),
        ({"words": 3}, "environment.kind='nemo_gym' can't be made: .*'words'; it takes"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(given, line):
    with pytest.raises(FieldError, match=line):
        EnvironmentRows(environment=environment(**given)).rows(0)


def test_a_run_trains_in_it_and_says_what_changed(tiny_model, tmp_path, monkeypatch):
    """Its parts are metrics, and a resume names the file of the server that is another one."""
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    servers = Path(shutil.copytree(STAND_IN, tmp_path / "stand_in"))
    monkeypatch.setenv("PYTHONPATH", f"{servers}{os.pathsep}{os.environ['PYTHONPATH']}")
    own = {"kind": "environment", "environment": environment()}
    rewards = [{"kind": "environment"}, {"kind": "tests.runtime.tiny_run:Even"}]
    tree = episode_recipe(folder, task=own, reward=rewards, train__steps=1, train__prompts_per_step=2, **NO_EVAL)
    tree["task"] = own
    assert go(tmp_path / "run", tree).status == "done"
    rows = [*read_rows(RunFolder(tmp_path / "run").rollout_file(1))]
    episodes = [json.loads(row["episode"]) for row in rows]
    assert rows and all(each["failure"] == "" and {"number", "near"} <= each["parts"].keys() for each in episodes)
    app = servers / "resources_servers" / "counter" / "app.py"
    app.write_text(app.read_text() + "\n# another\n")
    _answered.cache_clear()
    tree["train"]["steps"] = 2
    with pytest.raises(UserError, match="task.environment: counter: app.py: changed since the run in"):
        go(tmp_path / "run", tree, resume=True)
