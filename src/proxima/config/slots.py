"""How a field of a config says that a preset may fill it, and the bounds that several configs check."""

import math
from dataclasses import dataclass
from typing import Any

from proxima.data import require
from proxima.data.slot import Slot as Slot

NO_DIRECTION = ("length", "length/mean", "truncated", "truncated_fraction")  # figures of evaluations


@dataclass(frozen=True)
class Presets:
    """Marks a field that a preset's name may fill: `algorithm: cppo`, or `{preset: cppo, ...overrides}`."""

    table: str


def require_at_least(config: Any, minimum: int, *fields: str, remedy: str = "") -> None:
    """Raise `FieldError` for the first of the fields that is below the minimum."""
    for name in fields:
        value = getattr(config, name)
        require(value >= minimum, name, value, f"must be >= {minimum}", remedy=remedy)


def require_evaluations(config: Any) -> None:
    """Raise `FieldError` for an `eval` section that ends the run on a plateau of figures that it does not measure."""
    measured = config.stop_after is None or (config.task is not None and config.every > 0)
    remedy = "set eval.task, and eval.every to the steps between two evaluations"
    require(measured, "stop_after", config.stop_after, "needs evaluations during the run", remedy=remedy)
    metric = config.stop_after and (config.stop_after.metric or getattr(config, "metric", None))
    name = next((name for name in NO_DIRECTION if f"/{metric}".endswith(f"/{name}")), None)
    bound, remedy = "is no better when it is higher", "name the accuracy, the reward or a reward"
    require(name is None, "stop_after.metric", metric, bound, remedy=remedy)


def require_stall_seconds(config: Any) -> None:
    """Raise `FieldError` for a time that a run never stalls for, or always."""
    value = config.stall_seconds
    usable = value == 0 or 1 <= value < math.inf
    require(usable, "stall_seconds", value, "must be finite and >= 1", remedy="0 never warns")


def require_plain_folder(folder: str | None) -> None:
    """Raise `FieldError` for a run folder that a terminal would obey."""
    plain = folder is None or folder.isprintable()
    require(plain, "folder", folder, "must not have control characters, which a terminal obeys")
