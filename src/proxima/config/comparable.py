"""Which fields of two configs may differ: for a resume, for a sweep that finds a run in its folder, for a comparison.

A field belongs to one class; a class says for which purposes its fields may differ. A field without a class may differ
for none: a new field is safe by default. To classify one: its path, or the section's, below its class.
"""

import math
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from proxima.config.describe import fields_of, kind_of
from proxima.config.scalars import to_json


class Purpose(Enum):
    """Why two configs are compared."""

    RESUME = auto()  # the run in the folder continues with this config
    CHANGE = auto()  # it continues with it as another run from there on, because the user accepts that
    RERUN = auto()  # the run in the folder is the one that a sweep would start
    CELL = auto()  # two runs are repetitions of one experiment
    ACCURACY = auto()  # two held-out accuracies were measured on the same questions in the same way


class FieldClass(Enum):
    """What a change of the field would change, and the purposes for which it may differ."""

    LABEL = frozenset(Purpose)  # a name, a place, or the use of the machine: never a result
    METHOD = frozenset({Purpose.CHANGE})  # how steps are made; a checkpoint fits any value
    CHECKPOINTED = frozenset[Purpose]()  # within a METHOD: what a checkpoint holds depends on it
    OPERATION = frozenset({Purpose.RESUME, Purpose.CELL})  # how a run is kept alive and stored
    PROGRESS = frozenset({Purpose.RESUME, Purpose.ACCURACY})  # how long it goes on, or when it is evaluated
    RESUMABLE = frozenset({Purpose.RESUME})  # no finished step depends on it: devices, chunk sizes, held-out questions
    REPLICATION = frozenset({Purpose.CELL})  # the repetitions of an experiment differ in it


FIELD_CLASSES: Mapping[str, FieldClass] = {
    "algorithm": FieldClass.METHOD,
    "algorithm.dynamic_sampling.exhausted": FieldClass.RESUMABLE,  # it says what ends a run
    "algorithm.dynamic_sampling.max_num_gen_batches": FieldClass.RESUMABLE,  # likewise
    "algorithm.mismatch": FieldClass.RESUMABLE,  # it says what a step does from now on, or what ends a run
    "algorithm.preset": FieldClass.LABEL,  # its fields are compared
    "checkpoint": FieldClass.OPERATION,
    "engine": FieldClass.METHOD,
    "engine.allow_remote": FieldClass.LABEL,
    "engine.away_seconds": FieldClass.OPERATION,
    "engine.call_seconds": FieldClass.OPERATION,
    "engine.chunk_tokens": FieldClass.OPERATION,
    "engine.health_seconds": FieldClass.OPERATION,
    "engine.idle_seconds": FieldClass.OPERATION,
    "engine.max_running": FieldClass.RESUMABLE,
    "engine.prefill_tokens": FieldClass.RESUMABLE,
    "engine.probe_bound": FieldClass.OPERATION,
    "engine.probe_tokens": FieldClass.OPERATION,
    "engine.restarts": FieldClass.OPERATION,
    "engine.retries": FieldClass.OPERATION,
    "engine.serve": FieldClass.OPERATION,  # where and how servers run: they are asked at each start what they are
    "engine.serve.arguments": FieldClass.METHOD,
    "engine.serve.dtype": FieldClass.METHOD,
    "engine.serve.log_probs": FieldClass.METHOD,
    "engine.threads": FieldClass.LABEL,
    "engine.timeout": FieldClass.OPERATION,
    "engine.token_env": FieldClass.LABEL,
    "engine.url": FieldClass.LABEL,
    "engine.weight_folder": FieldClass.LABEL,
    "engine.weight_seconds": FieldClass.OPERATION,
    "engine.weights": FieldClass.OPERATION,
    "eval": FieldClass.RESUMABLE,
    "eval.after": FieldClass.PROGRESS,
    "eval.before": FieldClass.PROGRESS,
    "eval.every": FieldClass.PROGRESS,
    "eval.metric": FieldClass.LABEL,
    "folder": FieldClass.LABEL,
    "model.device": FieldClass.RESUMABLE,
    "model.gradient_checkpointing": FieldClass.RESUMABLE,
    "model.log_prob_chunk": FieldClass.RESUMABLE,
    "reward": FieldClass.METHOD,
    "rollouts": FieldClass.RESUMABLE,  # the files are compared by content
    "monitor": FieldClass.LABEL,
    "runtime": FieldClass.METHOD,
    "runtime.max_concurrent_rollouts": FieldClass.CHECKPOINTED,
    "runtime.max_lag": FieldClass.CHECKPOINTED,
    "runtime.max_unscored_steps": FieldClass.OPERATION,
    "runtime.reward_timeout": FieldClass.OPERATION,
    "runtime.reward_memory_mb": FieldClass.OPERATION,
    "runtime.reward_workers": FieldClass.OPERATION,
    "runtime.rollout_retries": FieldClass.OPERATION,
    "runtime.stall_seconds": FieldClass.OPERATION,
    "runtime.threads": FieldClass.LABEL,
    "sampling": FieldClass.METHOD,
    "seed": FieldClass.REPLICATION,
    "train": FieldClass.METHOD,
    "train.completions_per_prompt": FieldClass.CHECKPOINTED,
    "train.epochs": FieldClass.PROGRESS,
    "train.optimizer.kind": FieldClass.CHECKPOINTED,
    "train.steps": FieldClass.PROGRESS,
}
ABSENT = object()  # stands for the value of a field that one of the two configs lacks


def may_differ(path: str, purpose: Purpose) -> bool:
    """Whether two configs may differ in the field at a dotted path; the longest entry of `FIELD_CLASSES` decides."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (found := FIELD_CLASSES.get(".".join(parts[:end]))) is not None:
            return purpose in found.value
    return False


def compared(values: Mapping[str, Any], purpose: Purpose) -> dict[str, Any]:
    """The values, by dotted path, that must be equal."""
    return {path: value for path, value in values.items() if not may_differ(path, purpose)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], purpose: Purpose) -> Iterator[tuple[str, Any, Any]]:
    """Each field that differs and may not: path, value before, value now; `ABSENT` where one side lacks the field."""
    first, second = compared(before, purpose), compared(now, purpose)
    for path in dict.fromkeys([*second, *first]):
        pair = first.get(path, ABSENT), second.get(path, ABSENT)
        if pair[0] != pair[1] and not (path == "model.path" and _same_place(*pair)):
            yield path, *pair


def flat_values(config: Any) -> dict[str, Any]:
    """Dotted path → JSON value of every field of a config, the kind for a spec; no float is infinite or NaN."""
    return dict(_flat("", config))


def _flat(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    cls: type = type(config)
    for info in fields_of(cls):
        below, value = f"{path}{info.name}", getattr(config, info.name)
        if info.slot is not None and info.slot.many:
            yield below, [kind_of(spec, info.slot.table) for spec in value]
            for index, spec in enumerate(value):
                yield from _flat(f"{below}.{index}.", spec)
        elif value is not None and (info.slot or info.section):
            if info.slot is not None:
                yield f"{below}.kind", kind_of(value, info.slot.table)
            yield from _flat(f"{below}.", value)
        else:
            yield below, _finite(to_json(value))


def _finite(value: Any) -> Any:
    """JSON has no infinity: it would be read back as null and never be equal again."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    known = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else repr(value)


def _same_place(first: Any, second: Any) -> bool:
    """True for two spellings of one existing path, an absolute and a relative one."""
    places = [Path(place) for place in (first, second) if isinstance(place, str)]
    return len(places) == 2 and all(place.exists() for place in places) and places[0].samefile(places[1])
