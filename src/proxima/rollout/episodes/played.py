"""An episode in progress, the completion that it becomes, and the time that its engine is idle."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import Bools, Ints, SamplingMask, filled_by
from proxima.data.episode import Cut, Episode, EpisodeLife, Span, ToolCall
from proxima.data.flow import Completion, FinishReason, Message, Prompt, prompt_name
from proxima.engine.protocol import Engine, InFlight, Request
from proxima.environment.call_readers import ReadMessage
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.tool_calls import before_calls
from proxima.rollout.episodes.conversation import Conversation, Path
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.tool_use import ToolUse

NO_PARTS: Mapping[str, float] = {}
COLLATERAL = 16  # further retries, beyond `retries`, for failures that other episodes caused
PartialPaths = list[tuple[InFlight, Bools]]  # each with a mask of the tokens that the model wrote
Deliver = Callable[[Completion | BaseException], None]
EpisodeCallback = Callable[[EpisodeLife], None]


@dataclass(frozen=True)
class TurnAnswer:
    """A message that answers a turn.

    Args:
        error: it says that a call failed.
        call: number of the call in the turn that it answers; None: it answers no call that could be read.
    """

    message: Message
    error: bool = False
    call: int | None = None


@dataclass(eq=False)
class PlayedTurn:
    """A message of the model, and its outcome.

    Args:
        completion: the completion that the engine sampled.
        state: state of the environment before it; None: unnamed.
        answers: the messages that answer it.
        begun: the beginning of the message that its context has, see `Prompt.begun`.
        done: the environment has ended the episode.
        said: its calls.
    """

    completion: Completion
    state: str | None
    begun: str = ""
    said: ReadMessage = field(default_factory=ReadMessage)
    reward: float = 0.0
    answers: list[TurnAnswer] = field(default_factory=list)
    done: bool = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls in it, in order."""
        return self.said.calls

    @property
    def unreadable(self) -> tuple[str, ...]:
        """A reason for each call in it that can't be read."""
        return self.said.unreadable


@dataclass(eq=False)
class Played:
    """An attempt at an episode.

    Args:
        request: request of the episode; its `sampling` applies to each turn.
        initial_prompt: the prompt that it begins with.
        instance: its environment, an `Instance`; None for an external agent, which has its own.
        state: the environment's current name for its state.
        begun: the beginning of the turn that was asked for last.
    """

    request: Request
    initial_prompt: Prompt
    instance: Any
    conversation: Conversation
    state: str | None = None
    turns: list[PlayedTurn] = field(default_factory=list)
    contexts: list[Ints] = field(default_factory=list)  # contexts of the turns so far
    begun: str = ""

    @property
    def length(self) -> int:
        """The number of tokens after the prompt, on the last path."""
        return len(self.conversation.context) - len(self.conversation.prompt)

    def room(self, settings: EpisodeSettings, context: int, length: int) -> int:
        """The maximum number of tokens of the next turn, of an episode that has `length` tokens after its prompt."""
        room = min(context - len(self.conversation.context), self.request.sampling.max_tokens)
        if settings.tokens is None:
            return room
        return min(room, settings.tokens - length)

    def next_request(self, max_tokens: int) -> Request:
        """Build the request of the next turn. Its `shared` lists the lengths of earlier turns' contexts that its own
        begins with, and of its own context, with which the next one begins; contexts abandoned by a fork are left
        out."""
        prompt = self.initial_prompt
        sampling = self.request.sampling
        if self.turns:
            prompt = replace(prompt, tokens=self.conversation.context)
        self.begun = self.conversation.beginning
        if prompt.begun != self.begun:
            prompt = replace(prompt, begun=self.begun)
        if max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=max_tokens)
        tokens = prompt.tokens
        shared = (*(len(seen) for seen in self.contexts if _begins(tokens, seen)), len(tokens))
        return replace(self.request, prompt=prompt, turn=len(self.turns), sampling=sampling, shared=shared)

    def add(self, completion: Completion, *, grammar: bool = False) -> PlayedTurn:
        """Add a turn of the model, perhaps under a grammar: newly sampled, or earlier in a restarted episode."""
        self.contexts.append(self.conversation.context)
        self.conversation.add_turn(completion.tokens, completion.text, completion.finish_reason, grammar=grammar)
        self.turns.append(PlayedTurn(completion, self.state, self.begun))
        return self.turns[-1]

    def messages(self, use: ToolUse) -> list[Message]:
        """What was said after the prompt, as messages of chat completions: a model's message as `Completion.own_text`,
        without its calls, and these as `tool_calls`."""
        said = list[Message]()
        for number, turn in enumerate(self.turns):
            text = turn.completion.own_text(turn.begun)
            message: Message = {"role": "assistant", "content": text}
            names = [f"call_{number}_{i}" for i in range(len(turn.calls))]
            if turn.calls and use.tool_format is not None:
                message["content"] = before_calls(text, use.tool_format, use.tools)
                message["tool_calls"] = [_as_written(*each) for each in zip(names, turn.calls, strict=True)]
            said.append(message)
            for answer in turn.answers:
                shown: Message = {**answer.message}
                if answer.call is not None:
                    shown["tool_call_id"] = names[answer.call]
                said.append(shown)
        return said

    def so_far(
        self, running: InFlight | None, numbers: Sequence[int] | None = None, *, grammar: bool = False
    ) -> PartialPaths:
        """Return its paths up to the engine's last sampled token; the paths of `completion` begin with these.

        Args:
            running: the turn that is being sampled.
            numbers: numbers of the turns in the episode, including that one.
            grammar: that one is sampled under a grammar.
        """
        conversation = self.conversation
        versions = [turn.completion.policy_version for turn in self.turns]
        if running is not None and len(running.tokens):
            conversation = conversation.with_turn(running.tokens, grammar=grammar)
            versions = [*versions, running.policy_version]
        partial: PartialPaths = []
        for path in conversation.paths():
            places = _sampled_places(path)
            if not places:
                continue
            number, _, _ = places[0]
            if numbers is not None:
                number = numbers[number]
            partial.append((self._in_flight(path, number, places, versions), path.sampled))
        return partial

    def _in_flight(
        self, path: Path, number: int, places: Sequence[tuple[int, int, int]], versions: Sequence[Ints]
    ) -> InFlight:
        """Build a path so far, as the engine has a completion in flight.

        Args:
            number: of its first turn in the episode.
            places: of its sampled turns, see `_sampled_places`.
            versions: of the tokens of each turn.
        """
        prompt_tokens = path.initial_prompt
        if prompt_tokens is None:
            prompt_tokens = self.initial_prompt.tokens
        sampled = [versions[turn] for turn, _, _ in places]
        version = _placed(sampled, [(start, end) for _, start, end in places], len(path.tokens), 0)
        return InFlight(
            key=(*self.request.key[:2], number),
            prompt_tokens=prompt_tokens,
            tokens=path.tokens,
            policy_version=_versions(version, path.written),
            temperature=self.request.sampling.temperature,
        )

    def completion(
        self, *, cut: Cut, reward: float | None, attempts: int, parts: Mapping[str, float] = NO_PARTS
    ) -> Completion:
        """Build the completion of the episode, without messages after the last turn: no turn is conditioned on them."""
        paths = self.conversation.paths()
        columns = [self._columns(path) for path in paths]
        episodes = [
            Episode(spans=tuple(map(self._span, path.spans)), cut=cut, attempts=attempts, forks=len(paths) - 1)
            for path in paths
        ]
        *older, (last, episode) = zip(columns, episodes, strict=True)
        finish_reason: FinishReason = "length" if cut else "stop"
        return Completion(
            **last,
            finish_reason=finish_reason,
            episode=replace(episode, reward=reward, parts=parts),
            earlier=tuple(Completion(**of, finish_reason="stop", episode=path) for of, path in older),
        )

    def _span(self, span: Span) -> Span:
        """Return the span with the data of its turn or of its answer."""
        turn = self.turns[span.turn]
        if span.role != "assistant":
            return replace(span, error=any(answer.error for answer in turn.answers))
        span = replace(span, state=turn.state, reward=turn.reward)
        return replace(span, calls=turn.calls, unreadable=turn.unreadable, written_as=turn.said.written_as)

    def _columns(self, path: Path) -> dict[str, Any]:
        """Build the columns of a path: the engine's values for each sampled token; for other tokens, only the version
        of the turn before them."""
        turns = [turn.completion for turn in self.turns]
        numbers = _sampled_places(path)
        sampled = [turns[number] for number, _, _ in numbers]
        places = [place[1:] for place in numbers]
        first = turns[0]
        length = len(path.tokens)
        columns: dict[str, Any] = {}
        for column in filled_by("engine"):
            values = [getattr(completion, column.name) for completion in sampled]
            if column.name == "tokens" or any(value is None for value in values):
                continue
            if column.ragged:
                columns[column.name] = _placed_sets(values, places, length)
            else:
                columns[column.name] = _placed(values, places, length, column.absent)
        if first.untruncated_log_prob is first.sampled_log_prob:
            columns["untruncated_log_prob"] = columns["sampled_log_prob"]
        columns["policy_version"] = _versions(columns["policy_version"], path.written)
        routes = first.prompt_routed_experts
        if path.initial_prompt is not None and routes is not None:  # the engine saw another initial prompt
            routes = np.full((len(path.initial_prompt), *routes.shape[1:]), -1, routes.dtype)
        return columns | {
            "initial_prompt": self._initial_prompt(path),
            "prompt_uid": first.prompt_uid,
            "sample": first.sample,
            "turn": numbers[0][0],
            "tokens": path.tokens,
            "sampled": path.sampled,
            "text": sampled[-1].text,
            "stopped_by": sampled[-1].stopped_by,
            "temperature": first.temperature,
            "prompt_routed_experts": routes,
        }

    def _initial_prompt(self, path: Path) -> Prompt | None:
        """Return the prompt that a path begins with if it differs from that of the request."""
        if path.initial_prompt is not None:
            return replace(self.initial_prompt, messages=(), tokens=path.initial_prompt)
        if self.initial_prompt is self.request.prompt:
            return None
        return self.initial_prompt


def _as_written(name: str, call: ToolCall) -> dict[str, Any]:
    """A call as chat completions have it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": name, "type": "function", "function": function}


def _sampled_places(path: Path) -> list[tuple[int, int, int]]:
    """List the sampled turns of a path: number, start and end of each."""
    ends = np.cumsum([span.tokens for span in path.spans]).tolist()
    spans = zip(path.spans, ends, strict=True)
    return [(span.turn, end - span.tokens, end) for span, end in spans if span.sampled]


def _begins(tokens: Ints, seen: Ints) -> bool:
    """Return True if `tokens` begins with `seen` and is longer."""
    return len(seen) < len(tokens) and np.array_equal(seen, tokens[: len(seen)])


def _placed(
    values: Sequence[NDArray[Any]], places: Sequence[tuple[int, int]], length: int, absent: int
) -> NDArray[Any]:
    """Build a column, [length, …], with the values at their places and `absent` elsewhere."""
    column = np.full((length, *values[0].shape[1:]), absent, values[0].dtype)
    for value, (start, end) in zip(values, places, strict=True):
        column[start:end] = value
    return column


def _versions(versions: NDArray[Any], written: NDArray[Any]) -> NDArray[Any]:
    """Give each token that the model did not write the version of the one before it that it wrote, or else of the
    first."""
    before = np.maximum.accumulate(np.where(written, np.arange(len(written)), -1))
    return versions[np.where(before < 0, int(written.argmax()), before)]


def _placed_sets(values: Sequence[SamplingMask], places: Sequence[tuple[int, int]], length: int) -> SamplingMask:
    """Build a column with the sets of the values at their places, and empty ones elsewhere."""
    parts = list[SamplingMask]()
    at = 0
    for sets, (start, end) in zip(values, places, strict=True):
        parts += [_empty_sets(start - at), sets]
        at = end
    return SamplingMask.joined([*parts, _empty_sets(length - at)])


def _empty_sets(count: int) -> SamplingMask:
    return SamplingMask.of_counts(np.empty(0, np.int32), np.zeros(count, np.int64))


def with_group_prompt(prompt: Prompt, completions: Sequence[Completion]) -> tuple[Prompt, list[Completion]]:
    """Return the prompt that the first turn of the group's first episode saw, and the episodes, whose paths have an
    `initial_prompt` only if it differs from that prompt: an agent may begin each episode in its own words.

    Args:
        prompt: the prompt of the requests, with which a path without an `initial_prompt` begins.
        completions: the episodes; failed ones began with nothing.
    """
    played = [completion for completion in completions if completion.episode is None or not completion.episode.failure]
    first = [min(completion.paths, key=lambda path: path.turn) for completion in played]
    of_group = next((path.initial_prompt or prompt for path in first), prompt)

    def path_of_group(path: Completion) -> Completion:
        earlier = tuple(map(path_of_group, path.earlier))
        own = path.initial_prompt or prompt
        if np.array_equal(own.tokens, of_group.tokens):
            return replace(path, initial_prompt=None, earlier=earlier)
        return replace(path, initial_prompt=own, earlier=earlier)

    played_paths = {completion.key: path_of_group(completion) for completion in played}
    return of_group, [played_paths.get(completion.key, completion) for completion in completions]


def failed_episode(request: Request, failure: str, attempts: int) -> Completion:
    """Build the completion of a failed episode, which no reward scores."""
    empty = Completion.of_text(request.prompt.uid, request.sample, "", finish_reason="abort")
    return replace(
        empty,
        sampled=np.zeros(0, np.bool_),
        temperature=request.sampling.temperature,
        episode=Episode(failure=" ".join(failure.split())[:300], attempts=attempts),
    )


def with_seconds(completion: Completion, seconds: Mapping[str, float]) -> Completion:
    """Return the completion of an episode that says where its time went; see `Episode.seconds`."""
    assert completion.episode is not None
    rounded = {account: round(spent, 3) for account, spent in seconds.items()}
    return replace(completion, episode=replace(completion.episode, seconds=rounded))


# ---- shared by the players -------------------------------------------------------------------------------------------


class EpisodeTimes:
    """The time that the episodes of a player spent waiting since the last `taken`, and the `idle` time of an engine of
    which they await no turn; `on_episode` is called with each finished episode."""

    def __init__(self, on_episode: EpisodeCallback | None = None) -> None:
        self.on_episode = on_episode or (lambda life: None)
        self.environment = 0.0
        self.turns = 0.0
        self.queued = 0.0
        self.idle = IdleTime(lambda: asyncio.get_running_loop().time(), "episodes")  # the clock of their turns
        self._awaited = 0

    def await_turns(self, more: int) -> None:
        """Record that `more` further turns are awaited."""
        self._awaited += more
        self.idle.update("episodes", not self._awaited)

    def ended(self, life: EpisodeLife) -> None:
        """Record the end of an episode, successful or not."""
        self.turns += sum(end - begin for begin, end in life.turns)
        self.on_episode(life)

    def taken(self) -> dict[str, float]:
        """Return the seconds since the last call, summed over all episodes: `time/environment`, spent in environments
        or agents, `time/queued`, for which they waited for a place to play, and `time/turns`, for which finished
        episodes waited for the model."""
        seconds = {"time/environment": self.environment, "time/queued": self.queued, "time/turns": self.turns}
        self.environment = 0.0
        self.turns = 0.0
        self.queued = 0.0
        return seconds


class Attempts:
    """The attempts at an episode, and the decision whether to retry.

    Args:
        retries: number of environment failures that may be retried; `COLLATERAL` more if another episode caused
            the failure.
    """

    def __init__(self, retries: int) -> None:
        self.made = 1
        self._retries = retries
        self._collateral = COLLATERAL

    def again(self, failure: Exception) -> bool:
        """Count another attempt after this failure; return False if none is allowed."""
        if not isinstance(failure, EnvironmentFailure):
            return False
        if failure.collateral and self._collateral:
            self._collateral -= 1
        elif self._retries:
            self._retries -= 1
        else:
            return False
        self.made += 1
        return True


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of a prompt's row, as passed to environments and agents."""
    return {**prompt.metadata, "messages": [*prompt.messages], "answer": prompt.answer}


def with_instructions(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Append a text to the system message of a chat, or add one; an empty text leaves the chat unchanged."""
    if not text:
        return tuple(messages)
    if messages[0]["role"] != "system":
        return {"role": "system", "content": text}, *messages
    return {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]


async def sampled_turns(
    engine: Engine, requests: Sequence[Request], times: EpisodeTimes
) -> AsyncGenerator[Completion, None]:
    """Stream the engine's answers, with `times` counting those still awaited."""
    awaited = len(requests)
    times.await_turns(awaited)
    try:
        async with aclosing(engine.generate(requests)) as stream:
            async for completion in stream:
                awaited -= 1
                times.await_turns(-1)
                yield completion
    finally:
        times.await_turns(-awaited)


async def sampled_turn(engine: Engine, request: Request, times: EpisodeTimes) -> Completion:
    """Return the engine's answer to one request; RuntimeError if it gives none."""
    async with aclosing(sampled_turns(engine, [request], times)) as stream:
        async for completion in stream:
            return completion
    raise RuntimeError(f"the engine ended without turn {request.turn} of {prompt_name(request.prompt.uid)}")


class EpisodePlayer:
    """Base of the players, which play the episodes of a task in place of an engine.

    Args:
        engine: samples the turns.
        on_episode: gets each finished episode.

    `times` are the waiting times of the episodes.
    """

    def __init__(self, engine: Engine, on_episode: EpisodeCallback | None) -> None:
        self.engine = engine
        self.times = EpisodeTimes(on_episode)
        self.playing: dict[tuple[int, int], Any] = {}  # by uid and sample, until the episode is yielded

    def unfinished(self, running: Sequence[InFlight]) -> PartialPaths:
        """Return the paths of the episodes in progress, each with a mask of the tokens that the model wrote.

        Args:
            running: everything that the engine has in flight, including the turns that these episodes wait for.
        """
        raise NotImplementedError

    def at_work(self, requests: Sequence[Request], deliver: Deliver) -> AbstractAsyncContextManager[None]:
        """Play an episode for each request from the beginning of the block, and stop what still plays at its end.

        Args:
            deliver: receives each finished episode, and each exception that an environment or agent did not cause.
        """
        raise NotImplementedError

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Stream one finished episode per request, in any order. Closing it stops the others.

        Raises:
            Exception: from the engine.
        """
        arrivals: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        try:
            async with self.at_work(requests, arrivals.put_nowait):
                for _ in requests:
                    arrival = await arrivals.get()
                    if isinstance(arrival, BaseException):
                        raise arrival
                    self.playing.pop((arrival.prompt_uid, arrival.sample), None)
                    yield arrival
        finally:
            for request in requests:
                self.playing.pop((request.prompt.uid, request.sample), None)


class IdleTime:
    """The seconds in which something kept the engine idle, since the first `update`.

    Args:
        now: a clock, in seconds.
        causes: those that hold at the beginning.
    """

    def __init__(self, now: Callable[[], float], *causes: str) -> None:
        self.now = now
        self._sum = 0.0
        self._causes = set(causes)
        self._since: float | None = None

    def update(self, cause: str, holds: bool) -> None:
        """Set whether a cause holds from now on."""
        self._sum = self.seconds
        if holds:
            self._causes.add(cause)
        else:
            self._causes.discard(cause)
        self._since = self.now() if self._causes else None

    @property
    def seconds(self) -> float:
        """The idle time so far."""
        if self._since is None:
            return self._sum
        return self._sum + (self.now() - self._since)
