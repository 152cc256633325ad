"""Plays episodes with external agents, which run their own loop and request each turn from the policy over HTTP.

An agent sends its whole chat with every request. A chat that continues one that the policy has answered is the next
turn of that conversation, whose tokens are kept unchanged. Any other chat is a new conversation: that of a helper that
the agent has started, or its own after it has rewritten its memory. All of them are paths of the episode. If the policy
plays several roles, the model's name in a request names the player, and each player has its own conversations.
"""

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from proxima.data import UserError
from proxima.data.episode import Cut, EpisodeLife, ToolCall
from proxima.data.flow import Completion, Message
from proxima.data.players import PLAYER, mean_of_roles, rewards_of_players, role_of
from proxima.data.random import EPISODE_SEED, mix
from proxima.engine.protocol import Engine, GrammarRefusedError, InFlight, Request
from proxima.environment.agents import AgentFailed, AgentJob, AgentReward, Agents, AgentsInside, ListeningAgents
from proxima.environment.call_readers import ToolFormat, read_calls
from proxima.environment.episode_clock import EpisodeClock, LoopTime
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.protocol import RewardWithParts
from proxima.environment.start_rate import StartRate
from proxima.environment.tool_calls import before_calls, call_beginning, describe_tools, parameters_of, write_call
from proxima.rollout.episodes.conversation import Conversation, TurnTemplate
from proxima.rollout.episodes.endpoint import ChatEndpoint, unknown_key
from proxima.rollout.episodes.formats.chat import (
    ChatAnswer,
    ChatMessage,
    ChatRefused,
    ChatRequest,
    FinishReason,
    TokenLogProb,
)
from proxima.rollout.episodes.played import (
    Attempts,
    Deliver,
    EpisodeCallback,
    EpisodePlayer,
    PartialPaths,
    Played,
    PlayedTurn,
    TurnAnswer,
    failed_episode,
    row_of,
    sampled_turn,
    with_instructions,
    with_seconds,
)
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.task.image_files import open_image

MOST_TEMPLATES = 256  # kept, by their tools


@dataclass(eq=False)
class Talk:
    """One conversation of an agent.

    Args:
        played: its turns and tokens.
        history: the messages exchanged with the agent, up to the last answer.
        tools: tools that the agent offered.
        player: who plays it; empty: there are no roles.
        answering: a turn is being sampled.
        asking: number of that turn, or of the last one.
        grammar: that turn is sampled under a grammar.
        cut: the limit that ended its last turn, or for which its next one was refused.
    """

    played: Played
    tools: tuple[Mapping[str, Any], ...]
    player: str = ""
    numbers: list[int] = field(default_factory=list)  # of its turns in the episode
    history: list[ChatMessage] = field(default_factory=list)
    answering: bool = True
    asking: int = field(init=False, default=-1)
    grammar: bool = field(init=False, default=False)
    cut: Cut = ""

    def continued_by(self, asked: ChatRequest, player: str) -> Sequence[ChatMessage]:
        """Return the messages that answer its last turn; empty if the player's chat doesn't continue this one."""
        count = len(self.history)
        if self.answering or player != self.player or asked.tools != self.tools or len(asked.messages) <= count:
            return ()
        same = all(map(_alike, self.history, asked.messages[:count]))
        new = asked.messages[count:]
        if same and all(message.role != "assistant" for message in new):
            return new
        return ()


@dataclass(eq=False)
class AgentEpisode:
    """An attempt at an episode, as seen by the endpoint; `fail` ends the run with an exception of the engine, and
    `clock` says where its time goes.

    `cut` is the last limit for which a turn was refused: an agent that fails after that was ended by the limit. It may
    also go on; `refused` is the limit only until another turn is asked for.
    """

    request: Request
    fail: Callable[[Exception], None]
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    talks: list[Talk] = field(default_factory=list, init=False)
    turns: int = field(default=0, init=False)  # requested, in all conversations
    waits: list[tuple[float, float]] = field(default_factory=list, init=False)  # for the policy: begin and end
    cut: Cut = field(default="", init=False)
    refused: Cut = field(default="", init=False)
    last: Talk | None = field(default=None, init=False)  # the last one answered
    broken: Exception | None = field(default=None, init=False)  # why no turn can follow
    paid: bool = field(default=False, init=False)  # the agent has given a turn a reward
    unrewarded: str = field(default="", init=False)  # see `Episode.unrewarded`

    def __post_init__(self) -> None:
        self.rendering = asyncio.Lock()  # one chat at a time, so that turns are numbered in the order of the requests


@dataclass(frozen=True)
class AskedTurn:
    """A turn of a conversation that the engine samples, and the limit of the episode that ends a turn of that length;
    empty if the agent wants a shorter one."""

    talk: Talk
    request: Request
    limit: Cut


class AgentEpisodes(EpisodePlayer):
    """Plays the episodes of a task with external agents.

    Args:
        engine: samples the turns.
        agents: play the episodes; the caller closes them.
        template_for: returns the template for the messages of an agent that offers these tools.
        settings: limits of the episodes.
        context: maximum tokens of prompt and episode together.
        tool_format: the format in which the model writes calls.
        on_episode: gets each finished episode.
        roles: see `AgentSpec.roles`.
    """

    def __init__(
        self,
        engine: Engine,
        agents: Agents,
        template_for: Callable[[Sequence[Mapping[str, Any]]], TurnTemplate],
        settings: EpisodeSettings,
        context: int,
        tool_format: ToolFormat,
        on_episode: EpisodeCallback | None = None,
        roles: Sequence[str] = (),
    ) -> None:
        super().__init__(engine, on_episode)
        self.roles = roles
        self.agents = agents
        self.settings = settings
        self._starts = StartRate(settings.starts_per_second)
        self.context = context
        self.tool_format = tool_format
        self._template_for = template_for
        self._templates = dict[str, TurnTemplate]()
        self._episodes: dict[str, AgentEpisode] = {}  # by API key
        self._endpoint: ChatEndpoint | None = None
        self._outside = agents if isinstance(agents, ListeningAgents) else None
        self._inside = isinstance(agents, AgentsInside)
        self._users = 0
        self._adding = asyncio.Lock()  # images

    def unfinished(self, running: Sequence[InFlight]) -> PartialPaths:
        by_key = {completion.key: completion for completion in running}
        paths: PartialPaths = []
        for (uid, sample), episode in self.playing.items():
            for talk in episode.talks:
                turn = None
                if talk.answering:
                    turn = by_key.get((uid, sample, talk.asking))
                paths += talk.played.so_far(turn, [*talk.numbers, talk.asking], grammar=talk.grammar)
        return paths

    @asynccontextmanager
    async def at_work(self, requests: Sequence[Request], deliver: Deliver) -> AsyncIterator[None]:
        async def play(request: Request) -> None:
            try:
                deliver(await self._play(request, deliver))
            except BaseException as error:
                deliver(error)

        self._users += 1  # `at_work` blocks; the first starts the endpoint, the last closes it
        if self._endpoint is None and not self._inside:
            models = ["policy", *(f"policy/{role}" for role in self.roles)]
            self._endpoint = ChatEndpoint(
                models, self._episodes.__contains__, self.answer, self.count, self.pay, self._outside
            )
            await self._endpoint.start()
        if self._users == 1:
            self._time = LoopTime()
        tasks = [asyncio.create_task(play(request)) for request in requests]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._users -= 1
            if not self._users:
                self._time.stop()
                if self._outside is None:  # agents from outside ask between the steps, too
                    await self._close_endpoint()

    async def _close_endpoint(self) -> None:
        endpoint = self._endpoint
        self._endpoint = None
        if endpoint is not None:
            await endpoint.close()

    # ---- an episode --------------------------------------------------------------------------------------------------

    async def _play(self, request: Request, fail: Callable[[Exception], None]) -> Completion:
        """Play an episode to its end, restarting it if its agent fails."""
        attempts = Attempts(self.settings.retries)
        seconds = Counter[str]()  # of all attempts
        while True:
            episode = AgentEpisode(request, fail, EpisodeClock(self.settings.seconds, self._time, self._starts))
            try:
                completion = await self._attempt(episode, attempts.made)
            except (EnvironmentFailure, UserError) as failure:  # a chat template's UserError would recur
                seconds.update(episode.clock.seconds())
                if attempts.again(failure):
                    continue
                completion = failed_episode(request, str(failure), attempts.made)
            else:
                seconds.update(episode.clock.seconds())
            return with_seconds(completion, seconds)

    async def _attempt(self, episode: AgentEpisode, attempts: int) -> Completion:
        key = secrets.token_urlsafe(24)
        limit = self.settings.seconds
        request = episode.request
        self._episodes[key] = episode
        self.playing[request.prompt.uid, request.sample] = episode
        clock = episode.clock
        address = "" if self._endpoint is None else self._endpoint.address
        job = AgentJob(
            row=row_of(request.prompt),
            base_url=address,
            api_key=key,
            clock=clock,
            group=request.prompt.uid,
            sample=request.sample,
            seed=mix(EPISODE_SEED, request.seed, request.prompt.uid) % 2**31,
            ask=partial(self.answer, key),
            pay=partial(self.pay, key),
        )
        now = asyncio.get_running_loop().time
        began = now()
        try:
            reward = await clock.within(self.agents.play(job))
        except TimeoutError:
            if not clock.late:
                raise
            raise EnvironmentFailure(f"its agent took longer than {limit:g} s (episode.seconds)") from None
        except EnvironmentFailure as failure:
            if episode.broken is not None:  # the agent was notified, and failed
                raise episode.broken from None
            if not episode.cut or (isinstance(failure, AgentFailed) and failure.unscored):
                raise
            # the limit ended the agent: what it did until then is scored
            episode.refused = episode.cut
            reward = failure.reward if isinstance(failure, AgentFailed) else None
            if reward is None and not episode.paid:
                episode.unrewarded = " ".join(str(failure).split())[:300]
        finally:
            spent = clock.seconds()
            self.times.environment += spent["own"]
            self.times.queued += spent["queued"]
            life = EpisodeLife(request.prompt.uid, request.sample, began, now(), episode.waits, clock.queues)
            self.times.ended(life)
            del self._episodes[key]
        if episode.broken is not None:
            raise episode.broken
        talks = [talk for talk in episode.talks if talk.played.turns]
        if not talks or episode.last is None:
            raise _without_a_turn(episode.cut)
        return self._completion(episode, talks, reward, attempts)

    def _completion(
        self, episode: AgentEpisode, talks: Sequence[Talk], given: AgentReward, attempts: int
    ) -> Completion:
        """Join the paths of all conversations in the order of their last turns; the completion is the last path, which
        has the episode's last turn."""
        assert episode.last is not None
        text = episode.last.played.turns[-1].completion.text
        parts: Mapping[str, float] = {}
        plain: float | Mapping[str, float] | None
        if isinstance(given, RewardWithParts):
            parts = given.parts
            plain = given.value
        else:
            plain = given
        players = list(dict.fromkeys(talk.player for talk in talks))
        rewards, reward = self._rewards(plain, players)
        if episode.paid:
            rewards, reward = _with_rewards_of_turns(rewards, reward, talks)
        cut_off: Cut = episode.refused or episode.last.cut
        numbered: list[Completion] = []
        for talk in talks:
            whole = talk.played.completion(cut=cut_off, reward=reward, attempts=attempts)
            numbered += [_numbered(path, talk) for path in whole.paths]
        *earlier, last = sorted(numbered, key=_last_turn)
        forks = len(earlier)
        last_paths = {_player_of(path): path for path in (*earlier, last)}
        refused = "" if episode.refused == "context" else episode.refused  # a further turn of any player
        by_last_turn = sorted(talks, key=lambda talk: talk.numbers[-1])
        cuts = {talk.player: talk.cut or refused for talk in by_last_turn}

        def older(path: Completion) -> Completion:
            assert path.episode is not None
            player = _player_of(path)
            cut = cuts[player] and last_paths[player] is path  # of another player
            ended = replace(path.episode, forks=forks, reward=None, cut="")
            if cut:
                return replace(path, finish_reason="length", episode=ended)
            return replace(path, finish_reason="stop", episode=ended)

        assert last.episode is not None
        episode_of_all = replace(last.episode, forks=forks, rewards=rewards, parts=parts, unrewarded=episode.unrewarded)
        return replace(last, text=text, earlier=tuple(map(older, earlier)), episode=episode_of_all)

    def _rewards(
        self, given: float | Mapping[str, float] | None, players: Sequence[str]
    ) -> tuple[dict[str, float], float | None]:
        """Return the reward of each player, where they have their own, and that of the episode.

        Raises:
            EnvironmentFailure: there are no such roles, or a player has no reward.
        """
        if not isinstance(given, Mapping):
            return {}, given
        unknown = [name for name in given if role_of(name) not in self.roles or not PLAYER.fullmatch(name)]
        if unknown:
            remedy = f"environment.roles has {', '.join(self.roles) or 'none'}"
            raise EnvironmentFailure(f"its agent gave a reward of the role {unknown[0]!r:.80}, but {remedy}")
        try:
            rewards = rewards_of_players(given, players)
        except KeyError as error:
            raise EnvironmentFailure(f"its agent gave no reward of the role {error.args[0]!r}") from None
        try:
            return rewards, mean_of_roles(rewards)
        except (OverflowError, ValueError):  # of huge or infinite ones
            raise EnvironmentFailure(f"its agent gave rewards that have no mean: {rewards!r:.200}") from None

    # ---- a turn ------------------------------------------------------------------------------------------------------

    async def answer(self, key: str, asked: ChatRequest) -> tuple[ChatAnswer, ...]:
        """Answer an agent's request with messages of the policy, as many as it asks for.

        Raises:
            ChatRefused: no episode has this key, it has failed or reached a limit, or the engine has failed.
        """
        episode = self._episodes.get(key)
        player = self._player(asked.model)
        if episode is None:
            raise unknown_key()
        with episode.clock.answering():
            return await self._answered(episode, asked, player)

    async def _answered(self, episode: AgentEpisode, asked: ChatRequest, player: str) -> tuple[ChatAnswer, ...]:
        self._check_grammar(asked)
        asked = await self._with_images(asked)
        async with episode.rendering:
            turns = await self._next_turns(episode, asked, player)
        now = asyncio.get_running_loop().time
        began = now()
        try:
            waiting = [sampled_turn(self.engine, turn.request, self.times) for turn in turns]
            completions = await asyncio.gather(*waiting)
        except GrammarRefusedError as error:
            assert asked.grammar is not None
            raise ChatRefused(f"{asked.grammar.field}: the engine can't follow it: {error.reason}") from None
        except Exception as error:  # not the agent's fault: it must not become a failed episode
            episode.fail(error)
            raise ChatRefused(f"the engine has failed: {error}", code="server_error", status=500) from error
        episode.waits.append((began, now()))
        answers = list[ChatAnswer]()
        for turn, completion in zip(turns, completions, strict=True):
            answers.append(self._answer(episode, turn, asked, completion))
            turn.talk.cut = turn.limit if completion.finish_reason == "length" else ""
        return tuple(answers)

    async def count(self, key: str, asked: ChatRequest) -> int:
        """Return the number of tokens of a chat, as the first of a conversation.

        Raises:
            ChatRefused: no episode has this key, or the chat can't be rendered.
        """
        episode = self._episodes.get(key)
        player = self._player(asked.model)
        if episode is None:
            raise unknown_key()
        asked = await self._with_images(asked)
        try:
            talk = await asyncio.to_thread(self._new_talk, episode.request, asked, player)
        except UserError as error:
            raise ChatRefused(f"the chat can't be rendered: {error}") from None
        return len(talk.played.conversation.prompt)

    def pay(self, key: str, number: int, reward: float) -> None:
        """Give a turn a reward, in reward units, in place of one that it has already. The reward of the episode is
        their sum, and what the agent gives at its end:

            score of the environment = Σ_k r_k + end        r_k: 0 for a turn without a reward

        It is paid turn by turn: with `turn_returns`, turn k gets G_k = r_k + gamma G_(k+1), the last one r_K + end.

        Raises:
            ChatRefused: no episode has this key.
        """
        episode = self._episodes.get(key)
        if episode is None:
            raise unknown_key()
        for talk in episode.talks:
            if number in talk.numbers:
                talk.played.turns[talk.numbers.index(number)].reward = reward
                episode.paid = True

    def _check_grammar(self, asked: ChatRequest) -> None:
        """Raise ChatRefused for a grammar that the engine has not, or that would hold for more than a text."""
        if asked.grammar is None:
            return
        name = asked.grammar.field
        if not self.engine.capabilities.grammars:
            what = f"{name}: the engine of this run has no grammars, vllm and sglang have; leave it out"
            raise ChatRefused(what, code="unsupported_value")
        if asked.tools:
            what = (
                f"{name}: not with tools, which a grammar would keep the model from calling; leave one of the two out"
            )
            raise ChatRefused(what, code="unsupported_value")
        if asked.continues:
            what = f"{name}: not for an answer that is begun already, since a grammar begins with the answer"
            raise ChatRefused(what, code="unsupported_value")

    async def _with_images(self, asked: ChatRequest) -> ChatRequest:
        """Return the request with the numbers of its images.

        Raises:
            ChatRefused: the run shows no images, or one can't be read.
        """
        if not any(message.images for message in asked.messages):
            return asked
        store = getattr(self._template(()).tokenizer, "images", None)
        if store is None:
            what = "messages: an image can't be shown; a model that reads images needs episode.images=true"
            raise ChatRefused(what, code="unsupported_value")

        def number(image: bytes | int) -> int:
            assert isinstance(image, bytes)
            added = int(store.add(open_image(image)))
            store.tokens(added)  # refuses what can't be shown
            return added

        def numbered() -> tuple[ChatMessage, ...]:
            shown = [replace(message, images=tuple(map(number, message.images))) for message in asked.messages]
            store.write()
            return tuple(shown)

        try:
            async with self._adding:  # in the order in which they came
                return replace(asked, messages=await asyncio.to_thread(numbered))
        except UserError as error:
            raise ChatRefused(f"messages: an image can't be read: {error}") from None

    def _player(self, model: str) -> str:
        """Return the player that a model's name names; empty without roles.

        Raises:
            ChatRefused: it names no role.
        """
        if not self.roles:
            return ""
        player = model.removeprefix("policy/")
        if player == model or role_of(player) not in self.roles or not PLAYER.fullmatch(player):
            names = ", ".join(f"policy/{role}" for role in self.roles)
            raise ChatRefused(f"model={model!r:.80}: must name a role: {names}", code="model_not_found", status=404)
        return player

    async def _next_turns(self, episode: AgentEpisode, asked: ChatRequest, player: str) -> list[AskedTurn]:
        """Return the turns that answer a chat: the first in the conversation that it continues or begins, the others in
        conversations of their own that begin with the same tokens."""
        if episode.broken is not None:
            raise ChatRefused(f"the episode has failed: {episode.broken}", code="episode_failed")
        if episode.turns + asked.answers > self.settings.turns:
            episode.cut = "turns"
            episode.refused = "turns"
            raise ChatRefused(f"the episode has had its {self.settings.turns} turns", code="episode_limit")
        try:
            talk = await self._talk(episode, asked, player)
        except UserError as error:
            if not (asked.forced or asked.continues):  # the template may render the chat, but not leave it open
                episode.broken = error
            raise ChatRefused(f"the chat can't be rendered: {error}") from None
        others = [self._branch(talk) for _ in range(1, asked.answers)]
        episode.talks += others
        return [self._next_turn(episode, each, asked) for each in (talk, *others)]

    def _next_turn(self, episode: AgentEpisode, talk: Talk, asked: ChatRequest) -> AskedTurn:
        played = talk.played
        context_left = self.context - len(played.conversation.context)
        length = sum(talk.played.length for talk in episode.talks)
        if self.settings.tokens is not None:  # each of several answers has its share
            length = self.settings.tokens - (self.settings.tokens - length) // asked.answers
        room = played.room(self.settings, self.context, length)
        if room < 1:
            limit: Cut = "context" if context_left < 1 else "tokens"
            episode.cut = limit
            episode.refused = limit
            talk.cut = limit
            raise ChatRefused("the chat has no room for a token", code="context_length_exceeded")
        most = min(room, asked.max_tokens or room)
        request = played.next_request(most)
        sampling = replace(request.sampling, stop=(*request.sampling.stop, *asked.stop))
        schema = None if asked.grammar is None else asked.grammar.schema
        request = replace(request, turn=episode.turns, sampling=sampling, grammar=schema)
        talk.asking = episode.turns
        talk.grammar = asked.grammar is not None
        episode.turns += 1
        episode.refused = ""
        if most < room:
            return AskedTurn(talk, request, "")
        if room == context_left:
            return AskedTurn(talk, request, "context")
        return AskedTurn(talk, request, "tokens")

    def _answer(
        self, episode: AgentEpisode, asked_turn: AskedTurn, asked: ChatRequest, completion: Completion
    ) -> ChatAnswer:
        """Add a turn to its conversation, and return it as the agent sees it: by the contract of the API without the
        stop string, and without what the template opened. Calls are read from the whole text."""
        talk = asked_turn.talk
        begun = asked_turn.request.prompt.begun
        turn = talk.played.add(completion, grammar=talk.grammar)
        talk.numbers.append(completion.turn)
        content = completion.own_text(begun)
        hidden = ""  # what the agent wrote of the message
        if asked.forced:  # the beginning of the call is the model's message, too
            content = call_beginning(asked.forced, self.tool_format) + content
        elif asked.continues:
            hidden = asked.messages[-1].content
        tools = parameters_of(asked.tools)
        if tools:
            turn.said = read_calls(completion.text, self.tool_format, tools)
        if turn.calls:
            content = before_calls(hidden + content, self.tool_format, tools)[len(hidden) :]
        log_probs = self._log_probs(completion) if asked.log_probs else None
        answer = ChatAnswer(
            content=content,
            turn=completion.turn,
            calls={f"call_{completion.turn}_{i}": call for i, call in enumerate(turn.calls)},
            finish_reason=_finish_reason(turn),
            stopped_by=completion.stopped_by,
            prompt_tokens=len(talk.played.contexts[-1]),
            completion_tokens=len(completion.tokens),
            log_probs=log_probs,
        )
        before = asked.messages
        if asked.continues:
            before = before[:-1]
        talk.history = [*before, replace(answer.message, content=hidden + content)]
        talk.answering = False
        episode.last = talk
        return answer

    def _log_probs(self, completion: Completion) -> tuple[TokenLogProb, ...]:
        """Return the sampled tokens with their log-probs; what JSON has no number for is -9999, as in OpenAI's API."""
        template = self._template(())
        values = np.nan_to_num(completion.sampled_log_prob, nan=-9999.0, neginf=-9999.0).tolist()
        texts = [template.decode([token], after_text=True) for token in completion.tokens.tolist()]
        return tuple(TokenLogProb(text=text, log_prob=value) for text, value in zip(texts, values, strict=True))

    def _branch(self, talk: Talk) -> Talk:
        """Return a conversation whose next turn sees the same tokens."""
        played = talk.played
        conversation = played.conversation.branch()
        prompt = played.initial_prompt
        if played.turns:
            prompt = replace(prompt, messages=(), tokens=conversation.prompt, shared_prefix=0)
        return Talk(Played(played.request, prompt, None, conversation), talk.tools, talk.player)

    async def _talk(self, episode: AgentEpisode, asked: ChatRequest, player: str) -> Talk:
        """Return the conversation that a chat continues, with the new messages added, or a new conversation. Chats are
        encoded in threads, because a long one takes seconds, in which other agents would wait."""
        if not asked.forced:
            for talk in reversed(episode.talks):
                new = talk.continued_by(asked, player)
                if new:
                    observed = [self._message(message, asked.tools) for message in new]
                    conversation = copy(talk.played.conversation)
                    await asyncio.to_thread(conversation.observe, observed)
                    talk.played.turns[-1].answers = [TurnAnswer(message) for message in observed]
                    talk.played.conversation = conversation
                    talk.answering = True
                    return talk
        talk = await asyncio.to_thread(self._new_talk, episode.request, asked, player)
        episode.talks.append(talk)
        return talk

    def _new_talk(self, request: Request, asked: ChatRequest, player: str) -> Talk:
        template = self._template(asked.tools)
        prompt = request.prompt
        messages = tuple(self._message(message, asked.tools) for message in asked.messages)
        if asked.tools and not template.supports_tools:
            messages = with_instructions(messages, describe_tools(asked.tools, self.tool_format))
        if asked.forced:
            messages = (*messages, {"role": "assistant", "content": self._forced_beginning(template, asked.forced)})
        continues = asked.continues or bool(asked.forced)
        conversation = Conversation(template, messages, self.settings.forks, continues=continues)
        if not np.array_equal(prompt.tokens, conversation.prompt):
            shared = template.shared_prefix(messages, conversation.prompt)
            prompt = replace(prompt, messages=messages, tokens=conversation.prompt, shared_prefix=shared)
        return Talk(Played(request, prompt, None, conversation), asked.tools, player)

    def _forced_beginning(self, template: TurnTemplate, tool: str) -> str:
        """Return how an answer begins that calls this tool.

        Raises:
            ChatRefused: calls have control tokens, which can't be written into a chat.
        """
        beginning = call_beginning(tool, self.tool_format)
        if template.safe(beginning) != beginning:
            what = f"tool_choice: a call can't be forced in the format {self.tool_format}; set it to auto"
            raise ChatRefused(what, code="unsupported_value")
        return beginning

    def _message(self, message: ChatMessage, tools: Sequence[Mapping[str, Any]]) -> Message:
        """Convert a message for the chat template; tool calls that the policy did not write become part of its text."""
        calls = [write_call(call, self.tool_format, parameters_of(tools)) for call in message.calls]
        shown: Message = {"role": message.role, "content": "\n".join(filter(None, [message.content, *calls]))}
        if message.images:
            return shown | {"images": [*message.images]}
        return shown

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        name = repr(tools)
        template = self._templates.get(name)
        if template is None:
            if len(self._templates) >= MOST_TEMPLATES:  # tools that name a time or a folder
                self._templates.clear()
            template = self._template_for(tools)
            self._templates[name] = template
        return template


def _without_a_turn(cut: Cut) -> EnvironmentFailure:
    """The failure of an episode without a turn; `cut` is the limit for which its first one was refused."""
    if not cut:
        return EnvironmentFailure("its agent never asked the policy")
    where = "the model's context" if cut == "context" else f"episode.{cut}"
    return EnvironmentFailure(f"its agent's first chat leaves no room for an answer in {where}")


def _finish_reason(turn: PlayedTurn) -> FinishReason:
    """Why an answer ended, in the words of the API."""
    if turn.completion.finish_reason == "length":
        return "length"
    return "tool_calls" if turn.calls else "stop"


def _with_rewards_of_turns(
    rewards: Mapping[str, float], reward: float | None, talks: Sequence[Talk]
) -> tuple[dict[str, float], float]:
    """The reward of each player, where they have their own, with those of its turns, and that of the episode."""
    of_players: dict[str, float] = defaultdict(int)
    for talk in talks:
        of_players[talk.player] += sum(turn.reward for turn in talk.played.turns)
    if not rewards:
        return {}, (reward or 0.0) + sum(of_players.values())
    with_turns = {player: given + of_players[player] for player, given in rewards.items()}
    return with_turns, mean_of_roles(with_turns)


def _numbered(path: Completion, talk: Talk) -> Completion:
    """Renumber the turns of a conversation's path by their numbers in the episode, and name its player."""
    assert path.episode is not None
    spans = tuple(replace(span, turn=talk.numbers[span.turn]) for span in path.episode.spans)
    episode = replace(path.episode, spans=spans, player=talk.player)
    return replace(path, turn=talk.numbers[path.turn], earlier=(), episode=episode)


def _player_of(path: Completion) -> str:
    assert path.episode is not None
    return path.episode.player


def _last_turn(path: Completion) -> int:
    assert path.episode is not None
    return path.episode.turns[-1].turn


def _alike(recorded: ChatMessage, given: ChatMessage) -> bool:
    """Return True if a message sent back equals the known one: agents strip spaces and assign their own ids."""
    same_text = recorded.content.strip() == given.content.strip()
    same_calls = list(map(_call_key, recorded.calls)) == list(map(_call_key, given.calls))
    same_images = recorded.images == given.images
    return recorded.role == given.role and same_text and same_calls and same_images


def _call_key(call: ToolCall) -> tuple[str, Any]:
    return call.name, dict(call.arguments)
