"""Agents from outside against a policy that says what the test wants, and against a tiny model."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from proxima.data import FieldError, UserError
from proxima.data.episode import Episode
from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, collect
from proxima.engine.protocol import Capabilities, EngineSetup, GrammarRefusedError, Request, Sampling, close_engine
from proxima.environment.agent_kinds import AgentSpec
from proxima.environment.agents import SCRIPT, AgentJob
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.job_processes import JobProcess
from proxima.model.chat.encode import prompt_tokens
from proxima.model.load import load
from proxima.reward import REWARDS
from proxima.rollout.episodes import agent_player
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.figures import episode_metrics, grammar_note
from proxima.rollout.episodes.played import with_group_prompt
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.training.episode_tokens import turns_of
from tests.engine.helpers import engine, trainer_log_prob
from tests.rollout.episodes import agent_functions
from tests.rollout.episodes.test_player import Engine, Watched
from tests.tiny import tiny_tokenizer
from tests.uvicorn_ticks import quick_ticks

HERE = "tests.rollout.episodes.agent_functions"
ASKING = AgentSpec(run=f"{HERE}:named_by_its_row").build()
TOKENIZER = tiny_tokenizer()


class Scripted(Engine):
    """Says what `says` makes of the context."""

    def __init__(self, says):
        super().__init__()
        self.says = says

    def text_of(self, request):
        return self.says(TOKENIZER.decode(request.prompt.tokens), request)

    @property
    def requests(self):
        return [request for call in self.calls for request in call]


def prompt(text="begin", uid=3):
    messages = ({"role": "user", "content": text},)
    return Prompt(uid=uid, messages=messages, tokens=prompt_tokens(messages, TOKENIZER), answer="4")


@pytest.fixture(scope="module", autouse=True)
def asking_agents_end():
    yield
    ASKING.close()


@quick_ticks()
def play(
    policy, agent, *, samples=1, context=2000, tool_format="hermes", max_tokens=200, roles=(), grace=None, **settings
):
    """`agent`: how it is started, or the name of a function; those that ask have a process that stays."""
    if isinstance(agent, str) and agent in agent_functions.ASKING:
        agents, given = ASKING, replace(prompt(), metadata={"agent": agent})
    else:
        agents = (agent if isinstance(agent, AgentSpec) else AgentSpec(run=f"{HERE}:{agent}")).build()
        given = prompt()

    if grace is not None:
        agents._processes.grace = grace
    settings_of = EpisodeSettings(**{"retries": 0, "seconds": 600} | settings)

    async def run():
        template = partial(TurnTemplate, TOKENIZER, {})
        episodes = AgentEpisodes(policy, agents, template, settings_of, context, tool_format, roles=roles)
        if isinstance(policy, Watched):
            policy.episodes = episodes
        asked = [Request(prompt=given, sample=i, sampling=Sampling(max_tokens=max_tokens)) for i in range(samples)]
        try:
            return sorted([c async for c in episodes.generate(asked)], key=lambda c: c.key)
        finally:
            if agents is not ASKING:
                agents.close()

    return asyncio.run(run())


def paths_are_what_the_policy_saw(policy, completion):
    """Each request's context is a prefix of a path, and each sampled token is once in one path as sampled."""
    seen = {}
    for path in completion.paths:
        begin = (path.initial_prompt or prompt()).tokens
        whole, at = np.concatenate([begin, path.tokens]).tolist(), len(begin)
        for span in path.episode.spans:
            if span.sampled:
                seen[span.turn] = whole[:at], whole[at : at + span.tokens]
                assert path.sampled[at - len(begin) : at - len(begin) + span.tokens].all()
            at += span.tokens
        assert at == len(whole)
        assert path.sampled.sum() == sum(span.tokens for span in path.episode.turns)
    asked = {request.turn: request for request in policy.requests if request.sample == completion.sample}
    assert seen.keys() == asked.keys()
    for turn, (context, tokens) in seen.items():
        assert context == asked[turn].prompt.tokens.tolist()
        text = policy.says(TOKENIZER.decode(context), asked[turn])
        assert tokens == [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["asks_once", "asks_a_helper"])
def test_what_runs_is_how_its_paths_begin(agent):
    policy = Watched(Scripted(lambda context, request: f"answer {request.turn}"))
    policy.agree_with(play(policy, agent))


@pytest.mark.slow
def test_tools_in_json_and_streamed():
    def says(context, request):
        if request.turn == 3:
            return "done"
        return f'so <tool_call>{{"name": "add", "arguments": {{"a": {request.turn}}}}}</tool_call>'

    policy = Scripted(says)
    for completion in play(policy, "uses_tools", samples=3):
        assert completion.episode.reward == 1.0 and completion.text == "done" and not completion.earlier
        assert [span.calls[0].arguments for span in completion.episode.turns[:-1]] == [{"a": i} for i in range(3)]
        observed = [span.text for span in completion.episode.spans if not span.sampled]
        assert observed == ["1", "2", "3"]
        paths_are_what_the_policy_saw(policy, completion)
    (shared,) = {request.prompt.shared_prefix for request in policy.requests}  # the tools
    assert shared > 0 and "begin" not in TOKENIZER.decode(policy.requests[0].prompt.tokens[:shared])


@pytest.mark.slow
def test_other_conversations_are_paths_of_their_own():
    policy = Scripted(lambda context, request: f"answer {request.turn}")
    (completion,) = play(policy, "asks_a_helper")
    assert [path.turn for path in completion.paths] == [1, 0, 3] and completion.episode.forks == 2
    assert [[span.turn for span in path.episode.turns] for path in completion.paths] == [[1], [0, 2], [3]]
    assert [path.episode.reward for path in completion.paths] == [None, None, 0.5]
    assert completion.text == "answer 3" and completion.episode.reward == 0.5
    paths_are_what_the_policy_saw(policy, completion)


ROLES = ("proposer", "solver")


@pytest.mark.slow
def test_roles_have_conversations_and_rewards_of_their_own():
    """The name of the model says who asks: equal chats of two attempts are two conversations, whose answers are equal
    too."""
    policy = Scripted(lambda context, request: "same" if request.turn < 4 else "right")
    (completion,) = play(policy, "proposes_and_solves", roles=ROLES)
    turns = {path.episode.player: [span.turn for span in path.episode.turns] for path in completion.paths}
    assert turns == {"solver/1": [2], "solver/0": [1, 3], "proposer": [0, 4]} and len(completion.paths) == 3
    assert completion.episode.rewards == {"proposer": -1.0, "solver/0": 1.0, "solver/1": 0.5}
    assert completion.episode.reward == (-1.0 + 0.75) / 2 and completion.text == "right"
    paths_are_what_the_policy_saw(policy, completion)
    assert Episode.from_json(completion.episode.to_json()) == completion.episode


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "player"), [(3, "solver/0"), (2, "solver/1"), (4, "proposer")])
def test_a_turn_that_is_cut_off_is_its_player_s(turn, player):
    policy = Scripted(lambda context, request: "cut…" if request.turn == turn else "whole")
    (completion,) = play(policy, "proposes_and_solves", roles=ROLES)
    truncated = {path.episode.player: path.truncated for path in completion.paths}
    assert truncated == dict.fromkeys(("solver/1", "solver/0", "proposer"), False) | {player: True}


@pytest.mark.slow
def test_a_limit_cuts_every_player():
    policy = Scripted(lambda context, request: f"answer {request.turn}")
    (completion,) = play(policy, "proposes_and_solves", roles=ROLES, turns=4)
    assert {path.episode.player: path.truncated for path in completion.paths} == dict.fromkeys(
        ("solver/1", "solver/0", "proposer"), True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "roles", "failure"),
    [
        ("forgets_a_role", ROLES, "its agent gave no reward of the role 'solver'"),
        ("rewards_another_role", ROLES, "the role 'sovler', but environment.roles has proposer, solver"),
        ("forgets_a_role", (), "the role 'proposer', but environment.roles has none"),
        ("gives_endless_rewards", ROLES, "its agent gave rewards that have no mean: {'solver': -inf, 'proposer': inf}"),
        ("names_no_role", ROLES, "model='policy': must name a role: policy/proposer, policy/solver"),
    ],
)
def test_an_episode_without_its_roles_fails(agent, roles, failure):
    (completion,) = play(Scripted(lambda context, request: "x"), agent, roles=roles)
    assert failure in completion.episode.failure


@pytest.mark.parametrize("roles", [["a", "a"], ["a b"], ["mean"], ["a/1"], "ab", [1, 2]])
def test_roles_that_cannot_be_told_apart_are_refused(roles):
    with pytest.raises(FieldError, match="roles"):
        AgentSpec(run=f"{HERE}:asks_once", roles=roles)


@pytest.mark.slow
def test_a_program_gives_each_role_its_reward():
    script = "import json; print('so'); print(json.dumps({'a': 1, 'b': -1}))"

    async def played(source):
        agents = AgentSpec(command=(sys.executable, "-c", source)).build()
        return await agents.play(AgentJob(row={}, base_url="", api_key=""))

    assert asyncio.run(played(script)) == {"a": 1.0, "b": -1.0}
    for line in ('{"a": "much"}', '{"a": ' * 10_000, '{"a": ' + "9" * 400 + "}"):
        assert asyncio.run(played(f"print({line!r})")) is None


@pytest.mark.slow
def test_turns_are_paid_by_the_ids_of_their_answers():
    """Turns 0 and 3 are of one chat, 1 and 2 the two answers to another; the reward of turn 0 is the second one that
    it was given."""
    (completion,) = play(Scripted(lambda context, request: f"answer {request.turn}"), "pays_turns")
    assert paid(completion) == {0: 0.5, 1: 0.0, 2: -2.0, 3: 1.0}
    assert completion.episode.reward == 8.0 - 0.5
    assert Episode.from_json(completion.episode.to_json()) == completion.episode


@pytest.mark.slow
def test_turns_that_are_paid_give_a_cut_episode_its_reward():
    (completion,) = play(Scripted(lambda context, request: "x"), "pays_and_is_cut", turns=1)
    assert completion.episode.cut == "turns" and completion.episode.reward == 0.75
    assert not completion.episode.unrewarded and paid(completion) == {0: 0.75}


@pytest.mark.slow
def test_players_are_paid_for_their_turns_and_at_the_end():
    (completion,) = play(Scripted(lambda context, request: "x"), "pays_players", roles=ROLES)
    assert completion.episode.rewards == {"proposer": 1.0, "solver/0": 12.0, "solver/1": 22.0}
    assert completion.episode.reward == (1.0 + 17.0) / 2


@pytest.mark.slow
def test_a_reward_for_an_unknown_answer_is_the_agent_s_failure():
    (completion,) = play(Scripted(lambda context, request: "x"), "pays_what_it_may_not")
    what = "ValueError: id='chatcmpl-1': no answer of this episode has it, or it is of an earlier attempt"
    assert completion.episode.failure == f"the agent failed: {what}"


@pytest.mark.slow
def test_an_answer_is_paid_by_its_own_episode_and_before_its_end():
    agent = AgentSpec(run=f"{HERE}:pays_another", workers=1)
    completions = play(Scripted(lambda context, request: "x"), agent, samples=2)
    assert [(c.episode.failure, c.episode.reward) for c in completions] == [("", 1.0)] * 2


@pytest.mark.slow
def test_an_attempt_that_is_repeated_begins_without_rewards():
    agent = AgentSpec(run=f"{HERE}:pays_and_fails_at_first", workers=1)
    (completion,) = play(Scripted(lambda context, request: f"answer {request.turn}"), agent, retries=1)
    assert completion.episode.attempts == 2 and completion.episode.reward == 2.0
    assert paid(completion) == {0: 0.0, 1: 2.0}


def paid(completion):
    """The reward of each turn."""
    return {span.turn: span.reward for path in completion.paths for span in path.episode.turns}


@pytest.mark.slow
def test_a_first_conversation_whose_opening_is_rewritten(monkeypatch):
    """A path of it begins with another prompt than the group's, which is what the first turn saw."""
    begins = TOKENIZER.chat_template.replace("assistant\n'", "assistant\n<think>\n'")
    assert begins != TOKENIZER.chat_template
    monkeypatch.setattr(TOKENIZER, "chat_template", begins)
    policy = Scripted(lambda context, request: f"answer {request.turn}")
    (completion,) = play(policy, "asks_a_helper")
    assert [[span.turn for span in path.episode.turns] for path in completion.paths] == [[0], [1], [2], [3]]
    paths_are_what_the_policy_saw(policy, completion)
    group, (of_group,) = with_group_prompt(prompt(), [completion])
    assert group.tokens.tolist() == prompt().tokens.tolist()
    assert [path.initial_prompt is None for path in of_group.paths] == [True, False, False, False]
    assert TOKENIZER.decode(of_group.paths[2].initial_prompt.tokens) + "<think>\n" == TOKENIZER.decode(group.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "failure"),
    [
        ("raises", "the agent failed: ValueError: no way"),
        ("reads_another_column", "the agent failed: KeyError: 'prompt; the row has messages, answer'"),
        ("returns_a_text", "the agent failed: ValueError: could not convert string to float: 'much'"),
        ("exits", "the agent's process ended with exit code 7"),
        ("hangs", "its agent took longer than 0.2 s (episode.seconds)"),
        ("never_asks", "its agent never asked the policy"),
    ],
)
def test_a_failure_is_an_episode_without_a_score(agent, failure):
    limits = {"call_seconds": 0.2, "seconds": 0.2, "grace": 0.5} if agent == "hangs" else {}
    retries = int(agent == "exits")  # each attempt starts a process
    (completion,) = play(Scripted(lambda context, request: "x"), agent, retries=retries, **limits)
    assert completion.episode.failure.startswith(failure) and completion.episode.attempts == 1 + retries
    assert not len(completion.tokens) and completion.episode.reward is None


@dataclass(frozen=True, kw_only=True)
class Here(AgentSpec):
    """Agents in this process: `talks` gets a function that sends a chat and returns the response."""

    command: tuple[str, ...] = ("none",)
    talks: Callable[..., Any]

    def build(self):
        return self

    async def play(self, job):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {job.api_key}"}, timeout=600) as client:

            def ask(*messages, **more):
                return client.post(f"{job.base_url}/chat/completions", json={"messages": messages, **more})

            return await self.talks(ask)

    def close(self):
        pass


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


class WithGrammars(Scripted):
    capabilities = Capabilities(grammars=True)


def test_what_a_grammar_restricted_is_not_trained():
    """Its tokens are in the contexts of later turns, and have no part in the loss; the others have their log-probs."""
    policy = Watched(WithGrammars(lambda context, request: f"says {request.turn}"))
    policy.capabilities = policy.engine.capabilities

    async def talks(ask):
        chat = []
        for form in (None, FORM, None, FORM):
            chat.append({"role": "user", "content": "go on"})
            answer = await ask(*chat, **({"response_format": form} if form else {}))
            chat.append(answer.json()["choices"][0]["message"])
        return 1.0

    (completion,) = play(policy, Here(talks=talks))
    asked = policy.engine.requests
    assert [request.grammar for request in asked] == [None, '{"type": "object"}', None, '{"type": "object"}']
    turns = [span for span in completion.episode.spans if span.role == "assistant"]
    assert [(span.sampled, span.grammar) for span in turns] == [(True, False), (True, True)] * 2
    spans = completion.episode.spans
    trained = np.repeat([span.sampled and not span.grammar for span in spans], [span.tokens for span in spans])
    assert np.array_equal(completion.sampled, trained) and trained.any()
    written = np.repeat([span.sampled for span in spans], [span.tokens for span in spans])
    assert completion.policy_version[written].tolist() == np.repeat([1, 2, 3, 4], [s.tokens for s in turns]).tolist()
    expected = np.concatenate([-np.arange(1, turns[t].tokens + 1, dtype=np.float32) / 100 - t for t in (0, 2)])
    np.testing.assert_array_equal(completion.sampled_log_prob[trained], expected)
    trajectory = Trajectory.of(prompt(), completion, group=0, advantage=0.0, behavior="sampled")
    assert np.array_equal(trajectory.loss_mask, trained)
    assert [len(turn.places) for turn in turns_of(completion)] == [turns[0].tokens, 0, turns[2].tokens, 0]
    figures = episode_metrics([completion])
    share = (turns[1].tokens + turns[3].tokens) / sum(span.tokens for span in turns)
    assert figures["episode/grammar_fraction"] == pytest.approx(share) and figures["episode/turns/mean"] == 4
    assert figures["episode/observation_tokens"] == sum(span.tokens for span in spans if not span.sampled)
    assert grammar_note([completion]).startswith("2 of 4 messages of the model were sampled under a grammar")
    again = Episode.from_json(completion.episode.to_json())
    assert again == completion.episode
    for part, paths in policy.seen:  # of an unfinished episode, too
        for whole, mask in paths:
            assert np.array_equal(mask, trained[: len(mask)]) and len(whole.tokens) == len(mask), part.key


def test_an_episode_under_grammars_alone_is_scored_and_not_trained():
    async def talks(ask):
        await ask({"role": "user", "content": "go"}, response_format={"type": "json_object"})
        return 1.0

    (completion,) = play(WithGrammars(lambda context, request: "{}"), Here(talks=talks))
    assert completion.episode.reward == 1 and len(completion.tokens) and not completion.sampled.any()
    assert completion.generated == 0 and set(completion.policy_version.tolist()) == {1}
    (free,) = play(WithGrammars(lambda context, request: "{}"), "asks_once")
    assert "episode/grammar_fraction" not in episode_metrics([free]) and grammar_note([free]) == ""
    assert "grammar" not in free.episode.to_json()


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BEGUN = {"role": "assistant", "content": "{"}


@pytest.mark.parametrize(
    ("policy", "more", "says"),
    [
        (Scripted, {}, "response_format: the engine of this run has no grammars"),
        (WithGrammars, {"tools": [TOOL]}, "response_format: not with tools"),
        (WithGrammars, {"continue_final_message": True, "add_generation_prompt": False}, "is begun already"),
        (None, {}, "response_format: the engine can't follow it: no such type"),
    ],
)
def test_a_form_that_can_not_be_kept_is_refused_by_name(policy, more, says):
    class Refuses(WithGrammars):
        async def generate(self, requests):
            if requests[0].grammar is not None:
                raise GrammarRefusedError("no such type")
            async for completion in super().generate(requests):
                yield completion

    refusals = []

    async def talks(ask):
        chat = [{"role": "user", "content": "go"}]
        begun = [BEGUN] if "continue_final_message" in more else []
        refusals.append(await ask(*chat, *begun, response_format=FORM, **more))
        assert (await ask(*chat)).status_code == 200
        return 1.0

    engine = policy or Refuses
    given = engine(lambda context, request: "fine")
    given.capabilities = getattr(given, "capabilities", Capabilities())
    (completion,) = play(given, Here(talks=talks))
    error = refusals[0].json()["error"]
    assert refusals[0].status_code == 400 and says in error["message"] and "\n" not in error["message"]
    assert completion.episode.failure == "" and completion.text == "fine" and completion.sampled.all()


def test_the_local_engine_has_no_grammars(tiny_model):
    asked = Request(prompt=prompt(), sample=0, sampling=Sampling(max_tokens=4), grammar="{}")
    assert not Local().grammars and not Local().capabilities_on(torch.device("cpu")).grammars
    engine = Local().build(EngineSetup.of(load(str(tiny_model("llama")), dtype=torch.float32, device="cpu")))
    try:
        with pytest.raises(GrammarRefusedError, match="local engine has no grammars"):
            asyncio.run(collect(engine, [asked]))
    finally:
        close_engine(engine)


@pytest.mark.slow
def test_a_chat_that_renders_to_no_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    given = []

    async def talks(ask):
        given.append(await ask({"role": "user", "content": ""}))

    (completion,) = play(Scripted(lambda context, request: "x"), Here(talks=talks))
    error = given[0].json()["error"]
    assert given[0].status_code == 400 and error["message"].endswith("these messages give a prompt without tokens")
    assert completion.episode.failure == "these messages give a prompt without tokens"


def test_a_fenced_block_is_the_first_argument_of_a_tool(monkeypatch):
    """Its name is the only thing that a tool must have; a call that is not the policy's own is written for it."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", plain)
    tools = [agent_functions.TOOL, {"type": "function", "function": {"name": "go"}}]
    written = {"type": "function", "function": {"name": "add", "arguments": '{"a": "1"}'}}
    said = []

    async def talks(ask):
        message = {"role": "assistant", "content": "", "tool_calls": [written]}
        answer = await ask({"role": "user", "content": "begin"}, message, tools=tools)
        said.append(answer.json()["choices"][0]["message"]["tool_calls"][0]["function"])

    policy = Scripted(lambda context, request: "```add\n2\n```")
    play(policy, Here(talks=talks), tool_format="code")
    assert said == [{"name": "add", "arguments": '{"a": "2"}'}]
    context = TOKENIZER.decode(policy.requests[0].prompt.tokens)
    assert "- go(): " in context and "assistant: ```add\n1\n```" in context


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), UserError("no server is left")])
def test_what_the_engine_raises_ends_the_run_and_not_the_episode(error):
    def says(context, request):
        raise error

    async def talks(ask):
        given.append((await ask({"role": "user", "content": "begin"})).json()["error"]["message"])

    given = []
    with pytest.raises(type(error), match=str(error)):
        play(Scripted(says), Here(talks=talks), retries=5)
    assert given in ([], [f"the engine has failed: {error}"])  # the run may end first


@pytest.mark.slow
@pytest.mark.parametrize("continued", [False, True])
def test_a_long_chat_delays_no_other_agent(monkeypatch, continued):
    """The encoding of one chat waits here until another agent has been answered."""
    answered, encoded = threading.Event(), TurnTemplate.encode_after if continued else TurnTemplate.encode_chat
    waited = []

    def slow(template, *texts):
        if "long" in texts[-1]:
            waited.append(answered.wait(600))
        return encoded(template, *texts)

    monkeypatch.setattr(TurnTemplate, encoded.__name__, slow)
    order = iter(["long", "short"])
    begun = asyncio.Event()

    async def talks(ask):
        kind, opening = next(order), {"role": "user", "content": "begin"}
        if continued:
            said = (await ask(opening)).json()["choices"][0]["message"]
        own = [opening, said, {"role": "user", "content": kind}] if continued else [{"role": "user", "content": kind}]
        if kind == "short":
            await begun.wait()
        begun.set()
        response = await ask(*own)
        if kind == "short":
            answered.set()
        return float(response.status_code)

    play(Scripted(lambda context, request: "x"), Here(talks=talks), samples=2)
    assert waited == [True]


def test_an_episode_given_to_a_process_that_has_just_ended_fails_at_once():
    """Between its choice and the episode. Nobody would read the answer; another attempt gets a new process."""
    process = JobProcess((sys.executable, str(SCRIPT), f"{HERE}:named_by_its_row"))
    process.end()
    with pytest.raises(EnvironmentFailure, match="another episode ended the agent's process") as caught:
        asyncio.run(process.ask({"row": {}}, EpisodeClock()))
    assert caught.value.collateral


@pytest.mark.slow
def test_the_endpoint_of_agents_ends_with_the_last_call(monkeypatch):
    made = []

    class Seen(agent_player.ChatEndpoint):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(agent_player, "ChatEndpoint", Seen)
    play(Scripted(lambda context, request: "x"), "asks_once", samples=2)
    (endpoint,) = made
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{endpoint.address}/models")


@pytest.mark.slow
def test_what_an_agent_prints_is_no_answer():
    (completion,) = play(Scripted(lambda context, request: "ab"), "prints")
    assert completion.episode.reward == 2.0


@pytest.mark.slow
def test_the_limit_of_turns_ends_an_episode_that_is_scored():
    policy = Scripted(lambda context, request: "go on")
    (completion,) = play(policy, "asks_forever", turns=3)
    assert completion.episode.cut == "turns" and completion.truncated and not completion.episode.failure
    assert len(completion.episode.turns) == 3
    assert completion.episode.unrewarded.startswith("the agent failed: BadRequestError: ")
    assert Episode.from_json(completion.episode.to_json()) == completion.episode
    with pytest.raises(ValueError, match=r"got no reward from its environment: the agent failed: BadRequestError"):
        REWARDS["environment"]().score_one(prompt(), completion)
    paths_are_what_the_policy_saw(policy, completion)


@pytest.mark.slow
@pytest.mark.parametrize(("long", "cuts"), [(0, ["", "", ""]), (3, ["", "", "tokens"])])
def test_a_limit_cuts_the_episode_only_in_its_last_turn(long, cuts):
    policy = Scripted(lambda context, request: "x" * 300 if request.turn == long else "ok")
    (completion,) = play(policy, "asks_a_helper")
    assert [path.episode.cut for path in completion.paths] == cuts and completion.truncated == bool(cuts[-1])


@pytest.mark.slow
def test_an_agent_that_breaks_after_a_truncated_answer_has_failed():
    """Its answer hit the limit of tokens, which refuses nothing: it is a fault, and begins again."""
    policy = Scripted(lambda context, request: "x" * 300)
    (completion,) = play(policy, "breaks_after_an_answer", retries=1)
    assert completion.episode.failure == "the agent failed: RuntimeError: the database is down"
    assert completion.episode.attempts == 2


@pytest.mark.slow
def test_a_parallel_agent_at_the_limit_is_cut():
    """The last answer arrives after the refusal of another request, which ended the agent."""

    class Slow(Scripted):
        async def generate(self, requests):
            while requests[0].turn == 1 and not next(iter(policy.episodes.playing.values())).cut:
                await asyncio.sleep(0.01)
            async for completion in super().generate(requests):
                yield completion

    policy = Watched(Slow(lambda context, request: "fine"))
    (completion,) = play(policy, "asks_in_parallel", turns=2)
    assert completion.episode.failure == "" and completion.episode.cut == "turns"
    assert completion.episode.unrewarded.startswith("the agent failed: BadRequestError: ")


@pytest.mark.slow
def test_a_refusal_that_an_agent_survives_cuts_only_what_was_refused():
    (completion,) = play(Scripted(lambda context, request: "fine"), "summarises", context=300)
    assert completion.episode.cut == "" and completion.episode.reward == 1.0
    assert [path.truncated for path in completion.paths] == [False]


@pytest.mark.slow
def test_the_context_ends_an_episode_too():
    (completion,) = play(Scripted(lambda context, request: "go on"), "asks_forever", turns=1000, context=300)
    assert completion.episode.cut == "context" and len(prompt().tokens) + len(completion.tokens) <= 300


@pytest.mark.slow
def test_a_first_chat_without_room_is_named():
    (completion,) = play(Scripted(lambda context, request: "x"), "asks_once", context=5)
    failure = "its agent's first chat leaves no room for an answer in the model's context"
    assert completion.episode.failure == failure


@pytest.mark.slow
def test_a_command_in_any_language():
    code = (
        "import json, os, sys, urllib.request as u\n"
        "row = json.load(sys.stdin)\n"
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'messages': row['messages']}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "said = json.load(u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head)))\n"
        "print('thinking'); print(len(said['choices'][0]['message']['content']))"
    )
    (completion,) = play(Scripted(lambda context, request: "12345"), AgentSpec(command=(sys.executable, "-c", code)))
    assert completion.episode.reward == 5.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reward", "failure"),
    [
        ("print('x' * 300_000); print(0.5)", 0.5, ""),
        ("print('1' * 300_000)", None, "the last line of the agent's output has more than 65,536 bytes"),
        (
            "import sys; print('x' * 300_000, file=sys.stderr); sys.exit('no way')",
            None,
            "the agent ended with exit code 1: no way (234,472 bytes of its output are cut)",
        ),
    ],
)
def test_of_the_output_of_a_command_the_end_is_kept(code, reward, failure):
    agents = AgentSpec(command=(sys.executable, "-c", code)).build()
    job = AgentJob(row={"long": "x" * 300_000}, base_url="", api_key="", model="")  # nor must it read all of its input

    async def run():
        return await agents.play(job)

    if not failure:
        assert asyncio.run(run()) == reward
    else:
        with pytest.raises(EnvironmentFailure) as error:
            asyncio.run(run())
        assert str(error.value) == failure


@pytest.mark.slow
def test_log_probs_of_a_tiny_model_are_the_trainers():
    policy = engine()
    completions = play(policy, "asks_forever", samples=2, turns=3, max_tokens=12, context=250)
    for completion in completions:
        assert len(completion.episode.turns) == 3
        asked = [Request(prompt=prompt(), sample=completion.sample, sampling=Sampling())]
        expected = trainer_log_prob("llama", asked, [completion]).numpy()
        assert np.abs(expected - completion.sampled_log_prob)[completion.sampled].max() < 1e-4


@pytest.mark.parametrize("fields", [{}, {"run": "a:b", "command": ("c",)}, {"run": "nowhere_at_all:f"}, {"run": "x"}])
def test_bad_specs(fields):
    with pytest.raises(FieldError) as error:
        AgentSpec(**fields)
    assert error.value.field == "run"


def test_the_module_of_an_agent_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "agent_beside.py").write_text("raise SystemExit('imported')")
    with pytest.raises(FieldError, match="can't be found"):
        AgentSpec(run="agent_beside:play")
    monkeypatch.chdir(tmp_path)
    AgentSpec(run="agent_beside:play")


def test_an_agent_without_the_packages_of_its_endpoint_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FieldError, match=r"uvicorn and starlette.*proxima-rl\[serve\]"):
        AgentSpec(command=("agent",))
