"""Plays episodes: like an engine's `generate`, but each completion has several turns.

The first turns of a prompt's completions go to the engine in one call, so that it processes the initial prompt once.
Each further turn is a call of its own, as the episodes proceed.

A replayed episode is identical, whether the run was killed or the environment failed: the draws of a turn are keyed by
(seed, uid, sample, turn), and the environment's seed by (seed, uid).
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from proxima.data import UserError
from proxima.data.episode import Cut, EpisodeLife
from proxima.data.flow import ESCAPED_PLACEHOLDER, IMAGE_PLACEHOLDER, Completion, Message, Prompt, prompt_name
from proxima.data.random import EPISODE_SEED, mix
from proxima.engine.protocol import Engine, InFlight, Request
from proxima.environment.call_readers import read_calls
from proxima.environment.concurrent_hosts import AnyHosts
from proxima.environment.hosts import Answer, EnvironmentFailure, Instance, too_slow
from proxima.environment.protocol import RewardWithParts
from proxima.rollout.episodes.conversation import Conversation
from proxima.rollout.episodes.played import (
    NO_PARTS,
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
    sampled_turns,
    with_instructions,
    with_seconds,
)
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.tool_use import ToolUse
from proxima.task.image_files import open_image
from proxima.task.prompts import with_system

T = TypeVar("T")


class GivenUp(Exception):
    """An episode that would fail again in the same way."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which the episodes of a task are played.

    Args:
        settings: limits of the episodes.
        context: maximum tokens of prompt and episode together.
        responds: the environment answers messages that call no tool.
        rewards: there is an environment, whose turns have rewards.
        system: the system prompt for initial prompts without one.
    """

    settings: EpisodeSettings
    context: int
    responds: bool = False
    rewards: bool = False
    system: str | None = None


class Episodes(EpisodePlayer):
    """Plays the episodes of a task in environments.

    Args:
        engine: samples the turns.
        hosts: run the environments; the caller closes them.
        uses: the `ToolUse` of an episode's tools.
        rules: the limits.
        on_episode: gets each finished episode.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: AnyHosts,
        uses: Callable[[Sequence[Mapping[str, Any]]], ToolUse],
        rules: Rules,
        on_episode: EpisodeCallback | None = None,
    ) -> None:
        super().__init__(engine, on_episode)
        self.hosts = hosts
        self.uses = uses
        self.rules = rules
        self.adding = asyncio.Lock()  # images of environments

    def unfinished(self, running: Sequence[InFlight]) -> PartialPaths:
        by_key = {completion.key: completion for completion in running}
        paths: PartialPaths = []
        for (uid, sample), played in self.playing.items():
            turn = by_key.get((uid, sample, len(played.turns)))
            paths += played.so_far(turn)
        return paths

    @asynccontextmanager
    async def at_work(self, requests: Sequence[Request], deliver: Deliver) -> AsyncIterator[None]:
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.prompt.uid, []).append(request)
        tables = [GroupTable(self, group, deliver) for group in groups.values()]
        try:
            for table in tables:
                table.start(table.play)
            yield
        finally:
            for table in tables:
                table.close()
            tasks = chain.from_iterable(table.tasks for table in tables)
            await asyncio.gather(*tasks, return_exceptions=True)


class GroupTable:
    """The episodes of one prompt.

    Args:
        player: provides the settings.
        requests: the requests of the prompt.
        deliver: receives each finished episode, and each exception that an environment did not cause.

    Attributes: `use`, that of the tools of the prompt's row, since the first episode that began.
    """

    def __init__(self, player: Episodes, requests: Sequence[Request], deliver: Deliver) -> None:
        self.player = player
        self.rules = player.rules
        self.requests = requests
        self.deliver = deliver
        self.use = player.uses(())
        self.tasks: set[asyncio.Task[None]] = set()
        self.open: set[Instance] = set()  # instances not yet ended
        self.closed = False
        self.initial_prompt: Prompt | None = None  # of the first episode that opened
        self.turns: dict[int, list[tuple[float, float]]] = {request.sample: [] for request in requests}  # waits
        self.queues: dict[int, list[tuple[float, float]]] = {request.sample: [] for request in requests}  # for a worker
        self.own: dict[int, float] = {request.sample: 0.0 for request in requests}  # seconds in the environment
        self.clock = asyncio.get_running_loop().time
        self.began = self.clock()

    def start(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        """Run `work` concurrently; an exception that it raises is delivered."""

        async def run() -> None:
            try:
                await work(*arguments)
            except BaseException as error:
                self.deliver(error)

        task = asyncio.create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def close(self) -> None:
        """Cancel the running tasks and free their environments."""
        self.closed = True
        for task in self.tasks:
            task.cancel()
        for instance in self.open:
            instance.drop()

    async def begin(self) -> list[Played | Exception]:
        """Open all episodes of the prompt; an exception stands for an episode that failed to open."""
        return await asyncio.gather(*map(self._begin, self.requests))

    async def play(self) -> None:
        """Play all episodes of the prompt: the initial prompts together, then each episode separately."""
        begun = await self.begin()
        played = {each.request.sample: each for each in begun if isinstance(each, Played)}
        for request, each in zip(self.requests, begun, strict=True):
            if not isinstance(each, Played):
                self.start(self._play, request, each, None)
        if not played:
            return
        first = [each.next_request(self.room(each)) for each in played.values()]
        asked = self.clock()
        async with aclosing(sampled_turns(self.player.engine, first, self.player.times)) as stream:
            async for completion in stream:
                each = played.pop(completion.sample)
                self.turns[completion.sample].append((asked, self.clock()))
                self.start(self._play, each.request, each, completion)
        if played:
            raise RuntimeError(f"the engine ended without turn 0 of {prompt_name(self.requests[0].prompt.uid)}")

    async def _play(self, request: Request, begun: Played | Exception, first: Completion | None) -> None:
        """Play an episode to its end. If its environment fails, restart it with the first turn already sampled."""
        attempts = Attempts(self.rules.settings.retries)
        while True:
            try:
                if not isinstance(begun, Played):
                    raise begun
                completion = await self._to_end(begun, first, attempts.made)
                return self._ended(request, completion)
            except (EnvironmentFailure, GivenUp) as failure:
                if isinstance(begun, Played):
                    self._drop(begun.instance)
                if not attempts.again(failure):
                    return self._ended(request, failed_episode(request, str(failure), attempts.made))
            begun = await self._begin(request)

    def _ended(self, request: Request, completion: Completion) -> None:
        uid = request.prompt.uid
        sample = request.sample
        turns = self.turns[sample]
        queues = self.queues[sample]
        life = EpisodeLife(uid, sample, self.began, self.clock(), turns, queues)
        self.player.times.ended(life)
        seconds = {"queued": _total(queues), "own": self.own[sample], "policy": _total(turns)}
        self.deliver(with_seconds(completion, seconds))

    async def _begin(self, request: Request) -> Played | Exception:
        """Open a new environment and its conversation; return the exception if that fails."""
        prompt = request.prompt
        seed = mix(EPISODE_SEED, request.seed, prompt.uid) % 2**31
        label = f"{prompt_name(prompt.uid)} sample {request.sample}"
        began = self.clock()
        try:
            instance = await self.player.hosts.open(row_of(prompt), seed, label)
        except EnvironmentFailure as failure:
            self._charge_failed(request.sample, began, failure)
            return failure
        if self.closed:  # it opened although it was cancelled: nobody would free it
            instance.drop()
            raise asyncio.CancelledError
        self.open.add(instance)
        use = self.player.uses(instance.interface.schemas)
        self._charge(request.sample, began, instance.seconds)
        try:
            messages = await self._initial_prompt(instance.opening, prompt, use)
            conversation = Conversation(use.template, messages, self.rules.settings.forks)
            initial_prompt = self._checked(prompt, messages, conversation, use)
        except (EnvironmentFailure, GivenUp, UserError) as reason:  # the template fails for these messages
            self._drop(instance)
            if isinstance(reason, UserError):
                return GivenUp(str(reason))
            return reason
        played = Played(request, initial_prompt, instance, conversation, instance.state)
        self.player.playing[prompt.uid, request.sample] = played
        return played

    async def _initial_prompt(
        self, given: Sequence[Message] | None, prompt: Prompt, use: ToolUse
    ) -> tuple[Message, ...]:
        """Return the messages that an episode begins with."""
        messages = prompt.messages
        if given is not None:
            messages = with_system(await self._numbered(given, prompt), self.rules.system)
        if not any(message["content"] for message in messages if message["role"] == "user"):
            raise GivenUp("neither `reset` of the environment nor the row gives a message")
        return with_instructions(messages, use.instructions)

    def _checked(
        self, prompt: Prompt, messages: tuple[Message, ...], conversation: Conversation, use: ToolUse
    ) -> Prompt:
        """Return the prompt made of these messages; it must be the same for all episodes."""
        tokens = conversation.prompt
        context = self.rules.context
        if len(tokens) >= context:
            raise GivenUp(f"its initial prompt has {len(tokens)} tokens, and the context {context} (model.max_length)")
        if self.initial_prompt is None:
            same = messages == prompt.messages and np.array_equal(tokens, prompt.tokens)
            shared = use.template.shared_prefix(messages, tokens)
            self.use = use
            if same:
                self.initial_prompt = prompt
            else:
                self.initial_prompt = replace(prompt, messages=messages, tokens=tokens, shared_prefix=shared)
        if not np.array_equal(self.initial_prompt.tokens, tokens):
            reason = "`reset` gives the completions of a prompt different messages"
            raise GivenUp(f"{reason}: everything random must come from the row and the seed")
        return self.initial_prompt

    # ---- turns -------------------------------------------------------------------------------------------------------

    async def _to_end(self, played: Played, first: Completion | None, attempts: int) -> Completion:
        completion = first
        over = False
        cut: Cut = ""
        while not over:
            if completion is None:
                request = played.next_request(self.room(played))
                completion = await self._turn(request)
            over, cut = await self.advance(played, completion)
            completion = None
        reward, parts = await self.reward(played)
        return played.completion(cut=cut, reward=reward, parts=parts, attempts=attempts)

    async def advance(self, played: Played, completion: Completion) -> tuple[bool, Cut]:
        """Add a turn of the model, and the answers to it.

        Returns: True if the episode is over, and the limit that ended it.

        Raises:
            EnvironmentFailure, GivenUp: the episode has failed.
        """
        context_left = self._context_left(played)
        turn = played.add(completion)
        if completion.finish_reason == "abort":
            raise GivenUp("the engine aborted a turn of it")
        if completion.finish_reason == "length":
            return True, _limit(len(completion.tokens), context_left)
        if await self._answered(played, turn):
            return True, ""
        if len(played.turns) == self.rules.settings.turns:
            return True, "turns"
        try:
            played.conversation.observe(self.shown([answer.message for answer in turn.answers]))
        except UserError as error:  # the template fails for these messages, or a fork is refused
            raise GivenUp(str(error)) from None
        if self.room(played) < 1:
            return True, _limit(1, self._context_left(played))
        return False, ""

    async def reward(self, played: Played) -> tuple[float | None, Mapping[str, float]]:
        """End the environment and return the reward of the whole episode, None if its environment gives none, and the
        values of which it was made.

        Raises:
            EnvironmentFailure: as `Instance.end`.
        """
        instance = played.instance
        if instance.interface.reads_messages:
            said = played.messages(self.use)
        else:
            said = []
        at_end = await self._charged(played, instance.end(said))
        self.open.discard(instance)
        if not self.rules.rewards:
            return None, NO_PARTS
        given = at_end
        parts = NO_PARTS
        if isinstance(at_end, RewardWithParts):
            given = at_end.value
            parts = at_end.parts
        assert not isinstance(given, Mapping)  # no roles play here
        of_turns = [turn.reward for turn in played.turns]
        return sum(of_turns) + (given or 0.0), parts

    async def _turn(self, request: Request) -> Completion:
        """Sample a further turn of the model."""
        start = self.clock()
        completion = await sampled_turn(self.player.engine, request, self.player.times)
        self.turns[request.sample].append((start, self.clock()))
        return completion

    async def _charged(self, played: Played, call: Awaitable[T]) -> T:
        """Await a call of an environment and count its time.

        Raises:
            EnvironmentFailure: the call failed, or the episode takes too long.
        """
        instance = played.instance
        sample = played.request.sample
        before = instance.seconds
        limit = self.rules.settings.seconds
        began = self.clock()
        try:
            result = await call
        except EnvironmentFailure as failure:
            self._charge_failed(sample, began, failure)
            raise
        self._charge(sample, began, instance.seconds - before)
        if instance.seconds > limit:
            raise too_slow(limit)
        return result

    def _charge(self, sample: int, began: float, own: float) -> None:
        """Count a call that has ended now: so many seconds in the environment, after a wait for its worker."""
        times = self.player.times
        waited = max(0.0, self.clock() - began - own)
        self.own[sample] += own
        self.queues[sample].append((began, began + waited))
        times.environment += own
        times.queued += waited

    def _charge_failed(self, sample: int, began: float, failure: EnvironmentFailure) -> None:
        """Count a call that has failed now."""
        own = failure.own
        if own is None:
            own = self.clock() - began
        self._charge(sample, began, own)

    async def _answered(self, played: Played, turn: PlayedTurn) -> bool:
        """Let tools and environment answer the turn; return True if the episode ends with it."""
        answers = list[Answer]()
        use = self.use
        if use.tool_format:
            turn.said = read_calls(turn.completion.text, use.tool_format, use.tools)
            if turn.calls:
                answers += await self._charged(played, played.instance.call(turn.calls))
            unread: list[Message] = [{"role": "tool", "content": f"error: {why}"} for why in turn.unreadable]
            turn.answers = [TurnAnswer(message, error=True) for message in unread]
        if self.rules.responds and not answers and not turn.unreadable:
            answers = [await self._charged(played, played.instance.respond(turn.completion.text))]
        for number, answer in enumerate(answers):
            turn.reward += answer.reward
            call = number if turn.calls else None
            messages = await self._numbered(answer.messages)
            turn.answers += [TurnAnswer(message, answer.error, call) for message in messages]
            if answer.state is not None:
                played.state = answer.state
        turn.done = any(answer.done for answer in answers)
        return turn.done or not turn.answers

    async def _numbered(self, messages: Sequence[Message], prompt: Prompt | None = None) -> Sequence[Message]:
        """The messages of an environment with the numbers of its images; those of a `prompt` have theirs already.

        Raises:
            EnvironmentFailure: an image can't be read. GivenUp: none can be shown.
        """
        if all("images" not in message for message in messages):
            return messages
        store = getattr(self.use.template.tokenizer, "images", None)
        if store is None:
            raise GivenUp("it shows an image, and no image can be shown: set episode.images=true")

        known: set[int] = set()
        if prompt is not None:
            known.update(_images(prompt.messages))

        def number(image: str | int) -> int:
            if isinstance(image, str):
                decoded = open_image(base64.b64decode(image))
                added = int(store.add(decoded))
                store.tokens(added)  # refuses what can't be shown
                return added
            if image not in known:
                raise UserError(f"{image} is not among the images of the prompt")
            return image

        def numbered() -> list[Message]:
            shown: list[Message] = []
            for message in messages:
                if "images" in message:
                    message = {**message, "images": [number(image) for image in message["images"]]}
                shown.append(message)
            store.write()
            return shown

        try:
            async with self.player.adding:  # in the order in which they came, whichever is decoded first
                return await asyncio.to_thread(numbered)  # a large image takes a second
        except UserError as error:
            raise EnvironmentFailure(f"it shows an image that can't be read: {error}") from None

    def shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Convert answers for the chat template: one without support for tools has no role `tool` either."""
        if not self.use.instructions or all(message["role"] != "tool" for message in messages):
            return messages
        images = list(_images(messages))
        if not images:
            return [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
        texts = []
        for message in messages:
            text = message["content"]
            if not message.get("images"):
                text = text.replace(IMAGE_PLACEHOLDER, ESCAPED_PLACEHOLDER)
            texts.append(text)
        return [{"role": "user", "content": "\n".join(texts), "images": images}]

    def _context_left(self, played: Played) -> int:
        return self.rules.context - len(played.conversation.context)

    def room(self, played: Played) -> int:
        """The maximum number of tokens of the next turn."""
        return played.room(self.rules.settings, self.rules.context, played.length)

    def _drop(self, instance: Instance) -> None:
        self.open.discard(instance)
        instance.drop()


def _images(messages: Sequence[Message]) -> Iterator[int]:
    """The images of the messages, by their numbers."""
    for message in messages:
        yield from message.get("images", ())


def _limit(tokens: int, context_left: int) -> Cut:
    """The limit that so many tokens reach: the context, or else one that is set."""
    return "context" if tokens >= context_left else "tokens"


def _total(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)
