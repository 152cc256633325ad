"""Our numbers compared with a record's, and the verdict on them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Record

Status = Literal["matched", "differs", "failed", "unsupported"]


@dataclass(frozen=True)
class Difference:
    """A quantity outside its tolerance: the element that is farthest off, at index `at`."""

    field: str
    ours: Any
    expected: Any
    difference: float
    at: list[int]

    @classmethod
    def of(cls, check: Check) -> "Difference":
        if isinstance(check.ours, tuple):
            value = check.ours[0]
        else:
            value = check.ours
        ours = as_tensor(value)
        theirs = as_tensor(check.theirs)
        if ours.shape != theirs.shape:
            return cls(check.name, f"shape {list(ours.shape)}", f"shape {list(theirs.shape)}", float("inf"), [])
        far = check.distance(ours, theirs)
        at = [int(i) for i in torch.unravel_index(far.flatten().argmax(), far.shape)]
        here = tuple(at)
        return cls(check.name, float(ours[here]), float(theirs[here]), float(far[here]), at)


@dataclass(frozen=True)
class RecordVerdict:
    """The verdict on a record.

    Args:
        status: `matched`; `differs`, on purpose, for the documented `reason`; `failed`; `unsupported`: no code of ours
            computes this.
        reason: the ids of the peculiarities (`P6`; `P16, P21` if both are needed) for `differs`; the error or the worst
            differences for `failed`; the missing part for `unsupported`.
        compared: the expected leaves that were compared.
        differences: the quantities of a failed record that are outside their tolerance.
    """

    name: str
    status: Status
    reason: str | None = None
    compared: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


# Expected leaves (by the last part of the path) that we never compute; they don't make a record unsupported.
NOT_COMPARED: tuple[tuple[str, str], ...] = (
    (r"num_tokens|num_input_tokens_seen|step|global_step|epoch|learning_rate|lr", "bookkeeping of the peer's trainer"),
    (r"step_time|.*_seconds|timing.*|time|tokens_per_second", "wall clock"),
    (r"comment|note|notes|version", "text about the record"),
)


def uncovered(record: Record, compared: Iterable[str]) -> list[str]:
    """The expected leaves that no check compares and that `NOT_COMPARED` does not excuse."""
    excused = re.compile(rf"(.*[./])?({'|'.join(pattern for pattern, _ in NOT_COMPARED)})")
    return [leaf for leaf in record.leaves if leaf not in set(compared) and not excused.fullmatch(leaf)]


def closest(attempts: Sequence[Attempt]) -> list[Check]:
    """The checks of the attempt with the fewest failures; on a tie, of our own."""
    return min((checks for _, checks in attempts), key=lambda checks: sum(c.error > 0 for c in checks), default=[])


def judge(name: str, attempts: Iterable[Attempt]) -> RecordVerdict:
    """The verdict of the first attempt that fits: matched if it is our own, else differs; failed if none fits."""
    tried: list[Attempt] = []
    for peculiarity, checks in attempts:
        tried.append((peculiarity, checks))
        if checks and all(check.error == 0 for check in checks):
            status: Status = "matched" if peculiarity is None else "differs"
            return RecordVerdict(name, status, peculiarity, tuple(check.name for check in checks))
    nearest = closest(tried)
    compared = tuple(check.name for check in nearest)
    wrong = sorted((check for check in nearest if check.error), key=lambda check: check.error, reverse=True)
    text = ", ".join(f"{check.name} off by {check.error:.3g}" for check in wrong[:3]) or "nothing to compare"
    differences = tuple(Difference.of(check) for check in nearest if check.error)
    status = "failed" if nearest else "unsupported"
    return RecordVerdict(name, status, text, compared, differences)
