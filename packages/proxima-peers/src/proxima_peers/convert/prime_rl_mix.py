"""prime-rl's several environments in one run: a `mix`, whose sources have their own environment, limits and sampling.

There each group draws an environment by `ratio`, and then the next question of that environment. Up to spring 2026
(`orchestrator.env`) the ratios were `orchestrator.buffer.env_ratios`; without them every question came equally often.
"""

from collections.abc import Mapping

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.multi_turn import ENDLESS, FORKS
from proxima_peers.convert.options import Options
from proxima_peers.convert.prime_rl_sources import (
    BATCH,
    OF_SAMPLING,
    SOURCES,
    Source,
    labels,
    listed,
    most_messages,
    name_of,
    option_of_sources,
    put_task,
    verifiers_environment,
)

RATIOS = f"{BATCH}buffer.env_ratios"
PYTHON = "Add `python` to each environment: an interpreter that has verifiers and that environment."


def mix_environments(d: Draft, o: Options) -> None:
    """`task: {kind: mix}` with a source for each environment; one without an id is to fill in."""
    sources = listed(o)
    option = option_of_sources(o)
    origin = f"from {option}"
    d.spec("task", "mix", origin, PYTHON)
    weights = _weights(d, o, sources, option)
    longest = d.entries["model.max_length"].value
    limits: list[int] = []
    for index, (source, name) in enumerate(zip(sources, labels(sources), strict=True)):
        path = f"task.tasks.{index}"
        d.put(f"{path}.name", name, origin)
        d.put(f"{path}.weight", *weights[index])
        environment = verifiers_environment(source)
        put_task(d, f"{path}.task", environment or {"name": "NAME"}, origin, ("train", "its training data"))
        if environment is None:
            what = f"{option}: which environment {name_of(source)} is: it has no id there"
            d.ask(f"{path}.task.environment.name", "NAME", what)
            continue
        turns, where = most_messages(environment)
        if turns is not None:
            d.put(f"{path}.episode.turns", turns, f"{origin}: {where}")
            limits.append(turns)
        _sampling(d, path, source, option)
    d.spec("reward.0", "environment", f"{origin}: the weighted sums of their reward functions")
    if len(limits) == len(sources):
        d.put("episode.turns", max(limits), f"{origin}: the largest of them", FORKS)
    else:
        d.put("episode.turns", longest, "the context", f"{ENDLESS} {FORKS}")


def _weights(d: Draft, o: Options, sources: list[Source], option: str) -> list[tuple[float, str]]:
    """The weight of each source with its origin, and what a weight means."""
    together = o.get(RATIOS)
    own = [source.get("ratio", source.get("weight")) for source in sources]
    if together is not None and not _are_weights(together, len(sources)):
        d.needs("task.tasks", f"{RATIOS}: {shown(together)}: must be {len(sources)} numbers > 0")
        together = None
    if together is None and option == SOURCES[2] and all(ratio is None for ratio in own):
        d.put("task.weights", "row", f"prime-rl's default of {RATIOS}, of that time: every question equally often")
        return [(1, "as its rows") for _ in sources]
    d.put("task.weights", "share", "prime-rl draws an environment for each group, by its ratio")
    if together is not None:
        return [(ratio, f"from {RATIOS}") for ratio in together]
    given: list[tuple[float, str]] = []
    for source, ratio in zip(sources, own, strict=True):
        if _are_weights([ratio], 1):
            given.append((ratio, f"from {option}: its ratio"))
            continue
        given.append((1, f"prime-rl's default of {option}.ratio"))
        if ratio is not None:
            d.needs(f"task ({name_of(source)})", f"{option}: ratio {shown(ratio)}: must be a number > 0")
    return given


def _are_weights(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


def _sampling(d: Draft, path: str, source: Source, option: str) -> None:
    """What a source has in place of the sampling of the run."""
    own = source.get("sampling")
    if not isinstance(own, Mapping):
        return
    for name, value in own.items():
        field = OF_SAMPLING.get(name)
        if field is None:
            d.lacks(option, f"sampling.{name} {shown(value)} of {name_of(source)}: an argument of the sampling")
        elif value is not None:
            if field == "top_k" and value == -1:  # off
                value = 0
            d.put(f"{path}.sampling.{field}", value, f"from {option}: its sampling")
