"""From a task with an environment or tools to what plays its episodes, and the checks of both before weights load."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proxima.data import FieldError, Prompt, within
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.environment.hosts import HostLimits, Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.environment.tool_calls import describe_tools, format_of, knows_tools
from proxima.rollout.episodes.conversation import ForkRefused
from proxima.rollout.episodes.played import Played
from proxima.rollout.episodes.player import Episodes, GroupTable, Rules
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.rollout.episodes.template_check import check_template
from proxima.rollout.episodes.turn_template import TurnTemplate

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig

TRIED = 4  # prompts whose openings are tried


@dataclass(frozen=True, kw_only=True)
class World:
    """What plays the episodes of a task, but for the engine."""

    hosts: Hosts
    template: TurnTemplate
    rules: Rules

    def player(self, engine: Engine) -> Episodes:
        """With the engine that samples the turns."""
        return Episodes(engine, self.hosts, self.template, self.rules)


def make_worlds(
    config: "RunConfig | EvaluateConfig",
    tasks: Mapping[str, Any],
    prompts: Mapping[str, Sequence[Prompt]],
    tokenizer: Any,
    context: int,
    notes: list[str],
) -> dict[str, World]:
    """The worlds of those tasks that have one, by the path of each. Tasks with equal environments share the processes.

    Args:
        prompts: of each task, whose first openings are tried.
        context: tokens of prompt and episode together.
        notes: gets warnings.

    Raises:
        FieldError: an environment, a tool or the chat template can't be used; the processes are ended.
    """
    shared: list[Hosts] = []
    worlds: dict[str, World] = {}
    try:
        for path, task in tasks.items():
            with within(path):
                spec = _spec(task)
                hosts = next((hosts for hosts in shared if hosts.spec == spec), None)
                if hosts is None:
                    hosts = Hosts(spec, _limits(config.episode))
                    shared.append(hosts)
                for prompt in prompts[path][:1]:
                    hosts.interface.require_columns({*prompt.metadata, "messages", "answer"})
                worlds[path] = _world(config, hosts, tokenizer, context)
                notes += _tried(worlds[path], prompts[path], config.seed, path)
    except BaseException:
        close_worlds(worlds.values())
        for hosts in shared:
            hosts.close()
        raise
    return worlds


def close_worlds(worlds: Iterable[World | None]) -> None:
    """End the processes."""
    for world in worlds:
        if world is not None:
            world.hosts.close()


def _limits(settings: EpisodeSettings) -> HostLimits:
    facts = {name: getattr(settings, name) for name in ("workers", "call_seconds", "memory_mb")}
    return HostLimits(**facts)


def _spec(task: Any) -> EnvironmentSpec:
    given, tools = task.environment, tuple(task.tools)
    if not isinstance(given, Mapping):
        return EnvironmentSpec(kind=given, tools=tools)
    arguments = dict(given)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str):
        remedy = "write {kind: NAME, …} with the arguments of its class"
        raise FieldError("environment", dict(given), "has no kind", remedy=remedy)
    return EnvironmentSpec(kind=kind, arguments=arguments, tools=tools)


def _world(config: "RunConfig | EvaluateConfig", hosts: Hosts, tokenizer: Any, context: int) -> World:
    interface, settings, data = hosts.interface, config.episode, config.data
    schemas, rules = interface.schemas, Rules(settings=settings, context=context, system=data.system)
    rules = replace(rules, responds=interface.responds, rewards=hosts.spec.kind is not None)
    if not schemas:
        return World(hosts=hosts, template=TurnTemplate(tokenizer, data.template_arguments), rules=rules)
    chosen = format_of(tokenizer) if settings.tool_format == "auto" else settings.tool_format
    rules = replace(rules, tool_format=chosen, tools=frozenset(interface.tools))
    shows = knows_tools(tokenizer)
    if not shows:
        rules = replace(rules, instructions=describe_tools(schemas, chosen))
    template = TurnTemplate(tokenizer, data.template_arguments, schemas if shows else None)
    return World(hosts=hosts, template=template, rules=rules)


def _tried(world: World, prompts: Sequence[Prompt], seed: int, path: str) -> list[str]:
    """Begin two episodes of some prompts, and render made turns after one of these openings.

    Returns: a warning if the template rewrites earlier turns.

    Raises:
        FieldError: no opening can be made, two of them differ, or the template can't render an answer.
    """
    loop = EventLoopThread("proxima-episode-trial")
    kind = world.hosts.spec.kind or ", ".join(world.hosts.spec.tools)
    field = "environment" if world.hosts.spec.kind else "tools"
    problem, chat = None, None
    try:
        for prompt in prompts[:TRIED]:
            begun = loop.call(_openings(world, prompt, seed))
            errors = [each for each in begun if not isinstance(each, Played)]
            if not errors:
                chat = begun[0]
                break
            problem = errors[0]
    finally:
        loop.close()
    if problem is not None and chat is None:
        raise FieldError(field, kind, f"can't begin an episode: {problem}")
    if not isinstance(chat, Played):
        return []
    roles = ["user"] * (world.rules.responds or bool(world.rules.instructions))
    roles += ["tool"] * (world.rules.tool_format is not None and not world.rules.instructions)
    notes = []
    for error in check_template(world.template, [chat.opening.messages], roles):
        if isinstance(error, ForkRefused) and world.rules.settings.forks == "train":
            notes.append(f"{path}: {error.reason}: each such episode is trained as several sequences")
        else:
            raise FieldError(field, kind, f"can't be played with this model: {error.reason}", remedy=error.remedy)
    return notes[:1]


async def _openings(world: World, prompt: Prompt, seed: int) -> list[Played | Exception]:
    requests = [Request(prompt=prompt, sample=sample, sampling=Sampling(), seed=seed) for sample in range(2)]
    table = GroupTable(world.player(None), requests, lambda completion: None)  # type: ignore[arg-type]
    try:
        return await table.begin()
    finally:
        table.close()
