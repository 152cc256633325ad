"""prime-rl's task and rewards, by its environments, and what stands beside them."""

from collections.abc import Mapping
from typing import Any

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.multi_turn import ENDLESS, FORKS
from proxima_peers.convert.options import Options
from proxima_peers.convert.prime_rl_mix import mix_environments
from proxima_peers.convert.prime_rl_sources import (
    OF_SAMPLING,
    SOURCES,
    Source,
    keys_beside,
    listed,
    most_messages,
    name_of,
    option_of_sources,
    put_task,
    verifiers_environment,
)


def task_and_rewards(d: Draft, o: Options) -> None:
    """The environment, or a mix of several, with its rows and its rewards; to fill in if the file names none."""
    where = _environments(o)
    environments = [verifiers_environment(source) for source in listed(o)]
    playable = [environment for environment in environments if environment is not None]
    if not playable:
        give = "give" if environments[1:] else "gives"
        d.ask("task", "gsm8k", f"{where} {give} the questions; see `proxima list task`", kind=True)
        d.ask("reward.0", "math", f"{where} {give} the rewards; see `proxima list reward`", kind=True)
        return
    if len(environments) > 1:
        mix_environments(d, o)
        return
    origin = f"from {option_of_sources(o)}"
    note = "add `python` to task.environment: an interpreter that has verifiers and this environment"
    put_task(d, "task", playable[0], origin, ("train", "its training data"), note)
    d.spec("reward.0", "environment", f"{origin}: the weighted sum of its reward functions")
    _turns(d, o, playable[0], origin)


def _environments(o: Options) -> str:
    """The option with the environments and their names, for a reason."""
    name = option_of_sources(o)
    named = [name_of(source) for source in listed(o)]
    o.asked.update(option for option in o.flat if option.startswith(tuple(f"{source}." for source in SOURCES)))
    several = "the environments" if len(named) > 1 else "the environment"
    if named:
        return f"{name}: {several} {', '.join(named)} of `verifiers`"
    return f"{name}: an environment of `verifiers`"


def _turns(d: Draft, o: Options, environment: Mapping[str, Any], origin: str) -> None:
    """`episode.turns`: the limit of the agent, or the argument of that name; else none but the context."""
    limit, name = most_messages(environment)
    if limit is not None:
        note = "The environment holds its own limit, too."
        d.put("episode.turns", limit, f"{origin}: {name}", f"{note} {FORKS}")
    else:
        d.put("episode.turns", d.entries["model.max_length"].value, "the context", f"{ENDLESS} {FORKS}")


def beside(d: Draft, o: Options) -> None:
    """Record what the sources of questions set beside their environments and what has no equivalent."""
    option = option_of_sources(o)
    shared = shared_algorithm(o)
    for source in listed(o):
        of = f"of {name_of(source)}"
        if "algo" in source and shared is None:
            kind = algorithm_type(source)
            why = f"{shown(source['algo'])} {of}"
            if kind == "grpo":
                d.lacks(option, f"{why}: the algorithm of the run stands here for all its environments")
            else:
                d.wait("algorithm.advantage", option, f"{why}: another algorithm; a run has one for all environments")
        for key in keys_beside(source):
            value = source.get(key, source.get("env", source).get(key))
            d.lacks(option, f"{key} {shown(value)} {of}: an environment has args alone here")


def shared_algorithm(o: Options) -> Mapping[str, Any] | None:
    """The algorithm that each environment sets for itself, if it is the same for all."""
    own = [source.get("algo") for source in listed(o)]
    if not own or not isinstance(own[0], Mapping) or any(other != own[0] for other in own):
        return None
    return own[0]


def algorithm_type(source: Source) -> str:
    """The kind of algorithm that an environment sets."""
    algorithm = source["algo"]
    if isinstance(algorithm, Mapping):
        return str(algorithm.get("type", "grpo"))
    return str(algorithm)


def own_sampling(d: Draft, o: Options) -> None:
    """The sampling of a single environment, which overrides that of the group."""
    sources = listed(o)
    if len(sources) > 1:  # each has its own in the mix
        return
    own = [source["sampling"] for source in sources if isinstance(source.get("sampling"), Mapping)]
    if not own:
        return
    option = option_of_sources(o)
    for name, value in own[0].items():
        field = OF_SAMPLING.get(name)
        if field is None:
            d.lacks(option, f"sampling.{name} {shown(value)}: an argument of the sampling")
        else:
            d.put(f"sampling.{field}", value, f"from {option}: its sampling")
