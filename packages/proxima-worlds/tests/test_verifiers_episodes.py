"""Episodes in environments of the real library verifiers, where interpreters have it."""

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from proxima.data.flow import Prompt
from proxima.engine.protocol import Request, Sampling
from proxima.environment import ENVIRONMENTS
from proxima.model.chat.encode import prompt_tokens
from proxima.rollout.environment_rows import EnvironmentRows
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, paths_are_what_the_policy_saw
from tests.uvicorn_ticks import quick_ticks

LIBRARIES = {"PROXIMA_VERIFIERS_03_PYTHON": "verifiers below 0.4", "PROXIMA_VERIFIERS_PYTHON": "verifiers 0.4"}
pytestmark = pytest.mark.slow
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    here = Path(__file__).parent  # it has the tasksets
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "verifiers_worlds"), str(here)]))


def play(kind, says, **settings):
    environment = {"kind": "verifiers", "name": "verifiers_worlds", "args": {"kind": kind}}
    return play_in(environment, "PROXIMA_VERIFIERS_03_PYTHON", says, **settings)


@quick_ticks()
def play_in(environment, variable, says, *, samples=1, max_tokens=200, **settings):
    """The completions of the first row of an environment, in which the policy says each of `says` in turn."""
    environment = environment | {"python": os.environ.get(variable)}
    if not environment["python"]:
        pytest.skip(f"{variable} names no interpreter with {LIBRARIES[variable]}")
    row = EnvironmentRows(environment=environment).rows(1)[0]
    tokens = prompt_tokens(row.messages, TOKENIZER)
    prompt = Prompt(uid=3, messages=row.messages, tokens=tokens, answer=row.answer, metadata=row.metadata)
    policy = Scripted(lambda context, request: says[request.turn])
    kind = ENVIRONMENTS[environment["kind"]](**{k: v for k, v in environment.items() if k != "kind"})
    agents = kind.build()

    async def run():
        of = EpisodeSettings(**{"retries": 0, "seconds": 600} | settings)
        template = partial(TurnTemplate, TOKENIZER, {})
        episodes = AgentEpisodes(policy, agents, template, of, 2000, "hermes", roles=kind.roles)
        asked = [Request(prompt=prompt, sample=i, sampling=Sampling(max_tokens=max_tokens)) for i in range(samples)]
        return sorted([c async for c in episodes.generate(asked)], key=lambda c: c.key)

    try:
        completions = asyncio.run(run())
    finally:
        agents.close()
    return prompt, policy, completions


def test_a_single_turn_begins_with_the_rows_messages():
    prompt, policy, (completion, other) = play("single", ["7"], samples=2)
    assert completion.episode.failure == "" and completion.initial_prompt is None  # exactly the row's tokens
    assert completion.episode.reward == other.episode.reward == pytest.approx(1.1)
    assert {**completion.episode.parts} == {"exact": 1.0, "letters": 1.0, "num_turns": 1.0}
    assert [message["content"] for message in prompt.messages] == ["Be brief.", "Begin."]
    assert policy.requests[0].prompt.tokens.tolist() == prompt.tokens.tolist()


def test_several_turns_are_one_path():
    _, policy, (completion,) = play("multi", ["5", "6", "7"])
    assert completion.episode.forks == 0 and completion.episode.reward == pytest.approx(0.5)  # of "found"
    texts = [span.text for span in completion.episode.spans]
    assert [text for text in texts if "higher" in text] == ["higher, after 1", "higher, after 2"]
    assert len(policy.requests) == 3


def test_a_rewritten_history_forks():
    _, _, (completion,) = play("rewrites", ["5", "6", "7"])
    assert completion.episode.forks == 2 and len(completion.paths) == 3


@pytest.mark.parametrize(
    ("kind", "calls", "result", "reward"),
    [
        ("tools", [CALL.format("double", '{"number": 21}'), "7"], "42", 1.1),
        ("stateful", [CALL.format("add", '{"by": 2}'), CALL.format("add", '{"by": 3}'), "done"], "5 now", 5.0),
    ],
)
def test_tools_get_what_the_model_and_the_environment_give(kind, calls, result, reward):
    _, policy, (first, second) = play(kind, calls, samples=2)
    for completion in (first, second):
        assert completion.episode.failure == "" and completion.episode.reward == pytest.approx(reward)
        assert [span for span in completion.episode.spans if span.text.endswith(result)]
        assert completion.episode.forks == 0
        paths_are_what_the_policy_saw(policy, completion)


def test_a_reward_function_that_raises_fails_the_episode():
    _, _, (completion,) = play("broken", ["7"])
    assert completion.episode.failure == "the agent failed: the reward function broken raised RuntimeError: no score"
    assert completion.episode.reward is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nan", "the agent failed: the reward function nan returned nan"),
        ("leaves", "the agent failed: the reward function leaves raised SystemExit: goodbye"),
        ("silent", "its agent never asked the policy"),
    ],
)
def test_a_reward_that_is_no_number_fails_the_episode(kind, why):
    _, _, (completion,) = play(kind, ["7"])
    assert why in completion.episode.failure and completion.episode.reward is None


def test_at_a_limit_a_reward_that_is_no_number_fails_the_episode_too():
    _, _, (completion,) = play("multi_nan", ["5", "6", "7"], turns=1)
    assert "the reward function nan returned nan" in completion.episode.failure


def test_a_reward_function_that_blocks_its_process_ends_with_the_episode():
    _, _, (completion,) = play("sleeps", ["7"], seconds=20, call_seconds=5)
    assert "took longer than 20 s" in completion.episode.failure


def test_a_function_of_weight_0_that_raises_is_left_out():
    _, _, (completion,) = play("logged", ["7"])
    assert completion.episode.failure == "" and completion.episode.reward == 1.0
    assert {**completion.episode.parts} == {"exact": 1.0, "num_turns": 1.0}


@pytest.mark.parametrize(("kind", "why"), [("failing", "no disk"), ("crashing", "ZeroDivisionError: by zero")])
def test_an_error_of_the_environment_is_a_failure(kind, why):
    _, _, (completion,) = play(kind, ["7"], retries=1)
    assert why in completion.episode.failure and completion.episode.attempts == 2


def test_an_episode_that_takes_too_long_fails():
    _, _, (completion,) = play("hanging", ["7"], seconds=20, call_seconds=5)
    assert "took longer than 20 s" in completion.episode.failure


def test_at_the_limit_of_turns_what_was_done_is_scored():
    _, _, (completion,) = play("multi", ["5", "6", "7"], turns=1)
    assert completion.episode.cut == "turns" and completion.episode.failure == ""
    assert completion.episode.parts["exact"] == 0.0 and completion.episode.reward is not None


def test_an_empty_answer_is_scored():
    _, _, (completion,) = play("counted", [""])
    assert completion.episode.failure == "" and completion.episode.reward == 0.25


def test_a_taskset_of_verifiers_0_4_has_named_rewards():
    environment = {"kind": "verifiers", "name": "adder_v1", "args": {"agent": {"harness": {"id": "adder_v1"}}}}
    prompt, policy, (completion,) = play_in(environment, "PROXIMA_VERIFIERS_PYTHON", ["12"])
    assert completion.episode.failure == "" and completion.episode.reward == 1.0
    assert completion.episode.parts["even"] == 1.0 and completion.initial_prompt is None
    (request,) = policy.requests
    assert request.prompt.tokens.tolist() == prompt.tokens.tolist()
    assert completion.tokens.tolist()[:-1] == TOKENIZER("12", add_special_tokens=False)["input_ids"]


def two_agents(says, **args):
    environment = {"kind": "verifiers", "name": "nim_v1", "args": args}
    _, policy, (completion,) = play_in(environment, "PROXIMA_VERIFIERS_PYTHON", says)
    assert completion.episode.failure == ""
    return policy, completion


def test_each_agent_of_an_environment_is_a_role_with_its_own_reward():
    policy, completion = two_agents(["two", "eleven"])
    assert completion.episode.rewards == {"first": 0.0, "second": 1.0} and completion.episode.reward == 0.5
    assert [path.episode.player for path in completion.paths] == ["first", "second"]
    assert completion.episode.parts == {"first/longer": 0.0, "second/longer": 1.0}
    assert [request.prompt.messages[-1]["content"] for request in policy.requests] == ["Say 0.", "Say more than two."]


def test_an_agent_that_plays_several_times_has_the_mean_of_its_rewards():
    _, completion = two_agents(["two", "eleven", "ten"], attempts=2)
    assert completion.episode.rewards == {"first": 0.0, "second": 0.5}


def test_an_agent_that_is_not_to_be_trained_has_the_reward_0():
    _, completion = two_agents(["two", "eleven"], trained=False)
    assert completion.episode.rewards == {"first": 0.0, "second": 0.0}
    assert completion.episode.parts["second/longer"] == 1.0
