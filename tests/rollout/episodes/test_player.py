"""Episodes on a scripted engine, in scripted environments: turns, limits, failures, and what each becomes."""

import asyncio
import base64
import io
from contextlib import aclosing, suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.data.episode import Episode, ToolCall
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.engine.protocol import InFlight, Request, Sampling
from proxima.environment.hosts import Answer, EnvironmentFailure
from proxima.environment.interface import EnvironmentInterface
from proxima.reward.environment_reward import EnvironmentReward
from proxima.reward.runner import RewardRunner
from proxima.rollout.collector import Collector
from proxima.rollout.episodes.conversation import Conversation, TurnTemplate
from proxima.rollout.episodes.figures import episode_metrics
from proxima.rollout.episodes.played import COLLATERAL, EpisodeTimes, Played, sampled_turns
from proxima.rollout.episodes.player import Episodes, Rules
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.tool_use import ToolUse
from proxima.rollout.generator import GroupGenerator, GroupSpec, RolloutListener
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from tests.tiny import tiny_tokenizer
from tests.tiny_images import picture

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
SHORT = "{% for m in messages %}{{ m.role[0] + m.content + '<|im_end|>' }}{% endfor %}{{ 'a' }}"
BEGINS = SHORT.replace("{{ 'a' }}", "{{ 'a#' }}")  # a turn begins with what the history lacks
FORGETFUL = (
    "{% for m in messages %}{% if not loop.last and m.role == 'assistant' %}{{ m.role[0] + '-' + '<|im_end|>' }}"
    "{% else %}{{ m.role[0] + m.content + '<|im_end|>' }}{% endif %}{% endfor %}{{ 'a' }}"
)
PROMPT = Prompt(uid=7, messages=({"role": "user", "content": "hi"},), tokens=np.array([5], np.int32), answer="1")
DONE = Answer(done=True)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def said(content, **facts):
    return Answer(messages=({"role": "user", "content": content},), **facts)


class Engine:
    """Says `texts[sample][turn]`; a text that ends with "…" is cut off. `versions` counts the calls."""

    def __init__(self, *texts, masks=False):
        self.texts, self.masks = texts, masks
        self.calls, self.running = [], 0

    async def generate(self, requests):
        self.calls.append(list(requests))
        self.running += 1
        version = len(self.calls)
        try:
            for request in requests:
                await asyncio.sleep(0)
                yield self.completion(request, version)
        finally:
            self.running -= 1

    def text_of(self, request):
        return self.texts[request.sample][request.turn]

    def completion(self, request, version):
        text = self.text_of(request)
        if isinstance(text, Exception):
            raise text
        cut = text.endswith("…")
        tokens = ids(text.removesuffix("…")) + ([] if cut else [END])
        if len(tokens) > request.sampling.max_tokens:
            cut, tokens = True, tokens[: request.sampling.max_tokens]
        log_prob = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 100 - request.turn
        sets = [[0, token] if token else [0] for token in tokens]
        reason, text = "length" if cut else "stop", text.removesuffix("…")
        return replace(
            Completion.of_text(request.prompt.uid, request.sample, text, np.array(tokens, np.int32), reason),
            turn=request.turn,
            sampled_log_prob=log_prob,
            untruncated_log_prob=log_prob,
            policy_version=np.full(len(tokens), version, np.int32),
            temperature=request.sampling.temperature,
            sampling_mask=SamplingMask.of_sets(sets) if self.masks else None,
        )


class Watched:
    """Before each answer of an engine, the episodes are asked what they are so far, with some of the turn sampled."""

    def __init__(self, engine):
        self.engine, self.episodes, self.seen = engine, None, []

    async def generate(self, asked):
        by_key = {request.key: request for request in asked}
        async for completion in self.engine.generate(asked):
            whole = InFlight.of(completion, by_key[completion.key].prompt.tokens)
            for count in (0, 1, len(whole.tokens)):
                part = replace(whole, tokens=whole.tokens[:count], policy_version=whole.policy_version[:count])
                self.seen.append((part, self.episodes.unfinished([part])))
            yield completion

    def agree_with(self, completions):
        """What an episode was is how its paths begin, and has the turn that was sampled."""
        paths = {path.key: path for completion in completions for path in completion.paths}
        for turn, parts in self.seen:
            own = [(part, sampled) for part, sampled in parts if part.key[:2] == turn.key[:2]]
            for part, sampled in own:
                path, count = paths[part.key], len(part.tokens)
                assert (
                    part.prompt_tokens.tolist() == (path.initial_prompt or PROMPT).tokens.tolist()
                    or path.initial_prompt is None
                )
                assert part.tokens.tolist() == path.tokens[:count].tolist()
                assert part.policy_version.tolist() == path.policy_version[:count].tolist()
                assert sampled.tolist() == path.sampled[:count].tolist() and sampled[-1]
            if count := len(turn.tokens):
                contexts = [np.concatenate([part.prompt_tokens, part.tokens]).tolist() for part, _ in own]
                assert [*turn.prompt_tokens.tolist(), *turn.tokens.tolist()] in contexts
        turns = sum(len(path.episode.turns) for path in paths.values())
        assert self.episodes.unfinished([]) == [] and len(self.seen) == 3 * turns


class World:
    """The n-th environment that is opened, over all episodes, does what `scripts[n]` says; the last one goes on. Its
    opening and each call take `seconds`."""

    def __init__(self, *scripts, openings=(None,), seconds=0.0):
        self.scripts, self.openings, self.seconds = scripts, openings, seconds
        self.opened, self.alive, self.rows = 0, 0, []

    async def open(self, row, seed, label=""):
        number, self.opened = self.opened, self.opened + 1
        self.rows.append((row, seed))
        script = self.scripts[min(number, len(self.scripts) - 1)]
        if isinstance(script, Exception):
            raise script
        self.alive += 1
        return Instance(self, list(script), self.openings[min(number, len(self.openings) - 1)])


class Instance:
    def __init__(self, world, script, opening):
        self.world, self.script, self.state, self.freed = world, script, "begun", False
        self.seconds = world.seconds
        self.interface = EnvironmentInterface()
        self.opening = None if opening is None else ({"role": "user", "content": opening},)

    def _next(self):
        self.seconds += self.world.seconds
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    async def respond(self, text):
        await asyncio.sleep(0)
        return self._next()

    async def call(self, calls):
        return [replace(self._next(), messages=({"role": "tool", "content": f"{c.name}!"},)) for c in calls]

    async def end(self, messages=()):
        self._free()
        return next((step for step in self.script if isinstance(step, float)), None)

    def drop(self):
        self._free()

    def _free(self):
        self.world.alive -= not self.freed
        self.freed = True


def player(engine, world, template=SHORT, tool_format=None, context=200, instructions="", **settings):
    TOKENIZER.chat_template = template
    rules = {"context": context, "responds": tool_format is None, "rewards": True}
    rules = Rules(settings=EpisodeSettings(**settings), **rules)
    use = ToolUse(template=TurnTemplate(TOKENIZER, {}), tool_format=tool_format, instructions=instructions)
    return Episodes(engine, world, lambda schemas: use, rules)


def requests(samples, **sampling):
    return [Request(prompt=PROMPT, sample=i, sampling=Sampling(**sampling), seed=3) for i in range(samples)]


def play(episodes, samples=1, **sampling):
    async def collected():
        async with aclosing(episodes.generate(requests(samples, **sampling))) as stream:
            return [completion async for completion in stream]

    return sorted(asyncio.run(collected()), key=lambda completion: completion.sample)


def test_turns_and_the_calls_of_the_engine():
    engine = Engine(["one", "two"], ["x"])
    world = World([said("go", reward=0.5, state="later"), replace(DONE, reward=0.25), 2.0], [DONE])
    first, second = play(player(engine, world), 2)
    assert [[request.key for request in call] for call in engine.calls] == [[(7, 0, 0), (7, 1, 0)], [(7, 0, 1)]]
    assert engine.calls[0][0].prompt is engine.calls[0][1].prompt  # whose KV is shared
    opening = [*ids("uhi"), END, *ids("a")]
    assert engine.calls[1][0].prompt.tokens.tolist() == opening + ids("one") + [END] + ids("ugo") + [END] + ids("a")
    observed = [*ids("ugo"), END, *ids("a")]
    assert first.tokens.tolist() == [*ids("one"), END, *observed, *ids("two"), END]
    assert first.sampled.tolist() == [True] * 4 + [False] * len(observed) + [True] * 4
    own = np.array([-0.01, -0.02, -0.03, -0.04], np.float32)
    assert first.sampled_log_prob.tolist() == [*own, *[0.0] * len(observed), *(own - 1)]
    assert first.untruncated_log_prob is first.sampled_log_prob
    assert first.policy_version.tolist() == [1] * (4 + len(observed)) + [2] * 4
    assert (first.text, first.finish_reason, first.turn) == ("two", "stop", 0)
    assert first.initial_prompt.tokens.tolist() == opening and first.initial_prompt.uid == 7
    spans = first.episode.spans
    assert [(s.role, s.turn, s.reward, s.state, s.tokens) for s in spans] == [
        ("assistant", 0, 0.5, "begun", 4),
        ("user", 0, 0.0, None, len(observed)),
        ("assistant", 1, 0.25, "later", 4),
    ]
    assert first.episode.reward == 2.75 and second.episode.reward == 0.0
    assert (first.generated, second.generated, first.episode.cut, first.episode.attempts) == (8, 2, "", 1)
    assert world.alive == 0 and engine.running == 0
    (row, seed), (_, other) = world.rows
    assert seed == other < 2**31 and row["answer"] == "1" and row["messages"] == [{"role": "user", "content": "hi"}]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_tools_are_called_and_what_is_no_call_is_told():
    engine = Engine([CALL, "<tool_call>{</tool_call>", "it is 2"])
    world = World([Answer(reward=1.0), None])
    (completion,) = play(player(engine, world, tool_format="hermes", context=2000))
    spans = completion.episode.spans
    assert [span.role for span in spans] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert spans[0].calls == (ToolCall(name="add", arguments={"a": 1}),) and spans[1].text == "add!"
    assert spans[2].calls == () and len(spans[2].unreadable) == 1
    assert spans[3].error and spans[3].text == f"error: {spans[2].unreadable[0]}" and not spans[1].error
    assert completion.text == "it is 2" and completion.episode.reward == 1.0
    figures = episode_metrics([completion])
    assert figures["episode/calls"] == figures["episode/unreadable"] == figures["episode/errors"] == 1
    assert figures["episode/turns/mean"] == figures["episode/turns/max"] == 3
    assert figures["episode/observation_tokens"] == len(completion.tokens) - completion.generated


def test_a_template_without_tools_gets_them_in_messages_of_the_user():
    told = {None: ["You can add."], "new": ["Be brief.\n\nYou can add.", "new"]}
    for opening, contents in told.items():
        world = World([Answer(), None], openings=[opening])
        told_of = {"tool_format": "hermes", "instructions": "You can add."}
        episodes = player(Engine([CALL, "2"]), world, context=2000, **told_of)
        episodes.rules = replace(episodes.rules, system="Be brief.")
        (completion,) = play(episodes)
        messages = completion.initial_prompt.messages
        assert messages[0]["role"] == "system" and [m["content"] for m in messages][: len(contents)] == contents
        assert completion.episode.spans[1].role == "user"


@pytest.mark.parametrize("system", ["", "Add what you are given. " * 9])
def test_a_request_says_what_other_prompts_begin_with(system):
    """A long system prompt, whatever `reset` and the first rows have written; at every turn."""
    seen = []
    for opening in ("What is 1 + 1?", "x" * 90):
        engine = Engine([CALL, "2"])
        world = World([Answer(), None], openings=[opening])
        play(player(engine, world, tool_format="hermes", context=2000, instructions=system))
        seen += [request.prompt for call in engine.calls for request in call]
    common = len(ids("s" + system)) // 64 * 64 if system else 0
    assert [prompt.shared_prefix for prompt in seen] == [common] * 4 and (common > 0) == bool(system)
    assert len({prompt.tokens[:common].tobytes() for prompt in seen}) == 1


GO_ON = [said("go")] * 9


@pytest.mark.parametrize(
    ("settings", "texts", "cut", "turns", "reason"),
    [
        ({"turns": 2}, ["a", "b", "c"], "turns", 2, "length"),
        ({"tokens": 20}, ["abcdefgh", "abcdefgh", "x"], "tokens", 2, "length"),  # the second has 6 left
        ({"tokens": 13}, ["abcdefgh", "x"], "tokens", 1, "length"),  # none is left after the answer
        ({}, ["abc…", "x"], "tokens", 1, "length"),  # the turn's own limit
        ({}, ["x" * 92, "y" * 92, "z"], "context", 2, "length"),
        ({}, ["x" * 190, "z"], "context", 1, "length"),
        ({}, ["x" * 250, "z"], "context", 1, "length"),  # of the turn itself
    ],
)
def test_limits(settings, texts, cut, turns, reason):
    engine, world = Engine(texts), World([*GO_ON, 1.5])
    (completion,) = play(player(engine, world, **settings))
    assert (completion.episode.cut, len(completion.episode.turns), completion.finish_reason) == (cut, turns, reason)
    assert completion.sampled[-1]  # nothing follows the last turn
    assert len(completion.tokens) + len(completion.initial_prompt.tokens) <= 200
    assert "tokens" not in settings or len(completion.tokens) <= settings["tokens"]
    assert completion.episode.reward is not None and not completion.episode.failure  # scored, and kept
    assert world.alive == 0 and episode_metrics([completion])["episode/cut"] == 1
    assert episode_metrics([completion])[f"episode/cut/{cut}"] == 1


def test_an_environment_that_fails_is_replaced():
    broken = EnvironmentFailure("it broke")
    engine = Engine(["a", "b"], ["c", "d"])
    world = World([said("go"), broken], [DONE], broken, [said("go"), DONE])
    first, second = play(player(engine, world, retries=2), 2)
    assert (first.episode.attempts, second.episode.attempts) == (3, 1) and first.text == "b"
    assert episode_metrics([first, second])["episode/retried"] == 2
    assert world.alive == 0
    again = [r.key for call in engine.calls for r in call]
    assert (again.count((7, 0, 0)), again.count((7, 0, 1))) == (1, 2)  # the first turn is kept, the others drawn alike


def test_a_failure_that_stays_has_no_score():
    world = World(EnvironmentFailure("no \n luck"), [DONE], EnvironmentFailure("x"))
    first, second = play(player(Engine(["a"], ["c"]), world, retries=1), 2)
    assert first.episode == Episode(failure="x", attempts=2) and not len(first.tokens) and second.episode.reward == 0
    rewards = RewardRunner([EnvironmentReward()])
    scores = asyncio.run(rewards.score(PROMPT, [first, second]))
    assert scores[0] == replace(Score.failed("x"), value=scores[0].value) and scores[1].value == 0
    assert asyncio.run(rewards.score(PROMPT, [first]))[0].error == "x"
    assert episode_metrics([first, second])["episode/failed"] == 1
    rewards.close()


def test_faults_of_others_are_not_counted_and_end():
    other = EnvironmentFailure("another ended it", collateral=True)
    (completion,) = play(player(Engine(["a"]), World(*[other] * 5, [DONE]), retries=0))
    assert completion.episode.reward == 0 and completion.episode.attempts == 6
    world = World(other)
    (completion,) = play(player(Engine(["a"]), world, retries=0))
    assert completion.episode.failure == "another ended it" and world.opened == COLLATERAL + 1


@pytest.mark.parametrize(
    ("openings", "failure"),
    [
        (["one", "two"], "`reset` gives the completions of a prompt different messages"),
        (["one", "x" * 300], "its initial prompt has 303 tokens, and the context 200"),
    ],
)
def test_openings_that_can_not_be(openings, failure):
    world = World([DONE], openings=openings)
    first, second = play(player(Engine(["a"], ["b"]), world, retries=5), 2)
    assert not first.episode.failure and second.episode.failure.startswith(failure)
    assert world.opened == 2 and world.alive == 0  # it would be the same again


@pytest.mark.parametrize(("openings", "answer"), [(["BAD", None], "go"), ([None], "BAD")], ids=["opening", "answer"])
def test_a_template_that_fails_for_an_observation_fails_that_episode_alone(openings, answer):
    fails = "{% if 'BAD' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.role[0]"
    world = World([said(answer), DONE], [said("go"), DONE], openings=openings)
    episodes = player(Engine(["a", "b"], ["c", "d"]), world, template=SHORT.replace("{{ m.role[0]", fails), retries=5)
    first, second = play(episodes, 2)
    assert first.episode.failure.startswith("the chat template fails for 'BAD'") and first.episode.attempts == 1
    assert second.episode.reward == 0 and world.alive == 0


@pytest.mark.parametrize(
    ("half", "why"), [(True, "an image can't be read: Truncated"), (False, "8 x 8 can't be shown: too small")]
)
def test_an_image_that_can_not_be_shown_fails_its_episode(half, why, monkeypatch):
    refused = UserError("an image of 8 x 8 can't be shown: too small")
    store = Mock(placeholder="[image]", add=Mock(return_value=0), tokens=Mock(side_effect=refused))
    monkeypatch.setattr(TOKENIZER, "images", store, raising=False)
    picture(0, 8, 8).save(file := io.BytesIO(), "PNG")
    image = base64.b64encode(file.getvalue()[: 20 if half else None]).decode()
    world = World([Answer(messages=({"role": "user", "content": "<image>", "images": [image]},))])
    parts = SHORT.replace("m.content", "m.content[0].text")
    (completion,) = play(player(Engine(["a"]), world, template=parts, retries=1))
    failure = completion.episode.failure
    assert failure.startswith("it shows an image that can't be read: ") and why in failure
    assert completion.episode.attempts == 2


def test_an_environment_that_takes_long_is_given_up():
    world = World([said("go"), said("go"), DONE], seconds=3.0)
    episodes = player(Engine(["a", "b", "c"]), world, retries=1, seconds=10.0, call_seconds=5.0)
    (completion,) = play(episodes)
    assert completion.episode.failure == "its environment took longer than 10 s (episode.seconds)"
    collector = Collector()
    collector.generator = SimpleNamespace(episodes=episodes)
    taken, again = collector.step_metrics({}), collector.step_metrics({})
    assert completion.episode.attempts == 2 and taken["time/environment"] == 24.0 and not any(again.values())
    collector.generator = None  # of rollouts that it reads
    assert collector.step_metrics({}) == {}


def test_the_wait_of_a_call_that_failed_is_not_its_own():
    """It waited 5 s for its place, and failed after 2; where that is unknown, it took 7."""

    class Full(World):
        async def open(self, row, seed, label=""):
            await asyncio.sleep(7.0)
            return await super().open(row, seed, label)

    known, unknown = EnvironmentFailure("no room"), EnvironmentFailure("no room")
    known.own = 2.0

    async def seconds():
        stream = player(Engine([]), Full(known, unknown), retries=1).generate(requests(1))
        return (await anext(stream)).episode.seconds

    assert run_virtually(seconds(), VirtualClock()) == {"queued": 5.0, "own": 9.0, "policy": 0.0}


def test_the_engine_is_idle_while_no_turn_is_awaited():
    """Each of two answers is looked at for 3 s, in which the engine samples the other or none; then 5 s pass."""

    async def idle():
        times = EpisodeTimes()
        async for _ in sampled_turns(Engine(["a"], ["b"]), requests(2), times):
            await asyncio.sleep(3.0)
        await asyncio.sleep(5.0)
        return times.idle.seconds

    assert run_virtually(idle(), VirtualClock()) == pytest.approx(8.0)


def test_an_engine_that_fails_fails_the_call():
    world = World(GO_ON)
    with pytest.raises(ConnectionError, match="gone"):
        play(player(Engine(["a", ConnectionError("gone")], ["a"] * 9), world, turns=8), 2)
    assert world.alive == 0


@pytest.mark.parametrize("after", range(12))
def test_what_is_closed_early_leaves_nothing(after):
    """At every step of the event loop."""
    engine, world = Engine(["a"] * 9, ["b"] * 9), World(GO_ON)

    async def run():
        async def drain():
            async with aclosing(player(engine, world).generate(requests(2))) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(drain())
        for _ in range(after * 3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert world.alive == 0 and engine.running == 0


def test_what_opens_although_it_was_cancelled_is_freed():
    """As where the answer and the end of the run come at once."""

    class Late(World):
        async def open(self, row, seed, label=""):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60.0)
            return await super().open(row, seed, label)

    world = Late([DONE])

    async def run():
        task = asyncio.create_task(anext(player(Engine(["a"], ["b"]), world).generate(requests(2))))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert world.opened == 2 and world.alive == 0


def test_an_episode_that_is_refused_leaves_the_others_their_tools():
    """Its row has other tools for each episode; calls are read with those of the first."""
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}

    class OfRow(World):
        async def open(self, row, seed, label=""):
            instance = await super().open(row, seed, label)
            instance.interface = EnvironmentInterface(schemas=(schema,) if self.opened == 1 else ())
            return instance

    world = OfRow([Answer(reward=1.0), None], [DONE], openings=[None, "new"])
    episodes = player(Engine([CALL, "2"], ["b"]), world, tool_format="hermes", context=2000)
    with_tools = episodes.uses(())
    episodes.uses = lambda schemas: with_tools if schemas else replace(with_tools, tool_format=None)
    first, second = play(episodes, 2)
    assert first.episode.spans[0].calls and first.episode.reward == 1.0
    assert second.episode.failure.startswith("`reset` gives the completions of a prompt different messages")


def test_what_was_said_is_without_what_the_template_began_and_without_the_stop_string():
    TOKENIZER.chat_template = SHORT.replace("{{ 'a' }}", "{{ 'a<think>' }}")
    conversation = Conversation(TurnTemplate(TOKENIZER, {}), PROMPT.messages, "train")
    played = Played(requests(1)[0], PROMPT, None, conversation)
    begun = played.next_request(9).prompt.begun
    assert begun == "<think>"
    text = f"{begun}so</think>It is 5.END"
    completion = Completion.of_text(7, 0, text, np.array(ids("so"), np.int32), "stop")
    played.add(replace(completion, stopped_by="END"))
    use = ToolUse(template=conversation._template)
    assert played.messages(use) == [{"role": "assistant", "content": "so</think>It is 5."}]


def test_forks_become_paths():
    """Where the template forgets what the model wrote, each turn is trained where it was sampled, and only there."""
    engine, world = Engine(["one", "two", "three"], masks=True), World([said("go"), said("on"), DONE])
    (completion,) = play(player(engine, world, template=FORGETFUL))
    assert [path.turn for path in completion.paths] == [0, 1, 2] and completion.episode.forks == 2
    assert [path.episode.reward for path in completion.paths] == [None, None, 0.0]
    texts = [TOKENIZER.decode(path.tokens[path.sampled]) for path in completion.paths]
    assert texts == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert completion.generated == 4 + 4 + 6 and completion.versions.tolist() == [1] * 4 + [2] * 4 + [3] * 6
    for path, request in zip(completion.paths, [call[0] for call in engine.calls], strict=True):
        own = int(path.sampled.sum())
        assert [*completion.initial_prompt.tokens, *path.tokens[:-own]] == request.prompt.tokens.tolist()
        assert (path.sampled_log_prob[~path.sampled] == 0).all() and (path.sampled_log_prob[path.sampled] < 0).all()
        assert (path.sampling_mask.counts[~path.sampled] == 0).all()
        Trajectory.of(completion.initial_prompt, path, group=0, advantage=1.0, behavior="sampled")
    refused = player(Engine(["one", "two"]), World([said("go")]), template=FORGETFUL, forks="refuse")
    (completion,) = play(refused)
    assert "rewrites what the model saw" in completion.episode.failure and completion.episode.attempts == 1


@pytest.mark.parametrize("template", [SHORT, BEGINS, FORGETFUL])
def test_what_runs_is_how_its_paths_begin(template):
    engine = Watched(Engine(["one", "two", "three"], ["four", "five", "six"]))
    engine.episodes = player(engine, World([said("go"), said("on"), DONE]), template=template)
    engine.agree_with(play(engine.episodes, 2))


def group_of(episodes, prompt=PROMPT):
    rewards, spec = RewardRunner([EnvironmentReward(correct_from=0.0)]), GroupSpec(sampling=Sampling(), completions=2)
    generator = GroupGenerator(episodes.engine, rewards, spec, lambda: 0.0, episodes)

    async def groups():
        return [group async for group in generator.generate([prompt], RolloutListener())]

    (group,) = asyncio.run(groups())
    rewards.close()
    assert isinstance(group, Group)
    return group


@pytest.mark.parametrize("openings", [(None,), ("new",)])
def test_a_group_has_the_prompt_of_first_turns(openings):
    """The template's generation prompt is not in its history, so that later turns have an opening without it."""
    engine = Engine(["one", "two"], ["one", "two"])
    given = replace(PROMPT, tokens=np.array([*ids("uhi"), END, *ids("a#")], np.int32))
    group = group_of(player(engine, World([said("go"), DONE], openings=openings), template=BEGINS), given)
    assert (group.prompt is given) == (openings == (None,))
    assert group.prompt.question == (openings[0] or PROMPT.question)
    asked = {(request.sample, request.turn): request for call in engine.calls for request in call}
    for completion in group.completions:
        first, last = completion.paths
        assert first.initial_prompt is None and not last.initial_prompt.messages
        assert [*last.initial_prompt.tokens, *ids("#")] == group.prompt.tokens.tolist()
        for path in (first, last):
            begin = (path.initial_prompt or group.prompt).tokens.tolist()
            seen = [*begin, *path.tokens[: -int(path.sampled.sum())]]
            assert seen == asked[completion.sample, path.turn].prompt.tokens.tolist()
            item = Trajectory.of(path.initial_prompt or group.prompt, path, group=0, advantage=1.0)
            assert item.prompt_tokens.tolist() == begin
