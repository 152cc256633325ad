"""Builds and checks the worlds that play the episodes of tasks with an environment or tools, before weights load."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from proxima.data import FieldError, UserError, require, within
from proxima.data.flow import Message, Prompt
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.environment.agent_kinds import agent_class, as_in_recipe, is_concurrent, make_agent
from proxima.environment.agents import Agents, ListeningAgents
from proxima.environment.concurrent_hosts import AnyHosts, ConcurrentHosts
from proxima.environment.hosts import EnvironmentFailure, Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.tool_calls import format_of
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.episodes.conversation import Conversation, ForkRefused, TurnTemplate
from proxima.rollout.episodes.played import EpisodeCallback, EpisodePlayer, Played, row_of
from proxima.rollout.episodes.player import Episodes, GroupTable, Rules
from proxima.rollout.episodes.seated_environments import SeatedEnvironments
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.tool_use import ToolUse, ToolUses
from proxima.system.user_modules import user_class
from proxima.task.column_mapping import TOOLS
from proxima.task.protocol import PlayedTask

TRIED = 4  # prompts whose episodes are tried
SAID = "<think>\nSeven?\n</think>\n\nIt is 7."  # turns of the trial episode: some templates remove earlier thoughts


@dataclass(frozen=True, kw_only=True)
class Play:
    """The settings of play that do not depend on the environment.

    Args:
        settings: limits of an episode.
        system: the system prompt of rows without one; None: none.
        arguments: those of the chat template.
        seed: that of the trial episodes.
        own: the limits of episodes that differ from `settings`, by the path of their task.
    """

    settings: EpisodeSettings
    system: str | None
    arguments: Mapping[str, Any]
    seed: int
    own: Mapping[str, EpisodeSettings] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any) -> "Play":
        """The settings of play in a config."""
        data = config.data
        return cls(settings=config.episode, system=data.system, arguments=data.template_arguments, seed=config.seed)

    def of_task(self, path: str) -> "Play":
        """The settings of play of the task of a path."""
        return replace(self, settings=self.own.get(path, self.settings))


class World:
    """Everything that plays the episodes of a task, except the engine.

    Attributes: `use`, that of the tools which all its episodes have.
    """

    def __init__(self, play: Play, hosts: AnyHosts, model: UnloadedModel) -> None:
        interface = hosts.interface
        settings = play.settings
        self.hosts = hosts
        self.uses = ToolUses(model.tokenizer, play.arguments, settings.tool_format)
        self.use = self.uses(interface.schemas)
        self.rules = Rules(
            settings=settings,
            context=model.context,
            system=play.system,
            responds=interface.responds,
            rewards=hosts.spec.kind is not None,
        )
        has_tools = bool(interface.schemas) or interface.by_row
        self.tool_format: str | None = self.uses.tool_format if has_tools else None

    def player(self, engine: Engine, log: Path | None = None, on_episode: EpisodeCallback | None = None) -> Episodes:
        """The player of episodes, with turns sampled by the engine; the output of environments goes to `log`, and
        `on_episode` gets each episode that has ended."""
        self.hosts.log_to(log)
        return Episodes(engine, self.hosts, self.uses, self.rules, on_episode)

    def close(self) -> None:
        """Stop the processes. May be called twice."""
        self.hosts.close()


class AgentWorld:
    """Everything that plays the episodes of a task by asking for each turn, except the engine: an external agent, whose
    processes start with the first episode, or an environment with roles.

    Args:
        roles: who plays; none: the policy alone.
    """

    def __init__(self, play: Play, model: UnloadedModel, agents: Agents, roles: Sequence[str]) -> None:
        self.play = play
        self.model = model
        self.agents = agents
        self.roles = roles
        named = play.settings.tool_format
        if named == "auto":
            self.tool_format = format_of(model.tokenizer, play.arguments)
        else:
            self.tool_format = named

    def player(
        self, engine: Engine, log: Path | None = None, on_episode: EpisodeCallback | None = None
    ) -> EpisodePlayer:
        """The player of episodes, with turns sampled by the engine; `on_episode` gets each episode that has ended. A
        failure names the last line that the agent printed."""
        from proxima.rollout.episodes.agent_player import AgentEpisodes  # serves by starlette, an optional package

        if isinstance(self.agents, ListeningAgents) and log is not None:
            self.agents.begin(log.parent)
        if isinstance(self.agents, SeatedEnvironments):
            self.agents.log_to(log)
        return AgentEpisodes(
            engine,
            self.agents,
            partial(TurnTemplate, self.model.tokenizer, self.play.arguments),
            self.play.settings,
            self.model.context,
            self.tool_format,
            on_episode,
            self.roles,
        )

    def listen(self) -> None:
        """Listen for agents from outside, if they come from there.

        Raises:
            FieldError: it is not possible, as where another program has the port.
        """
        if isinstance(self.agents, ListeningAgents):
            with within("environment"):
                self.agents.listen()

    def close(self) -> None:
        """Stop the processes. May be called twice."""
        self.agents.close()


def _agent_world(play: Play, spec: EnvironmentSpec, model: UnloadedModel) -> AgentWorld:
    """The world of an external agent.

    Raises:
        FieldError: the recipe's agent is invalid.
    """
    require(not spec.tools, "tools", list(spec.tools), "can't be given to an agent, which has its own")
    with within("environment"):
        assert spec.kind is not None
        cls = agent_class(spec.kind) or user_class(spec.kind)
        agent = make_agent(cls, spec.arguments, spec.kind)
        with as_in_recipe(cls, spec.arguments):
            agent.check()
            return AgentWorld(play, model, agent.build(), getattr(agent, "roles", ()))


def make_worlds(
    tasks: Mapping[str, Any],
    prompts: Mapping[str, Sequence[Prompt]],
    model: UnloadedModel,
    play: Play,
    notes: list[str],
) -> dict[str, World | AgentWorld]:
    """Build the world of each task, by the task's path. Tasks with equal environments share the processes.

    Args:
        prompts: the prompts of each task; episodes of the first few are opened as a trial. An agent needs none.
        notes: receives warnings.

    Raises:
        FieldError: an environment, a tool or the chat template can't be used; the processes are stopped.
    """
    shared: list[tuple[AnyHosts, tuple[Any, ...]]] = []
    worlds: dict[str, World | AgentWorld] = {}
    try:
        for path, task in tasks.items():
            with within(path):
                spec = _spec(task)
                if isinstance(task, PlayedTask):
                    task.prepare()
                opened = prompts.get(path, ())
                worlds[path] = _world_of(spec, path, opened, model, play, shared, notes)
    except BaseException:
        for hosts, _ in shared:
            hosts.close()
        for world in worlds.values():
            world.close()
        raise
    return worlds


def _world_of(
    spec: EnvironmentSpec,
    path: str,
    prompts: Sequence[Prompt],
    model: UnloadedModel,
    play: Play,
    shared: list[tuple[AnyHosts, tuple[Any, ...]]],
    notes: list[str],
) -> World | AgentWorld:
    """Build the world of one task.

    Args:
        path: of the task.
        shared: what runs the environments of earlier tasks, with its settings; receives what this task starts.
    """
    of_task = play.of_task(path)
    settings = of_task.settings
    cls = agent_class(spec.kind)
    if cls is not None:
        _require_training(cls, spec.kind, path)
        return _agent_world(of_task, spec, model)

    processes = _processes_of(spec, settings)
    hosts = next((made for made, of in shared if made.spec == spec and of == processes), None)
    if hosts is None:
        hosts = _hosts_of(spec, settings)
        shared.append((hosts, processes))
        if hosts.interface.plays:  # a class of the user's that is an agent, as only a worker could say
            _require_no_sandbox(spec, settings)
            hosts.close()
            return _agent_world(of_task, spec, model)
        notes += hosts.notes
    for prompt in prompts[:1]:
        hosts.interface.require_columns({*prompt.metadata, "messages", "answer"})
    notes += _unseen_tools(prompts, path)

    if hosts.interface.roles:
        _open_once(hosts, prompts, play.seed)
        seated = SeatedEnvironments(hosts, settings.seconds)
        return AgentWorld(of_task, model, seated, seated.roles)
    world = World(of_task, hosts, model)
    notes += _tried(world, prompts, play.seed, path)
    return world


def _processes_of(spec: EnvironmentSpec, settings: EpisodeSettings) -> tuple[Any, ...]:
    """The settings of what runs an environment, which tasks must have in common to share it."""
    if _is_concurrent(spec):
        return settings.starts_per_second, settings.seconds
    return settings.workers, settings.call_seconds, settings.memory_mb, settings.sandbox


def _is_concurrent(spec: EnvironmentSpec) -> bool:
    return spec.kind is not None and is_concurrent(spec.kind)


def _hosts_of(spec: EnvironmentSpec, settings: EpisodeSettings) -> AnyHosts:
    """What runs an environment: worker processes, or this one for a kind that waits for other programs."""
    if _is_concurrent(spec):
        return ConcurrentHosts(spec, settings.starts_per_second, settings.seconds)
    return Hosts(
        spec,
        workers=settings.workers,
        call_seconds=settings.call_seconds,
        memory_mb=settings.memory_mb,
        sandbox=settings.sandbox,
    )


def _require_no_sandbox(spec: EnvironmentSpec, settings: EpisodeSettings) -> None:
    """Refuse the sandbox of the workers for a class that plays by itself, beside the run."""
    bound = f"plays by itself, beside the run, and episode.sandbox={settings.sandbox} is for classes in the workers"
    require(settings.sandbox == "none", "environment", spec.kind, bound, remedy="set episode.sandbox=none")


def _require_training(cls: Any, kind: str | None, path: str) -> None:
    """Refuse a kind that plays in training alone for the questions of an evaluation."""
    bound = "plays the run's own task alone: in no mix, and nobody outside is asked the questions of an evaluation"
    remedy = "name another environment there, or none"
    require(path == "task" or not getattr(cls, "trains_only", False), "environment", kind, bound, remedy=remedy)


def _unseen_tools(prompts: Sequence[Prompt], path: str) -> list[str]:
    """A warning if rows name tools: the model sees those of the environment, which it can call."""
    if not any(prompt.metadata.get(TOOLS) for prompt in prompts[:TRIED]):
        return []
    reason = f"the rows' column {TOOLS!r} is not shown to the model, which sees the tools of its environment"
    return [f"{path}: {reason}; the environment and the rewards get the column"]


def _spec(task: Any) -> EnvironmentSpec:
    kind = task.environment
    arguments: dict[str, Any] = {}
    if isinstance(task.environment, Mapping):
        arguments = dict(task.environment)
        kind = arguments.pop("kind", None)
        if not isinstance(kind, str):
            remedy = "write {kind: NAME, …} with the arguments of its class"
            raise FieldError("environment", dict(task.environment), "has no kind", remedy=remedy)
    return EnvironmentSpec(kind=kind, arguments=arguments, tools=tuple(task.tools))


def _tried(world: World, prompts: Sequence[Prompt], seed: int, path: str) -> list[str]:
    """Try some prompts until two episodes of one begin, and render a synthetic episode after their initial prompt.

    Returns: a warning if the template rewrites what the model saw.

    Raises:
        FieldError: no episode can begin, two initial prompts differ, or the template can't render an answer.
    """
    kind = world.hosts.spec.kind or ", ".join(world.hosts.spec.tools)
    field = "environment" if world.hosts.spec.kind else "tools"
    problem = None
    chat = None
    use = world.use
    with closing(EventLoopThread("proxima-episode-trial")) as loop:
        for prompt in prompts[:TRIED]:
            use, begun = loop.call(_begin_twice(world, prompt, seed))
            problem = next((each for each in begun if not isinstance(each, Played)), None)
            if problem is None:
                chat = begun[0]
                break
    if problem is not None:
        raise FieldError(field, kind, f"can't begin an episode: {problem}")
    if not isinstance(chat, Played):
        return []
    roles = []
    if world.rules.responds or use.instructions:
        roles.append("user")
    if use.tool_format is not None and not use.instructions:
        roles.append("tool")
    notes = []
    for error in template_errors(use.template, chat.initial_prompt.messages, roles):
        if isinstance(error, ForkRefused) and world.rules.settings.forks == "train":
            notes.append(f"{path}: {error.reason}: what follows such a turn is trained as a separate sequence")
        else:
            raise FieldError(field, kind, f"can't be played with this model: {error.reason}", remedy=error.remedy)
    return notes[:1]


def _open_once(hosts: AnyHosts, prompts: Sequence[Prompt], seed: int) -> None:
    """Try to open an environment with roles.

    Raises:
        FieldError: no episode can begin.
    """

    async def opened(prompt: Prompt) -> None:
        instance = await hosts.open(row_of(prompt), seed)
        instance.drop()

    with closing(EventLoopThread("proxima-episode-trial")) as loop:
        for prompt in prompts[:1]:
            try:
                loop.call(opened(prompt))
            except EnvironmentFailure as failure:
                raise FieldError("environment", hosts.spec.kind, f"can't begin an episode: {failure}") from None


def template_errors(template: TurnTemplate, messages: Sequence[Message], roles: Sequence[str]) -> Iterator[UserError]:
    """Play a synthetic episode for each role, whose messages answer the turns, and yield the first error of each; it is
    a ForkRefused if the template only rewrites what the model saw."""
    end = template.tokenizer.eos_token or ""
    tokens = np.array(template.tokenizer(SAID + end, add_special_tokens=False)["input_ids"], np.int32)
    for role in roles:
        try:
            conversation = Conversation(template, messages, "refuse")
            for _ in range(2):
                conversation.add_turn(tokens, SAID, "stop")
                conversation.observe([{"role": role, "content": "Right."}])
        except UserError as error:
            yield error


async def _begin_twice(world: World, prompt: Prompt, seed: int) -> tuple[ToolUse, list[Played | Exception]]:
    requests = [Request(prompt=prompt, sample=sample, sampling=Sampling(), seed=seed) for sample in range(2)]
    table = GroupTable(world.player(None), requests, lambda completion: None)  # type: ignore[arg-type]  # no turn is sampled
    try:
        begun = await table.begin()
        return table.use, begun
    finally:
        table.close()
