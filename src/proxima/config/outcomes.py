"""What `auto` becomes: each field that a recipe leaves to the machine has an outcome, with its reason.

`explain` shows the outcomes on this machine, and a run says its own in its first lines. Those of dtypes are decided
once a run and written into its config.yaml, so that a resume, an evaluation and every rank compute in the same; the
others follow from the recipe, the model and the machine at each start.

To add one: a function in `OUTCOMES`, which yields nothing where the recipe chooses itself or leaves the part out; what
only a loaded model or engine tells, a workload adds to its `chosen`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from proxima.config.describe import FieldInfo, fields_of, setting
from proxima.config.resolved import Resolved
from proxima.config.sections.data import agent_of, environment_class, played_in, tasks_of, world_of
from proxima.config.sections.placement import starts_servers, way_to_placed
from proxima.data.errors import FieldError, UserError
from proxima.engine.local.decoders import first_proven
from proxima.engine.local.fast_decoder import FastDecoder, supports
from proxima.environment.agent_kinds import agent_class, make_agent
from proxima.environment.tool_calls import format_of, why_format
from proxima.kernels.compiled import PRODUCTS, unavailable
from proxima.model.architecture import head_dim_of
from proxima.model.attention import flash_path
from proxima.model.files import local_place
from proxima.model.precision import DECIDED, ComputeDtype, compute_dtype, dtype_choice
from proxima.model.pretrained import DTYPES, check_device, resolve_device
from proxima.model.proof import Proof, proof_before_loading
from proxima.task.protocol import is_played

AUTO = "auto"


@dataclass(frozen=True)
class Outcome:
    """What an `auto` field becomes.

    Args:
        path: its dotted path, `engine.dtype`.
        value: in the words of the recipe where it has such a word.
        reason: why, in words that follow the value and a colon.
    """

    path: str
    value: str
    reason: str


def outcomes_of(config: Any) -> list[Outcome]:
    """The outcomes on this machine that can be known before a model is loaded."""
    dtypes = list(dtype_outcomes(config))
    decided, _ = settled(config, None, dtypes)
    outcomes = list(dtypes)
    for find in OUTCOMES:
        outcomes += find(decided)
    return outcomes


def explained_outcomes(config: Any) -> list[Outcome]:
    """The outcomes that are known before the run, and each `auto` field whose outcome is not."""
    known = [*outcomes_of(config), *model_outcomes(config)]
    return [*known, *undecided(config, known)]


def outcome_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each value and its reason: `model.compute_dtype and engine.dtype = float32: bfloat16 products …`."""
    paths: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        paths.setdefault((outcome.value, outcome.reason), []).append(outcome.path)
    return [f"{_listed(fields)} = {value}: {reason}" for (value, reason), fields in paths.items()]


def _listed(words: Sequence[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def dtype_outcomes(config: Any) -> Iterator[Outcome]:
    """The dtype of each field of the type `ComputeDtype` that the recipe leaves to the machine. A spec with a device of
    its own is decided for that one; weights in bfloat16 have products in bfloat16."""
    for path, value, owner in _dtypes(config):
        if value != AUTO:
            continue
        weights = setting(owner, "dtype")
        if weights == "bfloat16":
            yield Outcome(path, "bfloat16", f"the weights are ({path.removesuffix('compute_dtype')}dtype)")
        elif path == "model.compute_dtype" and _gathers_bfloat16(config):
            yield Outcome(path, "bfloat16", "the weights are gathered in it (placement.sharding.param_dtype)")
        else:
            device = _device_of(config, owner)
            if device is not None:
                choice = dtype_choice(device)
                yield Outcome(path, choice.dtype, choice.reason)


def dtype_paths(config: Any) -> list[str]:
    """The paths of the fields of the type `ComputeDtype`."""
    return [path for path, _, _ in _dtypes(config)]


def undecided_dtypes(config: Any) -> list[str]:
    """The paths of those that are `auto`."""
    return [path for path, value, _ in _dtypes(config) if value == AUTO]


def _dtypes(config: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path and value of each field of the type `ComputeDtype`, and the section or spec that it is a field of."""
    cls: type = type(config)
    for info in fields_of(cls):
        below = f"{path}{info.name}"
        value = getattr(config, info.name)
        if info.hint == ComputeDtype:
            yield below, value, config
        elif info.slot is not None and info.slot.many:
            for index, spec in enumerate(value):
                yield from _dtypes(spec, f"{below}.{index}.")
        elif value is not None and _has_fields(info):
            yield from _dtypes(value, f"{below}.")


def _has_fields(info: FieldInfo) -> bool:
    return info.slot is not None or info.section is not None


def _gathers_bfloat16(config: Any) -> bool:
    sharding = setting(setting(config, "placement"), "sharding")
    return bool(setting(sharding, "param_dtype") == "bfloat16")


def _device_of(config: Any, owner: Any) -> str | None:
    """The device that a section or spec computes on, by default that of the model; None if this machine lacks it, as
    the checks report."""
    device = setting(owner, "device") or setting(setting(config, "model"), "device", AUTO)
    if device == AUTO and setting(setting(config, "placement"), "gpus_per_rank"):
        return "cuda"  # of the ranks, which may run elsewhere
    try:
        check_device(device)
    except FieldError:
        return None
    return str(device)


# ---- fields that answer for themselves -------------------------------------------------------------------------------


def field_outcomes(config: Any) -> Iterator[Outcome]:
    """The outcomes that sections and specs know by themselves."""
    for path, owner in _auto_fields(config):
        answer = setting(owner, "auto_outcome")
        if path == "engine.transfer" and starts_servers(config.placement):
            known = _way_to_placed(config)
        else:
            known = None if answer is None else answer(path.rpartition(".")[2])
        if known is not None:
            yield Outcome(path, *known)


def _way_to_placed(config: Any) -> tuple[str, str] | None:
    """How new weights get to the servers that the placement starts, on one node and on several; None where they do not,
    as the checks report."""
    place = config.placement
    engine = config.engine
    rank = config.model.adapter_rank
    try:
        kind, reason = way_to_placed(place, engine, adapter_rank=rank)
    except FieldError:
        return None
    try:
        beyond, _ = way_to_placed(place, engine, adapter_rank=rank, elsewhere=True)
    except FieldError as error:
        return kind, f"{reason}; on several nodes engine.{error.field} {error.requirement}"
    if beyond != kind:
        reason = f"{reason}; {beyond} if they are on several nodes"
    return kind, reason


def environment_outcomes(config: Any) -> Iterator[Outcome]:
    """The outcomes of arguments of environments, which their kinds know."""
    for path, task in played_in(config).items():
        outcomes = _agent_outcomes(task) if agent_of(task) else _argument_outcomes(task)
        for name, known in outcomes:
            yield Outcome(f"{path}.environment.{name}", *known)


def _agent_outcomes(task: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Those of an agent, by the names of its recipe; none of one that can't be made, as the checks report."""
    given = dict(agent_of(task))
    cls: Any = agent_class(given.pop("kind"))
    with suppress(UserError):
        names = cls.read(given)[1]
        for name, known in make_agent(cls, given, "").auto_outcomes().items():
            first, _, below = name.partition(".")
            yield f"{names.get(first, first)}.{below}".removesuffix("."), known


def _argument_outcomes(task: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Those of an environment in the workers, whose class answers by `auto_outcome(argument)`."""
    given = world_of(task, "environment")
    cls: Any = environment_class(task)
    answer = setting(cls, "auto_outcome")
    if answer is None:
        return
    for name, parameter in inspect.signature(cls).parameters.items():
        value = parameter.default
        if isinstance(given, Mapping):
            value = given.get(name, value)
        known = answer(name) if value == AUTO else None
        if known is not None:
            yield name, known


def undecided(config: Any, known: Iterable[Outcome]) -> list[Outcome]:
    """The `auto` fields without one of the known outcomes, as `explain` shows them."""
    later = "decided when the run starts, by the model or the engine"
    return [Outcome(path, AUTO, later) for path, _ in _without(config, known)]


def unanswered(config: Any, known: Iterable[Outcome]) -> list[Outcome]:
    """Those of them whose class does not answer for its fields, as a run shows them."""
    silent = "its kind does not say what that becomes here"
    owners = _without(config, known)
    return [Outcome(path, AUTO, silent) for path, owner in owners if setting(owner, "auto_outcome") is None]


def _without(config: Any, known: Iterable[Outcome]) -> list[tuple[str, Any]]:
    paths = {outcome.path for outcome in known}
    plays = any(map(is_played, played_in(config).values()))
    fields = [(path, owner) for path, owner in _auto_fields(config) if path not in paths]
    return [(path, owner) for path, owner in fields if plays or not path.startswith("episode.")]


def _auto_fields(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path of each field that is `auto`, but for those of dtypes, and the section or spec that it is a field of."""
    owner: type = type(config)
    for info in fields_of(owner):
        below = f"{path}{info.name}"
        value = getattr(config, info.name)
        if value == AUTO and info.hint != ComputeDtype:
            yield below, config
        elif info.slot is not None and info.slot.many:
            for index, spec in enumerate(value):
                yield from _auto_fields(spec, f"{below}.{index}.")
        elif value is not None and _has_fields(info):
            yield from _auto_fields(value, f"{below}.")


# ---- of a model before its weights are loaded ------------------------------------------------------------------------


def model_outcomes(config: Any) -> Iterator[Outcome]:
    """The outcomes that follow from the files of a model on this machine, for `explain`: a run has them from the loaded
    model. Fields of what it can't read are left out, which the checks report."""
    model = config.model
    if local_place(model.path, model.revision) is None:  # asking the hub would take its time
        return
    with suppress(UserError):
        files = model.unloaded()
        if model.attention == AUTO:
            scalar = setting(config, "reward_model") is not None
            proof = proof_before_loading(files.config, model.max_length, scalar=scalar)
            attention = proof.attention(recompute=model.gradient_checkpointing)
            device = resolve_device(model.device)
            if attention == "packed" and not _shows_images(config):
                computes = compute_dtype(model.compute_dtype, model.device, DTYPES[model.dtype])
                attention = flash_path([head_dim_of(files.config)], device, computes) or attention
            yield attention_outcome(model, proof, attention, device)
        if setting(setting(config, "engine"), "decoder") == AUTO:
            proof = proof_before_loading(files.config, model.max_length)
            yield decoder_outcome(proof, images=_shows_images(config))
        played = [task for task in played_in(config).values() if is_played(task)]
        if played and config.episode.tool_format == AUTO:
            yield tool_format_outcome(files.tokenizer, config.data.template_arguments)


def _shows_images(config: Any) -> bool:
    return any(setting(task, "images") for task in tasks_of(config).values())


def attention_outcome(model: Any, proof: Proof, attention: str, device: torch.device) -> Outcome:
    """The attention that `auto` has chosen for a model, by its section, on a device, with what its proof says of it."""
    reason = proof.why(attention, device, recompute=model.gradient_checkpointing)
    return Outcome("model.attention", attention, reason)


def decoder_outcome(proof: Proof, *, images: bool) -> Outcome:
    """The decoder of the local engine for a model, and for prompts with `images`."""
    why = "it is not shown images" if images else supports(proof.twin)
    if why is None and first_proven(proof, fast=True) is FastDecoder:
        return Outcome("engine.decoder", "fast", "its log-probs are the model's own, as small copies prove")
    return Outcome("engine.decoder", "general", f"the fast one is not for this model: {why or 'its log-probs differ'}")


def tool_format_outcome(tokenizer: Any, arguments: Mapping[str, Any]) -> Outcome:
    """The format of tool calls that `auto` chooses for a tokenizer's chat template; raises as `format_of`."""
    return Outcome("episode.tool_format", format_of(tokenizer, arguments), why_format(tokenizer))


# ---- settling --------------------------------------------------------------------------------------------------------


def settled(
    config: Any, resolved: Resolved[Any] | None, outcomes: Sequence[Outcome]
) -> tuple[Any, Resolved[Any] | None]:
    """The config, and the same with provenance, with the outcomes of dtypes in place of `auto`."""
    sources = {outcome.path: f"auto: {outcome.reason}" for outcome in outcomes}
    return with_values(config, resolved, decided_dtypes(config, outcomes), sources)


def decided_dtypes(config: Any, outcomes: Iterable[Outcome]) -> dict[str, str]:
    """The values of those outcomes that are of dtypes, by path."""
    paths = set(dtype_paths(config))
    return {outcome.path: outcome.value for outcome in outcomes if outcome.path in paths}


def decided_on_gpus(config: Any) -> Any:
    """The config with the dtypes that `auto` becomes on GPUs, which nobody may have rented yet."""
    return with_values(config, None, dict.fromkeys(undecided_dtypes(config), "bfloat16"))[0]


def settled_as(config: Any, earlier: Any) -> Any:
    """The config with the dtypes that an earlier config has in place of `auto`: a comparison of the two then finds no
    difference that nobody has asked for."""
    return with_values(config, None, decided_in(earlier, config))[0]


def decided_in(earlier: Any, config: Any) -> dict[str, str]:
    """The dtypes that an earlier config, or the content of its file, has where this one says `auto`, by path. A model
    that was trained without an engine is sampled in the dtype of its training."""
    found: dict[str, str] = {}
    for path, value, _ in _dtypes(config):
        there = _at(earlier, path)
        if path == "engine.dtype" and there is None and _at(earlier, "engine") is None:
            there = engine_dtype(earlier)
        if value == AUTO and there in DECIDED:
            found[path] = there
    return found


def engine_dtype(written: Mapping[str, Any]) -> ComputeDtype:
    """The dtype in which the local engine samples the model of a run, from the content of its config.yaml: that of its
    own engine, else that of its training; `auto` if it names neither."""
    for path in ("engine.dtype", "model.compute_dtype"):
        for dtype in DECIDED:
            if _at(written, path) == dtype:
                return dtype
    return "auto"


def with_values(
    config: Any,
    resolved: Resolved[Any] | None,
    values: Mapping[str, Any],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Any, Resolved[Any] | None]:
    """The config, and the same with provenance, with other values at some paths, and where each comes from."""
    if not values:
        return config, resolved
    by_parts = {tuple(path.split(".")): value for path, value in values.items()}
    config = _replaced(config, by_parts)
    if resolved is None:
        return config, None
    entries = []
    for entry in resolved.entries:
        if entry.path in values:
            source = sources[entry.path]
            changed = {"value": values[entry.path], "source": source, "where": source}
            entry = replace(entry, **changed, origin="file", is_default=False)
        entries.append(entry)
    return config, replace(resolved, config=config, entries=tuple(entries))


def _replaced(value: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """A section, spec or sequence of specs with other values at some paths."""
    if () in values:
        return values[()]
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), new in values.items():
        below.setdefault(name, {})[tuple(rest)] = new
    changed = {name: _replaced(_child(value, name), inner) for name, inner in below.items()}
    if isinstance(value, Sequence):
        items = [changed.get(str(index), item) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return replace(value, **changed)


def _at(config: Any, path: str) -> Any:
    """The value at a path of a config, or of the content of its file; None if there is none."""
    for name in path.split("."):
        config = _child(config, name)
    return config


def _child(value: object, name: str) -> Any:
    """A field, or an entry of a mapping or sequence; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name.isdigit() and int(name) < len(value):
            return value[int(name)]
        return None
    return getattr(value, name, None)


# ---- the rest --------------------------------------------------------------------------------------------------------


def kernel_outcomes(config: Any) -> Iterator[Outcome]:
    """What the C++ kernels of a computation in bfloat16 on a CPU lack on this machine."""
    computed = {value for path, value, _ in _dtypes(config) if path in ("model.compute_dtype", "engine.dtype")}
    device = _device_of(config, None)
    if "bfloat16" not in computed or device is None or resolve_device(device).type != "cpu":
        return
    reason = unavailable()
    if reason is not None:
        yield Outcome("kernels", "eager torch", reason)
        return
    reason = unavailable(PRODUCTS)
    if reason is not None:
        yield Outcome("kernels", "C++ for training alone", reason)


# of a config in which the dtypes are decided
OUTCOMES: Sequence[Callable[[Any], Iterator[Outcome]]] = (kernel_outcomes, field_outcomes, environment_outcomes)
