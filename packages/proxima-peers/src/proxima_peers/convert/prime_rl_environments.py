"""prime-rl's environments: the task, its rewards and the turns of an episode.

An environment is `id` and `args` (of `load_environment`, up to July 2026), or the `taskset` of verifiers 0.4 with what
stands beside it: the harness and the limits of its agents.
"""

from collections.abc import Mapping
from typing import Any

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.multi_turn import ENDLESS, FORKS
from proxima_peers.convert.options import Options

BATCH = "orchestrator."
SOURCES = (f"{BATCH}train.source", f"{BATCH}train.env", f"{BATCH}env")  # since 2026-07-29; before; the first name
GROUPS = (f"{BATCH}group_size", f"{BATCH}rollouts_per_example")
OF_THE_RUN = (
    *("name", "group_size", "rollouts_per_example", "ratio", "sampling", "weight", "num_workers", "max_retries"),
    *("algo", "curriculum", "serve", "pool", "address", "num_examples", "interval", "skip_first"),
)
READ = ("env", "taskset", "id", "args")
Source = Mapping[str, Any]


def task_and_rewards(d: Draft, o: Options) -> None:
    """The environment, with its rows and its rewards; to fill in if the file names none, or different ones."""
    where = _environments(o)
    environments = [verifiers_environment(source) for source in listed(o)]
    different = [environment for i, environment in enumerate(environments) if environment not in environments[:i]]
    environment = different[0] if len(different) == 1 else None
    if environment is None:
        choice = "; a run plays one environment: keep one in the file, and convert it again" if different[1:] else ""
        give = "give" if different[1:] else "gives"
        d.ask("task", "gsm8k", f"{where} {give} the questions{choice or '; see `proxima list task`'}", kind=True)
        d.ask("reward.0", "math", f"{where} {give} the rewards{choice or '; see `proxima list reward`'}", kind=True)
        return
    origin = f"from {option_of_sources(o)}"
    note = "add `python` to task.environment: an interpreter that has verifiers and this environment"
    d.spec("task", "environment", origin, note, split=("train", "its training data"))
    for field, value in {"kind": "verifiers", **environment}.items():
        d.put(f"task.environment.{field}", value, origin)
    d.spec("reward.0", "environment", f"{origin}: the weighted sum of its reward functions")
    _turns(d, o, environment, origin)


def option_of_sources(o: Options, sources: tuple[str, ...] = SOURCES) -> str:
    """The option that holds the environments."""
    return next((name for name in sources if o.given(name)), sources[0])


def _turns(d: Draft, o: Options, environment: Mapping[str, Any], origin: str) -> None:
    """`episode.turns`: the limit of the agent, or the argument of that name; else none but the context."""
    limit, name = most_messages(environment)
    if limit is not None:
        note = "The environment holds its own limit, too."
        d.put("episode.turns", limit, f"{origin}: {name}", f"{note} {FORKS}")
    else:
        d.put("episode.turns", d.entries["model.max_length"].value, "the context", f"{ENDLESS} {FORKS}")


def most_messages(environment: Mapping[str, Any]) -> tuple[int | None, str]:
    """The largest number of messages of the model, with the name of the option; None if the file does not say it.

    An argument `max_turns` of a taskset has a meaning of its own, and is left to the taskset.
    """
    args = environment.get("args", {})
    if "taskset" not in args and "agent" not in args:
        return _whole(args.get("max_turns")), "max_turns of its args"
    agents = [seat for name, seat in args.items() if name != "taskset" and isinstance(seat, Mapping)]
    limits = [limit for seat in agents if (limit := _whole(seat.get("max_turns"))) is not None]
    return (max(limits), "max_turns of its agent") if limits else (None, "")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def beside(d: Draft, o: Options) -> None:
    """Record what the sources of questions set beside their environments and what has no equivalent."""
    option = option_of_sources(o)
    for source in listed(o):
        of = f"of {name_of(source)}"
        if "algo" in source:
            why = f"{shown(source['algo'])} {of}: another algorithm; choose advantage or distillation"
            d.wait("algorithm.advantage", option, why)
        if "curriculum" in source:
            d.lacks(option, f"curriculum {shown(source['curriculum'])} {of}: tasks are drawn evenly here")
        for key in keys_beside(source):
            value = source.get(key, source.get("env", source).get(key))
            d.lacks(option, f"{key} {shown(value)} {of}: an environment has args alone here")


def keys_beside(source: Source) -> list[str]:
    """The keys of a source with `id` and `args` that are neither these nor the run's."""
    inside = source.get("env", source)
    if not isinstance(inside, Mapping) or not inside.get("id") or isinstance(inside.get("taskset"), Mapping):
        return []
    beside = [key for key in source if key not in (*OF_THE_RUN, *READ)]
    return beside if inside is source else [*beside, *(key for key in inside if key not in (*OF_THE_RUN, *READ))]


def own_sampling(d: Draft, o: Options) -> None:
    """The sampling of the environment itself, which overrides that of the group."""
    sources = listed(o)
    own = [source["sampling"] for source in sources if isinstance(source.get("sampling"), Mapping)]
    if not own:
        return
    option, first = option_of_sources(o), own[0]
    if any(other != first for other in own) or len(own) < len(sources):
        d.lacks(option, f"sampling {shown(own)}: of some environments only; here all have that of {SOURCES[0]}")
        return
    for name, value in first.items():
        field = OF_SAMPLING.get(name)
        if field is None:
            d.lacks(option, f"sampling.{name} {shown(value)}: an argument of the sampling")
        else:
            d.put(f"sampling.{field}", value, f"from {option}: its sampling")


OF_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}


def verifiers_environment(source: Source) -> dict[str, Any] | None:
    """The name and arguments of an environment: `id` and `args`, or the `taskset` of verifiers 0.4 with what stands
    beside it. None if it has no name."""
    inside = source.get("env", source)
    if not isinstance(inside, Mapping):
        return None
    tasks = inside.get("taskset")
    if isinstance(tasks, Mapping) and tasks.get("id"):
        args = {key: value for key, value in inside.items() if key not in OF_THE_RUN}
        args["taskset"] = {key: value for key, value in tasks.items() if key != "id"}
        harness = args.pop("harness", None)  # at first beside the taskset, then in the agent
        args |= {"agent": {"harness": harness, **args.get("agent", {})}} if harness else {}
        return {"name": str(tasks["id"])} | ({"args": args} if any(args.values()) else {})
    if not inside.get("id"):
        return None
    given = inside.get("args")
    return {"name": str(inside["id"])} | ({"args": dict(given)} if isinstance(given, Mapping) and given else {})


def has_taskset(source: Source) -> bool:
    """Return True for an environment of verifiers 0.4, which has one list of tasks."""
    inside = source.get("env", source)
    return isinstance(inside, Mapping) and isinstance(inside.get("taskset"), Mapping)


def _environments(o: Options) -> str:
    """The option with the environments and their names, for a reason."""
    name = option_of_sources(o)
    named = [name_of(source) for source in listed(o)]
    o.asked.update(option for option in o.flat if option.startswith(tuple(f"{source}." for source in SOURCES)))
    several = "the environments" if len(named) > 1 else "the environment"
    return f"{name}: {several} {', '.join(named)} of `verifiers`" if named else f"{name}: an environment of `verifiers`"


def name_of(source: Source) -> str:
    """The name of an environment: its own, or that of its tasks."""
    inside = source.get("env", source)
    tasks = inside.get("taskset") if isinstance(inside, Mapping) else None
    inner = inside.get("id") if isinstance(inside, Mapping) else None
    name = source.get("name") or source.get("id") or inner or (tasks.get("id") if isinstance(tasks, Mapping) else None)
    return str(name or "without a name")


def listed(o: Options, sources: tuple[str, ...] = SOURCES) -> list[Source]:
    """The environments of the file."""
    written = o.get(*sources, default=[])
    return [source for source in written if isinstance(source, Mapping)] if isinstance(written, list) else []
