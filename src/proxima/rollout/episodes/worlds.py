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
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import agent_class, as_in_recipe, make_agent
from proxima.environment.agents import ListeningAgents
from proxima.environment.concurrent_hosts import AnyHosts, ConcurrentHosts
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.tool_calls import describe_tools, format_of
from proxima.model.pretrained import UnloadedModel
from proxima.rollout.episodes.conversation import Conversation, ForkRefused, TurnTemplate
from proxima.rollout.episodes.played import EpisodeCallback, EpisodePlayer, Played
from proxima.rollout.episodes.player import Episodes, GroupTable, Rules
from proxima.rollout.episodes.settings import EpisodeSettings
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
    """Everything that plays the episodes of a task, except the engine."""

    def __init__(self, play: Play, hosts: AnyHosts, model: UnloadedModel) -> None:
        interface, settings, tokenizer = hosts.interface, play.settings, model.tokenizer
        self.hosts, self.template = hosts, TurnTemplate(tokenizer, play.arguments, interface.schemas)
        rules = Rules(settings=settings, context=model.context, system=play.system)
        rules = replace(rules, responds=interface.responds, rewards=hosts.spec.kind is not None)
        if interface.schemas:
            named = settings.tool_format
            chosen = format_of(tokenizer, play.arguments) if named == "auto" else named
            rules = replace(rules, tool_format=chosen, tools=interface.tools)
            if not self.template.supports_tools:
                rules = replace(rules, instructions=describe_tools(interface.schemas, chosen))
        self.rules = rules
        self.tool_format: str | None = rules.tool_format

    def player(self, engine: Engine, log: Path | None = None, on_episode: EpisodeCallback | None = None) -> Episodes:
        """The player of episodes, with turns sampled by the engine; the output of environments goes to `log`, and
        `on_episode` gets each episode that has ended."""
        self.hosts.log_to(log)
        return Episodes(engine, self.hosts, self.template, self.rules, on_episode)

    def close(self) -> None:
        """Stop the processes. May be called twice."""
        self.hosts.close()


class AgentWorld:
    """Everything that plays the episodes of a task with an external agent, except the engine. The agent's processes
    start with the first episode.

    Raises:
        FieldError: the recipe's agent is invalid.
    """

    def __init__(self, play: Play, spec: EnvironmentSpec, model: UnloadedModel) -> None:
        self.play, self.model = play, model
        require(not spec.tools, "tools", list(spec.tools), "can't be given to an agent, which has its own")
        with within("environment"):
            assert spec.kind is not None
            cls = agent_class(spec.kind) or user_class(spec.kind)
            agent = make_agent(cls, spec.arguments, spec.kind)
            with as_in_recipe(cls, spec.arguments):
                agent.check()
                self.agents, self.roles = agent.build(), getattr(agent, "roles", ())
        named = play.settings.tool_format
        self.tool_format = format_of(model.tokenizer, play.arguments) if named == "auto" else named

    def player(
        self, engine: Engine, log: Path | None = None, on_episode: EpisodeCallback | None = None
    ) -> EpisodePlayer:
        """The player of episodes, with turns sampled by the engine; `on_episode` gets each episode that has ended. A
        failure names the last line that the agent printed."""
        tokenizer, settings = self.model.tokenizer, self.play.settings
        template = partial(TurnTemplate, tokenizer, self.play.arguments)
        from proxima.rollout.episodes.agent_player import AgentEpisodes  # serves by starlette, an optional package

        if isinstance(self.agents, ListeningAgents) and log is not None:
            self.agents.begin(log.parent)
        limits = settings, self.model.context, self.tool_format
        return AgentEpisodes(engine, self.agents, template, *limits, on_episode, self.roles)

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


def make_worlds(
    tasks: Mapping[str, Any],
    prompts: Mapping[str, Sequence[Prompt]],
    model: UnloadedModel,
    play: Play,
    notes: list[str],
) -> dict[str, World | AgentWorld]:
    """Build the world of each task, by the task's path. Tasks with equal environments share the processes.

    Args:
        prompts: the prompts of each task; episodes of the first few are opened as a trial.
        notes: receives warnings.

    Raises:
        FieldError: an environment, a tool or the chat template can't be used; the processes are stopped.
    """
    shared: list[tuple[AnyHosts, tuple[Any, ...]]] = []
    worlds: dict[str, World | AgentWorld] = {}
    try:
        for path, task in tasks.items():
            with within(path):
                spec, of_task = _spec(task), play.of_task(path)
                if isinstance(task, PlayedTask):
                    task.prepare()
                if (cls := agent_class(spec.kind)) is not None:
                    _require_training(cls, spec.kind, path)
                    worlds[path] = AgentWorld(of_task, spec, model)
                    continue
                processes = _processes_of(of_task.settings)
                hosts = next((made for made, of in shared if made.spec == spec and of == processes), None)
                if hosts is None:
                    hosts = _hosts_of(spec, of_task.settings)
                    shared.append((hosts, processes))
                    if hosts.interface.plays:
                        _require_no_sandbox(spec, of_task.settings)
                        hosts.close()
                        worlds[path] = AgentWorld(of_task, spec, model)
                        continue
                    notes += hosts.notes
                for prompt in prompts[path][:1]:
                    hosts.interface.require_columns({*prompt.metadata, "messages", "answer"})
                hosted = World(of_task, hosts, model)
                worlds[path] = hosted
                notes += _unseen_tools(prompts[path], path)
                notes += _tried(hosted, prompts[path], play.seed, path)
    except BaseException:
        for hosts, _ in shared:
            hosts.close()
        for world in worlds.values():
            world.close()
        raise
    return worlds


def _processes_of(settings: EpisodeSettings) -> tuple[Any, ...]:
    """The settings of the worker processes of an environment."""
    return settings.workers, settings.call_seconds, settings.memory_mb, settings.sandbox


def _hosts_of(spec: EnvironmentSpec, settings: EpisodeSettings) -> AnyHosts:
    """What runs an environment: worker processes, or this one for a kind that waits for other programs."""
    cls = ENVIRONMENTS[spec.kind] if spec.kind is not None and spec.kind in ENVIRONMENTS else None
    if getattr(cls, "concurrent", False) is True:
        return ConcurrentHosts(spec, settings.starts_per_second)
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
    given = task.environment
    arguments = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = arguments.pop("kind", None)
    if isinstance(given, Mapping) and not isinstance(kind, str):
        remedy = "write {kind: NAME, …} with the arguments of its class"
        raise FieldError("environment", dict(given), "has no kind", remedy=remedy)
    return EnvironmentSpec(kind=kind, arguments=arguments, tools=tuple(task.tools))


def _tried(world: World, prompts: Sequence[Prompt], seed: int, path: str) -> list[str]:
    """Try some prompts until two episodes of one begin, and render a synthetic episode after their initial prompt.

    Returns: a warning if the template rewrites what the model saw.

    Raises:
        FieldError: no episode can begin, two initial prompts differ, or the template can't render an answer.
    """
    kind = world.hosts.spec.kind or ", ".join(world.hosts.spec.tools)
    field = "environment" if world.hosts.spec.kind else "tools"
    problem, chat = None, None
    with closing(EventLoopThread("proxima-episode-trial")) as loop:
        for prompt in prompts[:TRIED]:
            begun = loop.call(_begin_twice(world, prompt, seed))
            problem = next((each for each in begun if not isinstance(each, Played)), None)
            if problem is None:
                chat = begun[0]
                break
    if problem is not None:
        raise FieldError(field, kind, f"can't begin an episode: {problem}")
    if not isinstance(chat, Played):
        return []
    roles = ["user"] * (world.rules.responds or bool(world.rules.instructions))
    roles += ["tool"] * (world.rules.tool_format is not None and not world.rules.instructions)
    notes = []
    for error in template_errors(world.template, chat.initial_prompt.messages, roles):
        if isinstance(error, ForkRefused) and world.rules.settings.forks == "train":
            notes.append(f"{path}: {error.reason}: what follows such a turn is trained as a separate sequence")
        else:
            raise FieldError(field, kind, f"can't be played with this model: {error.reason}", remedy=error.remedy)
    return notes[:1]


def template_errors(template: TurnTemplate, messages: Sequence[Message], roles: Sequence[str]) -> Iterator[UserError]:
    """Yield the first error of each synthetic episode in which a message of one of the roles answers the turns, a
    ForkRefused where the template only rewrites what the model saw."""
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


async def _begin_twice(world: World, prompt: Prompt, seed: int) -> list[Played | Exception]:
    requests = [Request(prompt=prompt, sample=sample, sampling=Sampling(), seed=seed) for sample in range(2)]
    table = GroupTable(world.player(None), requests, lambda completion: None)  # type: ignore[arg-type]
    try:
        return await table.begin()
    finally:
        table.close()
