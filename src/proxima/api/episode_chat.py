"""Chat and generation with tools or an environment, for `proxima generate`. The code, template, instructions and limits
are those of training."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from proxima.api.local_answers import ShownEngine
from proxima.config.resolution import Recipe
from proxima.config.schema import PlayedConfig
from proxima.config.validate import load_recipe
from proxima.data import FieldError, UserError, require
from proxima.data.episode import Cut, Episode, ToolCall
from proxima.data.flow import Completion, FinishReason, Prompt
from proxima.data.image_tokens import patch_text
from proxima.engine.local.local_engine import LocalEngine
from proxima.engine.protocol import Request, Sampling
from proxima.environment.hosts import EnvironmentFailure
from proxima.environment.tool_calls import write_call
from proxima.model.pretrained import without_progress_bars
from proxima.rollout.episodes.played import EpisodePlayer, Played, PlayedTurn, sampled_turn
from proxima.rollout.episodes.player import GivenUp, GroupTable
from proxima.rollout.episodes.worlds import AgentWorld, Play, World, make_worlds
from proxima.runtime.launch.run_data import load_run_data
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row, Rows, user_message

SENTENCE = "It is 7."  # the last of the scripted turns
GREETING = "Hello."  # placeholder for a person's message when the environment is tried


def first_prompt(config: PlayedConfig, tokenizer: Any, text: str | None = None) -> Prompt:
    """The prompt of a task's first row, with its own question, or with `text` as the question and the system messages
    of the row's chat. Without an environment, `text` needs no row.

    Raises:
        UserError: the task can't be read.
    """
    if text is not None and config.task.environment is None:  # only the model reads the prompt
        row = Row(messages=user_message(text))
    else:
        rows: Rows = config.task.rows(config.seed)
        row = rows[0]
    if text is not None:
        system = (message for message in row.messages if message["role"] == "system")
        row = replace(row, messages=(*system, *user_message(text)))
    return to_prompt(row, 0, tokenizer, config.data.system, config.data.template_arguments)


@dataclass(frozen=True)
class Table:
    """The environment and tools with which a model plays, before any weights are loaded.

    Args:
        writes: True if the rows have no question and the environment writes it.
        notes: warnings.
    """

    config: PlayedConfig
    world: World
    writes: bool
    notes: tuple[str, ...]

    def prompt(self, text: str) -> Prompt:
        """The prompt of a person's question."""
        return first_prompt(self.config, self.world.use.template.tokenizer, text)

    def reward(self, episode: float | None) -> float | None:
        """The reward of an episode; None if it is 0 because the environment gives no rewards."""
        judges = self.world.hosts.interface.reward or self.world.rules.responds
        return episode if episode or judges else None

    def require_question(self) -> None:
        """Raise UserError if the environment writes the question, so that the user has none to ask."""
        if self.writes:
            remedy = "proxima eval plays its episodes, proxima view shows those of a run"
            raise UserError("the environment writes the question itself", remedy=remedy)


def make_table(config: PlayedConfig) -> Table | None:
    """Build the world in which a config's model plays, and try it on the first row; the caller closes it. None for an
    external agent, which plays by itself.

    Raises:
        UserError: environment, tools or chat template can't be used.
    """
    with without_progress_bars():
        model = config.model.unloaded()
    notes = list[str]()

    def world(prompt: Prompt) -> World | AgentWorld:
        tasks = {"task": config.task}
        prompts = {"task": [prompt]}
        return make_worlds(tasks, prompts, model, Play.of(config), notes)["task"]

    made = None
    writes = False
    if config.task.environment is not None:
        own = first_prompt(config, model.tokenizer)
        if not own.question:
            with suppress(FieldError):  # on failure, the environment waits for a person's message
                made = world(own)
                writes = True
    made = made or world(first_prompt(config, model.tokenizer, GREETING))
    if isinstance(made, AgentWorld):
        return None
    return Table(config, made, writes, tuple(notes))


class Hears(Protocol):
    """Callbacks for the events of a chat."""

    def opening(self, text: str) -> None:
        """Receive the question as the environment rewrote it."""

    def piece(self, text: str) -> None:
        """Receive a piece of the model's message while it is sampled."""

    def turn(self, turn: PlayedTurn) -> None:
        """Receive a turn once the model's message is complete and has been answered."""

    def over(self, reward: float | None) -> None:
        """Receive the reward once the environment has ended the episode."""


class EpisodeChat:
    """A chat in an environment. A person writes the user's messages. The model answers each, calling tools until it
    writes a message without a call.

    Args:
        table: from `make_table`.
        engine: samples the model's turns.
        sampling, seed: of each turn.
        hears: receives the events of the chat.
    """

    def __init__(self, table: Table, engine: LocalEngine, sampling: Sampling, seed: int, hears: Hears) -> None:
        self.table = table
        self.sampling = sampling
        self.seed = seed
        self.hears = hears
        self.engine: Any = ShownEngine(engine, table.world.use.template.tokenizer, hears.piece)
        self.group: GroupTable | None = None
        self.played: Played | None = None

    def new(self) -> None:
        """Close the environment; the next message starts a chat in a new one."""
        if self.group is not None:
            self.group.close()
        self.group = None
        self.played = None

    def ask(self, text: str) -> Cut:
        """Let the model answer a message; the first message of a chat uses the other columns of the first row. After a
        KeyboardInterrupt, the tokens sampled so far become the model's turn.

        Returns: the limit that cut the answer off; empty if none did.

        Raises:
            UserError: no room is left for an answer (the chat is unchanged), or the environment has failed (the next
                message starts a new chat).
        """
        return asyncio.run(self._ask(text))

    async def _ask(self, text: str) -> Cut:
        before = self.played
        if before is None:
            group, played = await self._begin(self.table.prompt(text))
            if played.initial_prompt.question != text:
                self.hears.opening(played.initial_prompt.question)
        else:
            played = replace(before, conversation=copy(before.conversation), turns=[*before.turns])
            if played.conversation.awaits_turn:  # it was stopped before the model could say anything
                played.add(_unsampled(played, ()))
            unseen = [answer.message for answer in played.turns[-1].answers]
            assert self.group is not None
            group = self.group
            self.played = played
            played.conversation.observe(group.shown([*unseen, {"role": "user", "content": text}]))
        self._set_limits(group, played)
        return await self._answered(group, played, before)

    async def _begin(self, prompt: Prompt) -> tuple[GroupTable, Played]:
        request = Request(prompt=prompt, sample=0, sampling=self.sampling, seed=self.seed)
        group = GroupTable(self.table.world.player(self.engine), [request], lambda completion: None)
        self.group = group
        (begun,) = await group.begin()
        if not isinstance(begun, Played):
            self.new()
            raise UserError(f"the chat can't start: {begun}")
        self.played = begun
        return group, begun

    def _set_limits(self, group: GroupTable, played: Played) -> None:
        """Give the next turns the limits of a full episode, and stop the environment from writing the user's
        messages."""
        rules = self.table.world.rules
        limits = replace(rules.settings, turns=rules.settings.turns + len(played.turns))
        if limits.tokens is not None:
            limits = replace(limits, tokens=limits.tokens + played.length)
        group.rules = replace(rules, responds=False, settings=limits)

    async def _answered(self, group: GroupTable, played: Played, before: Played | None) -> Cut:
        """Play turns of the model until it is a person's turn. `before` is the chat without the message."""
        said = len(played.turns)
        over = False
        cut: Cut = ""
        try:
            if group.room(played) < 1:
                raise UserError(
                    f"the chat has {len(played.conversation.context)} tokens, which leaves no room for an answer"
                )
            while not over:
                request = played.next_request(group.room(played))
                completion = await sampled_turn(self.engine, request, group.player.times)
                over, cut = await group.advance(played, completion)
                self.hears.turn(played.turns[-1])
            if played.turns[-1].done:
                await self._end(group, played)
        except (EnvironmentFailure, GivenUp) as failure:
            self.new()
            raise UserError(f"the chat can't continue: {failure}") from None
        except BaseException:
            if len(self.engine.tokens):
                played.add(_unsampled(played, self.engine.tokens))
            elif len(played.turns) == said:
                self.played = before
                if before is None:
                    self.new()
            raise
        return cut

    async def _end(self, group: GroupTable, played: Played) -> None:
        reward, _ = await group.reward(played)
        self.hears.over(self.table.reward(reward))
        self.new()


def _unsampled(played: Played, tokens: Sequence[int]) -> Completion:
    """The completion of a turn that was interrupted after these tokens."""
    return Completion.of_text(played.request.prompt.uid, 0, "", tokens, "abort")


def play_episodes(
    table: Table, engine: LocalEngine, texts: Sequence[str], *, sampling: Sampling, samples: int, seed: int
) -> list[Completion]:
    """Play `samples` episodes for each question, in order, with the other columns of the first row."""
    prompts = [replace(table.prompt(text), uid=number) for number, text in enumerate(texts)]
    requests: list[Request] = []
    for prompt in prompts:
        for sample in range(samples):
            requests.append(Request(prompt=prompt, sample=sample, sampling=sampling, seed=seed))
    completions = episodes_of(table.world.player(engine), requests)
    return [replace(c, episode=_with_reward(c.episode, table)) for c in completions]


def _with_reward(episode: Episode | None, table: Table) -> Episode | None:
    return episode and replace(episode, reward=table.reward(episode.reward))


def episodes_of(player: EpisodePlayer, requests: Sequence[Request]) -> list[Completion]:
    """Play an episode for each request; returns them ordered by uid and sample."""

    async def played() -> list[Completion]:
        return [completion async for completion in player.generate(requests)]

    return sorted(asyncio.run(played()), key=lambda completion: (completion.prompt_uid, completion.sample))


def scripted_episode(
    recipe: Recipe, overrides: Sequence[str], turns: Sequence[str], row: int
) -> tuple[list[list[dict[str, Any]]], list[str], str]:
    """Play an episode of a recipe's task in its environment, with `turns` in place of the model's. Loads no weights.

    Args:
        turns: the texts of the model's turns; empty: a call of the first tool, if there is one, then a sentence.
        row: row of the training data with the prompt.

    Returns: the parts of each path, with their tokens; notes on the data; why the episode failed, empty if it did not.

    Raises:
        UserError: the recipe is a replay, its task has no environment, or an external agent plays; or `row` is out of
            range or too long.
    """
    resolved = load_recipe(recipe, overrides)
    if resolved.config.replayed is not None:
        raise UserError("a replay starts no episode", remedy="leave rollouts out")
    with resolved.locating():
        data = load_run_data(resolved.config)
    with closing(data):
        prompt = _prompt_of_row(data.source, row)
        world = data.world_of(prompt)
        if world is None:
            remedy = "set task.environment or task.tools; proxima view shows the answers of a run, token by token"
            raise UserError("the task has no environment, so an episode is a single answer", remedy=remedy)
        if isinstance(world, AgentWorld):
            remedy = "play episodes with proxima train, and read them with proxima view"
            raise UserError("an external agent writes its own messages", remedy=remedy)
        engine: Any = ScriptedEngine(world, tuple(turns))  # it only generates
        request = Request(prompt=prompt, sample=0, sampling=resolved.config.sampling)
        (completion,) = episodes_of(world.player(engine), [request])
    failure = completion.episode.failure if completion.episode else ""
    paths = [_path(engine.tokenizer, path.initial_prompt or prompt, path) for path in completion.paths]
    return paths, data.notes, failure


def _prompt_of_row(source: Any, row: int) -> Prompt:
    rows = len(source.rows)
    require(0 <= row < rows, "--row", row, f"must be in [0, {rows - 1}]")
    prompt: Prompt | None = source.prompt(row, uid=row)
    if prompt is None:
        raise FieldError("--row", row, "is too long for the model; take another")
    return prompt


@dataclass
class ScriptedEngine:
    """An engine that answers with the given turns in order, and then repeats the last one."""

    world: World
    turns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.tokenizer: Any = self.world.use.template.tokenizer
        self.turns = self.turns or (*_call(self.world), SENTENCE)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """Yield the turn of each request, tokenized, with the end-of-text token unless `max_tokens` cuts it off."""
        for request in requests:
            text = self.turns[min(request.turn, len(self.turns) - 1)]
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens = [*tokens, self.tokenizer.eos_token_id][: request.sampling.max_tokens]
            ended: FinishReason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
            yield Completion.of_text(request.prompt.uid, request.sample, text, tokens, ended)


def _call(world: World) -> Iterator[str]:
    """A call of the first tool, with "7" for each argument; nothing without tools."""
    if world.use.tool_format is not None:
        name, parameters = next(iter(world.use.tools.items()))
        call = ToolCall(name=name, arguments=dict.fromkeys(parameters.get("properties", {}), "7"))
        yield write_call(call, world.use.tool_format, world.use.tools)


def _path(tokenizer: Any, prompt: Prompt, completion: Completion) -> list[dict[str, Any]]:
    """The parts of a path, each with its tokens."""
    parts = [{"kind": "prompt", "of": "", "tokens": prompt.tokens.tolist()}]
    start = 0
    ids = completion.tokens.tolist()
    spans = completion.episode.spans if completion.episode else ()
    for span in spans:
        kind = "observed"
        about = f"{span.role}, after turn {span.turn}"
        if span.role == "assistant":
            kind = "sampled" if span.sampled else "earlier"
            about = f"turn {span.turn}"
        parts.append({"kind": kind, "of": about, "tokens": ids[start : start + span.tokens]})
        start += span.tokens
    return [{**part, "texts": [_text(tokenizer, token) for token in part["tokens"]]} for part in parts]


def _text(tokenizer: Any, token: int) -> str:
    if token < 0:
        return patch_text(token)
    return str(tokenizer.decode([token]))
