"""Whatever an agent does with its chats, in whichever API: each completion is trained once, with the tokens that were
sampled, behind what the policy saw."""

import asyncio
import json
import os
import re
import sys
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from proxima.engine.protocol import Request, Sampling
from proxima.environment.agents import SCRIPT, ProcessAgents
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.settings import EpisodeSettings
from tests.rollout.episodes.agent_frameworks import FRAMEWORKS
from tests.rollout.episodes.agent_habits import HABITS
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, prompt
from tests.uvicorn_ticks import quick_ticks

pytestmark = pytest.mark.slow

APIS = ("chat", "responses", "messages")
SDKS = {"openai chat": "openai", "openai responses": "openai", "anthropic messages": "anthropic"}
FRAMEWORK_APIS = ("agents responses", "agents chat", "langgraph chat", "langgraph responses", "langgraph messages")
OTHER_PYTHON = os.environ.get("PROXIMA_AGENT_PYTHON")  # an interpreter that has the SDKs: see tests/README.md
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'


def says(context, request):
    """What the last `do:` of a chat says."""
    if context.endswith('"arguments": '):
        return '{"a": 1}}\n</tool_call>'
    wanted = re.findall(r"do:(\w+)", context)[-1]
    if wanted.startswith("use_"):
        call = {"name": wanted.removeprefix("use_"), "arguments": {"a": 1, "input": "do:say"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    texts = {"call": CALL.format(1), "two": CALL.format(1) + "\n" + CALL.format(2), "pad": f"  answer {request.turn}\n"}
    return texts.get(wanted, f"answer {request.turn}")


class Policy(Scripted):
    """As a real engine: a text begins with what its prompt has of it, and n answers have n calls."""

    def completion(self, request, version):
        completion = super().completion(request, version)
        return replace(completion, text=request.prompt.begun + completion.text)


def trained_once(policy, completion):
    """Each request of the policy is a turn of one path, with its tokens behind its context. Their number."""
    assert completion.episode.failure == ""
    turns = {}
    for path in completion.paths:
        tokens = (path.initial_prompt or prompt()).tokens
        whole, at = np.concatenate([tokens, path.tokens]).tolist(), len(tokens)
        assert int(path.sampled.sum()) == sum(span.tokens for span in path.episode.turns)
        for span in path.episode.spans:
            if span.sampled:
                assert span.turn not in turns, "trained twice"
                turns[span.turn] = whole[:at], whole[at : at + span.tokens]
            at += span.tokens
    asked = {request.turn: request for request in policy.requests}
    assert turns.keys() == asked.keys()
    for turn, (context, tokens) in turns.items():
        request = asked[turn]
        assert context == request.prompt.tokens.tolist()
        sampled = [*TOKENIZER(policy.says(TOKENIZER.decode(context), request), add_special_tokens=False)["input_ids"]]
        assert tokens == [*sampled, TOKENIZER.eos_token_id][: request.sampling.max_tokens]
    return len(turns)


@quick_ticks()
def played(agents, speaker, habit):
    """The policy that was asked, and the episode."""
    policy, given = Policy(says), replace(prompt(), metadata={"speaker": speaker, "habit": habit})
    settings = EpisodeSettings(retries=0, turns=16)

    async def run():
        episodes = AgentEpisodes(policy, agents, partial(TurnTemplate, TOKENIZER, {}), settings, 4000, "hermes")
        async with aclosing(episodes.generate([Request(prompt=given, sample=0, sampling=Sampling())])) as stream:
            return [completion async for completion in stream]

    (completion,) = asyncio.run(run())
    return policy, completion


@pytest.mark.parametrize("habit", HABITS)
def test_plain_http(agents, habit):
    """The three APIs give the policy the same tokens."""
    seen = []
    for api in APIS:
        policy, completion = played(agents, f"plain {api}", habit)
        trained_once(policy, completion)
        seen.append([request.prompt.tokens.tolist() for request in policy.requests])
    alike = habit not in (
        "prefills",
        "several_answers",
        "stores_responses",
        "a_clock_every_turn",
        "parallel_branches",
        "helpers",
    )
    assert not alike or seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("speaker", SDKS)
def test_official_sdks(agents, speaker):
    if OTHER_PYTHON is None and find_spec(SDKS[speaker]) is None:
        pytest.skip(f"needs {SDKS[speaker]}")
    counts = {habit: trained_once(*played(agents, speaker, habit)) for habit in HABITS}
    assert min(counts.values()) >= 1
    print(f"{speaker}: {len(counts)} habits, {sum(counts.values())} completions, each trained once")


@pytest.mark.parametrize("speaker", FRAMEWORK_APIS)
def test_frameworks(frameworks, speaker):
    framework = speaker.partition(" ")[0]
    if OTHER_PYTHON is None and find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    counts = {habit: trained_once(*played(frameworks, speaker, habit)) for habit in FRAMEWORKS[framework][1]}
    assert min(counts.values()) >= 1
    print(f"{speaker}: {len(counts)} habits, {sum(counts.values())} completions, each trained once")


@pytest.fixture(scope="module")
def agents():
    yield from process_of("agent_habits")


@pytest.fixture(scope="module")
def frameworks():
    yield from process_of("agent_frameworks")


def process_of(module):
    function = f"tests.rollout.episodes.{module}:play"
    made = ProcessAgents((OTHER_PYTHON or sys.executable, str(SCRIPT), function), 1)
    yield made
    made.close()
