"""prime-rl's `orchestrator.eval`: held-out questions of one or several environments."""

from collections.abc import Mapping
from typing import Any

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.options import Options
from proxima_peers.convert.prime_rl_sources import (
    BATCH,
    OF_SAMPLING,
    Source,
    has_taskset,
    keys_beside,
    label,
    listed,
    most_messages,
    name_of,
    option_of_sources,
    put_task,
    verifiers_environment,
)

EVAL = f"{BATCH}eval."
EVALS = (f"{EVAL}source", f"{EVAL}env")  # since 2026-07-29; before
EVERY = f"{EVAL}interval"
EXAMPLES = f"{EVAL}num_examples"
EVAL_GROUPS = (f"{EVAL}group_size", f"{EVAL}rollouts_per_example")
SAMPLED = f"{EVAL}sampling."
OWN_GROUPS = ("group_size", "rollouts_per_example")


def held_out_environments(d: Draft, o: Options) -> None:
    """`eval.task` of the first environment, `eval.sets` of the others."""
    if not any(name.startswith(EVAL) for name in o.flat):
        return
    sources = listed(o, EVALS)
    option = option_of_sources(o, EVALS)
    o.given(EVERY, EXAMPLES, *EVAL_GROUPS, *(f"{SAMPLED}{name}" for name in OF_SAMPLING))
    o.asked.update(name for name in o.flat if name.startswith(tuple(f"{name}." for name in EVALS)))
    playable = [source for source in sources if verifiers_environment(source) is not None]
    for source in sources:
        if source not in playable:
            d.lacks(option, f"{name_of(source)}: the environment has no id")
    if not playable:
        d.wait("eval.task", option, "which held-out questions, and eval.every")
        return
    for index, source in enumerate(playable):
        path = "eval" if index == 0 else f"eval.sets.{index - 1}"
        if index:
            d.put(f"{path}.name", label(source, index), f"from {option}")
        _set(d, o, path, source, f"from {option}")
        for key in keys_beside(source):
            value = source.get(key, source.get("env", source).get(key))
            d.lacks(option, f"{key} {shown(value)} of {name_of(source)}: an environment has args alone here")
    _when(d, o, playable, option)
    _longest_episode(d, playable, option)


def _when(d: Draft, o: Options, sources: list[Source], option: str) -> None:
    """How often, and whether before the first step."""
    every = o.whole(EVERY, default=100, least=1)
    own = [source.get("interval", every) for source in sources]
    where = f"from {option}: its interval" if "interval" in sources[0] else o.origin(EVERY)
    d.put("eval.every", own[0], where)
    if any(interval != own[0] for interval in own):
        d.lacks(option, f"intervals {', '.join(map(str, own))}: all sets are evaluated every {own[0]} steps here")
    base = f"{EVAL}eval_base_model"
    skips = f"{EVAL}skip_first_step"
    before = o.flag(base, default=True) and not o.flag(skips)
    decides = base if o.given(base) else skips
    d.put("eval.before", before, o.origin(decides))


def _set(d: Draft, o: Options, path: str, source: Source, origin: str) -> None:
    """The rows, the number of answers and the sampling of one environment."""
    environment = verifiers_environment(source) or {}
    if has_taskset(source):
        split = ("train", "a taskset has one list of tasks")
    else:
        split = ("eval", "its evaluation data")
    put_task(d, f"{path}.task", environment, origin, split)
    count = source.get("num_examples")
    where = f"{origin}: its num_examples"
    if count is None:
        count = o.whole(EXAMPLES, default=-1)
        where = o.origin(EXAMPLES)
    if isinstance(count, int) and count > 0:
        d.put(f"{path}.task.size", count, where)
    if source.get("skip_first"):
        d.put(f"{path}.task.skip", source["skip_first"], f"{origin}: its skip_first")
    d.put(f"{path}.limit", 0, f"{where}: all rows of the task")
    group = next((source[name] for name in OWN_GROUPS if name in source), None)
    samples = o.whole(*EVAL_GROUPS, default=1, least=1)
    if group is None:
        d.put(f"{path}.samples", samples, o.origin(*EVAL_GROUPS))
    else:
        d.put(f"{path}.samples", group, f"{origin}: its group_size")
    _sampling(d, o, path, source, origin)


def _sampling(d: Draft, o: Options, path: str, source: Source, origin: str) -> None:
    """The sampling of the group, and over it that of the environment."""
    given = {name.removeprefix(SAMPLED): name for name in o.flat if name.startswith(SAMPLED)}
    own = source.get("sampling")
    if not isinstance(own, Mapping):
        own = {}
    values: dict[str, tuple[Any, str]] = {}
    for name, option in given.items():
        if o.get(option) is not None:
            values[name] = (o.get(option), o.origin(option))
    values |= {name: (value, f"{origin}: its sampling") for name, value in own.items() if value is not None}
    fields = {OF_SAMPLING[name]: sourced for name, sourced in values.items() if name in OF_SAMPLING}
    for name, (value, where) in values.items():
        if name not in OF_SAMPLING and value not in ({}, []):
            option = where.partition(":")[0].removeprefix("from ")
            d.lacks(option, f"{name} {shown(value)}: an argument of the sampling")
    left = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for field in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
        if field in fields:
            value, where = fields[field]
            if field == "top_k" and value == -1:  # off
                value = 0
            d.put(f"{path}.sampling.{field}", value, where)
        elif field in left:
            d.put(f"{path}.sampling.{field}", left[field], "vLLM's, where the model has none")
    server = [field for field in left if field not in fields]
    if server and path == "eval":
        meaning = "the server takes those of the model's generation_config.json; without it these"
        d.defaults.append(f"{SAMPLED}{{{','.join(server)}}}=null ({meaning}: 1, 1 and 0)")
    if "max_tokens" not in fields:
        longest = d.entries["sampling.max_tokens"].value
        d.put(f"{path}.sampling.max_tokens", longest, "as in training")
        if path == "eval":
            d.defaults.append(f"{SAMPLED}max_completion_tokens=null (what is left of the context; here as in training)")


def _longest_episode(d: Draft, sources: list[Source], option: str) -> None:
    """Raise `episode.turns` to what the held-out environments need."""
    now = d.entries.get("episode.turns")
    for source in sources:
        wanted, name = most_messages(verifiers_environment(source) or {})
        origin = f"from {option}: {name}"
        if wanted is None:
            wanted = d.entries["model.max_length"].value
            origin = "the context"
        if now is None or wanted > now.value:
            note = now.note if now is not None else ""
            d.put("episode.turns", wanted, f"{origin}, for {name_of(source)}", note)
            now = d.entries["episode.turns"]
