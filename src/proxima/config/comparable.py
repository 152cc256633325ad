"""The fields in which two configs may differ: when a run is resumed, when a sweep finds a run in its folder, and when
runs are compared.

A field belongs to one class; a class says for which purposes its fields may differ. A field without a class may differ
for none: a new field is safe by default. To classify one: add its path, or the section's, to its class.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from proxima.config.describe import fields_of, kinds_of
from proxima.config.scalars import to_json
from proxima.task.template import to_json_value


class Purpose(Enum):
    """The purpose for which two configs are compared."""

    RESUME = auto()  # the run in the folder continues with this config
    CHANGE = auto()  # the same, but as another run from there on, because the user accepts the change
    RERUN = auto()  # the run in the folder is the one that a sweep would start
    CELL = auto()  # two runs are repetitions of one experiment
    ACCURACY = auto()  # two held-out accuracies were measured on the same questions in the same way


class FieldClass(Enum):
    """The effect of changing a field, and the purposes for which it may differ."""

    LABEL = frozenset(Purpose)  # a name, a place, or the use of the machine: never affects a result
    METHOD = frozenset({Purpose.CHANGE})  # how steps are computed; a checkpoint fits any value
    CHECKPOINTED = frozenset[Purpose]()  # within a METHOD: the content of a checkpoint depends on it
    OPERATION = frozenset({Purpose.RESUME, Purpose.CELL})  # how a run is kept alive and stored
    PROGRESS = frozenset({Purpose.RESUME, Purpose.ACCURACY})  # how long a run is, or when it is evaluated
    RESUMABLE = frozenset({Purpose.RESUME})  # no finished step depends on it: devices, chunk sizes, held-out questions
    REPLICATION = frozenset({Purpose.CELL})  # the repetitions of an experiment differ in it


_PATHS: Mapping[FieldClass, str] = {
    FieldClass.LABEL: """algorithm.preset engine.allow_remote engine.threads engine.token_env engine.url
        engine.transfer engine.weight_folder eval.metric folder monitor placement runtime.threads view""",
    FieldClass.METHOD: """algorithm engine engine.serve.arguments engine.serve.dtype engine.serve.log_probs reward
        runtime sampling train""",
    FieldClass.CHECKPOINTED: """runtime.max_concurrent_rollouts runtime.max_lag train.completions_per_prompt
        train.optimizer.kind""",
    # `engine.serve` says where and how servers run; their capabilities are queried at each start
    FieldClass.OPERATION: """checkpoint engine.away_seconds engine.call_seconds engine.chunk_tokens
        engine.health_seconds engine.idle_seconds engine.probe_bound engine.probe_tokens engine.restarts engine.retries
        engine.serve engine.timeout engine.weight_seconds runtime.max_unscored_steps
        runtime.reward_timeout runtime.reward_memory_mb runtime.reward_trial runtime.reward_workers
        runtime.stall_seconds""",
    FieldClass.PROGRESS: "eval.after eval.before eval.every train.epochs train.steps",
    # conditions that end a run, and settings of later steps; `rollouts`: the files are compared by content
    FieldClass.RESUMABLE: """algorithm.dynamic_sampling.exhausted algorithm.dynamic_sampling.max_num_gen_batches
        algorithm.mismatch engine.max_running engine.prefill_tokens eval model.compile model.device
        model.gradient_checkpointing model.log_prob_chunk placement.sharding rollouts""",
    FieldClass.REPLICATION: "data.template_date seed",
}
FIELD_CLASSES = {path: kind for kind, paths in _PATHS.items() for path in paths.split()}
ABSENT = object()  # the value of a field that one of the two configs lacks


def may_differ(path: str, purpose: Purpose) -> bool:
    """True if two configs may differ in the field at a dotted path; the longest entry of `FIELD_CLASSES` decides."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        field_class = FIELD_CLASSES.get(".".join(parts[:end]))
        if field_class is not None:
            return purpose in field_class.value
    return False


def compared(values: Mapping[str, Any], purpose: Purpose) -> dict[str, Any]:
    """The values that must be equal, by dotted path."""
    return {path: value for path, value in values.items() if not may_differ(path, purpose)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], purpose: Purpose) -> Iterator[tuple[str, Any, Any]]:
    """Yield fields that differ but must not: path, value before, value now; `ABSENT` on a side without the field."""
    first = compared(before, purpose)
    second = compared(now, purpose)
    for path in dict.fromkeys([*second, *first]):
        pair = first.get(path, ABSENT), second.get(path, ABSENT)
        if path == "data.template_date" and (pair[0] is ABSENT or pair[1] is None):
            continue  # the date is that of the run
        if pair[0] != pair[1] and not (path == "model.path" and _same_place(*pair)):
            yield path, *pair


def flat_values(config: Any) -> dict[str, Any]:
    """Dotted path → JSON value of every field of a config, the kind for a spec; no float is infinite or NaN."""
    return dict(_flat("", config))


def _flat(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    cls: type = type(config)
    for info in fields_of(cls):
        below = f"{path}{info.name}"
        value = getattr(config, info.name)
        if info.slot is not None and info.slot.many:
            yield below, [kinds_of(info.slot).kind_of(spec) for spec in value]
            for index, spec in enumerate(value):
                yield from _flat(f"{below}.{index}.", spec)
        elif value is not None and (info.slot or info.section):
            if info.slot is not None:
                yield f"{below}.kind", kinds_of(info.slot).kind_of(value)
            yield from _flat(f"{below}.", value)
        else:
            yield below, to_json_value(to_json(value))  # infinity would be read back as null


def _same_place(first: object, second: object) -> bool:
    """True for two spellings of one existing path, such as an absolute and a relative one."""
    if not isinstance(first, str) or not isinstance(second, str):
        return False
    if not Path(first).exists() or not Path(second).exists():
        return False
    return Path(first).samefile(second)
