"""What may not change between a run and its resume: anything that would make the resumed run another run."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.data import FieldError
from proxima.runtime.journal import Journal

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig

# these change how long, how watched or where, not what is computed
FREE = (
    "folder",
    "train.steps",
    "eval",
    "checkpoint",
    "runtime",
    "model.device",
    "model.log_prob_chunk",
    "model.gradient_checkpointing",
    "engine.prefill_tokens",
    # a finished step did not depend on them: they say what ends a run
    "algorithm.dynamic_sampling.max_num_gen_batches",
    "algorithm.dynamic_sampling.exhausted",
)


def fixed_values(config: "RunConfig") -> dict[str, Any]:
    """Dotted path → JSON value of every field that a resume must bring again."""
    found: dict[str, Any] = {}
    _walk("", config, found)
    return {
        path: value
        for path, value in found.items()
        if not any(path == free or path.startswith(free + ".") for free in FREE)
    }


def check_resume(journal: Journal, config: "RunConfig") -> None:
    """Bind a new journal to the config, and hold a resumed one to it.

    Raises:
        ValueError: names the first field that differs, both values, and the remedy.
    """
    now = fixed_values(config)
    before = journal.get("config")
    if before is None:
        journal.set("config", now)
        return
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path) and not (
            path == "model.path" and _same_place(before.get(path), now.get(path))
        ):
            reason = f"differs from {before.get(path)!r}, with which the run in {journal.path.parent} was started"
            remedy = "resume with that value, or start another run with folder=PATH"
            raise FieldError(path, now.get(path), reason, remedy=remedy)


def schedule_note(journal: Journal, config: "RunConfig") -> str | None:
    """What a resume with another `train.steps` does to a learning rate that falls towards the last step; None: nothing
    to say."""
    begun, now = journal.get("steps"), config.train.steps
    if begun is None:
        journal.set("steps", now)
        return None
    if begun == now or config.train.schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was begun with {begun}: the {config.train.schedule} learning rate now "
        f"falls towards step {now}, "
        f"so from here on it is another than in a run of {now} steps from the beginning; train.schedule=constant "
        "has no such seam"
    )


def _same_place(first: Any, second: Any) -> bool:
    """True for two spellings of one existing path; `make demo` gives the model's as an absolute one, the recipe as a
    relative one."""
    return Path(first).exists() and Path(second).exists() and Path(first).samefile(second)


def _walk(path: str, value: Any, found: dict[str, Any]) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        found[f"{path}.kind" if path else "kind"] = type(value).__name__
        for field in fields(value):
            _walk(f"{path}.{field.name}" if path else field.name, getattr(value, field.name), found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _walk(f"{path}.{i}", item, found)
        found[f"{path}.length"] = len(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(f"{path}.{key}", item, found)
    else:
        # JSON has no infinity: it would come back as null and never be equal again
        plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        found[path] = value if plain else repr(value)
