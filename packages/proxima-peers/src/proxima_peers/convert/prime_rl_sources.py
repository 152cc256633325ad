"""What prime-rl's files write of an environment: its name and arguments, its limits, and what the run sets beside it.

An environment is `id` and `args` (of `load_environment`, up to July 2026), or the `taskset` of verifiers 0.4 with what
stands beside it: the harness and the limits of its agents.
"""

import re
from collections.abc import Mapping
from typing import Any

from proxima.config.sections.eval import RECORD_WORDS
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options, Sourced

BATCH = "orchestrator."
SOURCES = (f"{BATCH}train.source", f"{BATCH}train.env", f"{BATCH}env")  # since 2026-07-29; before; the first name
GROUPS = (f"{BATCH}group_size", f"{BATCH}rollouts_per_example")
OF_THE_RUN = (
    *("name", "group_size", "rollouts_per_example", "ratio", "sampling", "weight", "num_workers", "max_retries"),
    *("algo", "curriculum", "serve", "pool", "address", "num_examples", "interval", "skip_first"),
)
READ = ("env", "taskset", "id", "args")
OF_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}
Source = Mapping[str, Any]


def listed(o: Options, sources: tuple[str, ...] = SOURCES) -> list[Source]:
    """The environments of the file."""
    written = o.get(*sources, default=[])
    if isinstance(written, list):
        return [source for source in written if isinstance(source, Mapping)]
    return []


def option_of_sources(o: Options, sources: tuple[str, ...] = SOURCES) -> str:
    """The option that holds the environments."""
    return next((name for name in sources if o.given(name)), sources[0])


def name_of(source: Source) -> str:
    """The name of an environment: its own, or that of its tasks."""
    name = source.get("name") or source.get("id")
    inside = source.get("env", source)
    if not name and isinstance(inside, Mapping):
        name = inside.get("id")
        tasks = inside.get("taskset")
        if not name and isinstance(tasks, Mapping):
            name = tasks.get("id")
    return str(name or "without a name")


def labels(sources: list[Source]) -> list[str]:
    """A name for each source that names of metrics may have in them, all of them different."""
    found: list[str] = []
    for index, source in enumerate(sources):
        name = label(source, index)
        if name in found:
            name = f"{name}_{index}"
        found.append(name)
    return found


def label(source: Source, index: int) -> str:
    """A name that begins those of the metrics of a source."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", name_of(source))
    if name and name not in RECORD_WORDS:
        return name
    return f"set_{index}"


def verifiers_environment(source: Source) -> dict[str, Any] | None:
    """The name and arguments of an environment: `id` and `args`, or the `taskset` of verifiers 0.4 with what stands
    beside it. None if it has no name."""
    inside = source.get("env", source)
    if not isinstance(inside, Mapping):
        return None
    environment: dict[str, Any] = {}
    tasks = inside.get("taskset")
    if isinstance(tasks, Mapping) and tasks.get("id"):
        args = {key: value for key, value in inside.items() if key not in OF_THE_RUN}
        args["taskset"] = {key: value for key, value in tasks.items() if key != "id"}
        harness = args.pop("harness", None)  # at first beside the taskset, then in the agent
        if harness:
            args["agent"] = {"harness": harness} | args.get("agent", {})
        environment["name"] = str(tasks["id"])
        if any(args.values()):
            environment["args"] = args
        return environment
    if not inside.get("id"):
        return None
    environment["name"] = str(inside["id"])
    given = inside.get("args")
    if isinstance(given, Mapping) and given:
        environment["args"] = dict(given)
    return environment


def put_task(d: Draft, path: str, environment: Mapping[str, Any], origin: str, split: Sourced, note: str = "") -> None:
    """The task at `path`, whose rows and replies an environment gives."""
    d.spec(path, "environment", origin, note, split=split)
    for field, value in {"kind": "verifiers", **environment}.items():
        d.put(f"{path}.environment.{field}", value, origin)


def has_taskset(source: Source) -> bool:
    """Return True for an environment of verifiers 0.4, which has one list of tasks."""
    inside = source.get("env", source)
    return isinstance(inside, Mapping) and isinstance(inside.get("taskset"), Mapping)


def most_messages(environment: Mapping[str, Any]) -> tuple[int | None, str]:
    """The largest number of messages of the model, with the name of the option; None if the file does not say it.

    An argument `max_turns` of a taskset has a meaning of its own, and is left to the taskset.
    """
    args = environment.get("args", {})
    if "taskset" not in args and "agent" not in args:
        return _whole(args.get("max_turns")), "max_turns of its args"
    agents = [seat for name, seat in args.items() if name != "taskset" and isinstance(seat, Mapping)]
    limits = [_whole(seat.get("max_turns")) for seat in agents]
    known = [limit for limit in limits if limit is not None]
    if known:
        return max(known), "max_turns of its agent"
    return None, ""


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    return None


def keys_beside(source: Source) -> list[str]:
    """The keys of a source with `id` and `args` that are neither these nor the run's."""
    inside = source.get("env", source)
    if not isinstance(inside, Mapping) or not inside.get("id") or isinstance(inside.get("taskset"), Mapping):
        return []
    beside = [key for key in source if key not in (*OF_THE_RUN, *READ)]
    if inside is source:
        return beside
    return [*beside, *(key for key in inside if key not in (*OF_THE_RUN, *READ))]
