"""A golden record, its numbers as tensors, and how two sets of numbers are compared."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from proxima.data import PolicyBatch, UserError

Json = Any


@dataclass(frozen=True)
class Check:
    """Ours against theirs; `rtol`, `atol` as `torch.allclose`. Both NaN (or null) counts as equal, as do equal
    infinities.

    Args:
        name: the expected leaf that `theirs` is, as `Record.leaves` calls it.
        ours: a tuple holds readings as good as each other: with the peer's own rounding, or without.
    """

    name: str
    ours: Any
    theirs: Any
    rtol: float = 1e-9
    atol: float = 1e-11

    @property
    def readings(self) -> tuple[Any, ...]:
        """Ours, and what is as good."""
        return self.ours if isinstance(self.ours, tuple) else (self.ours,)

    def error(self) -> float:
        """How far outside the tolerance, 0 when inside; infinite when the shapes differ."""
        return min(self._outside(ours) for ours in self.readings)

    def _outside(self, value: Any) -> float:
        ours, theirs = as_tensor(value), as_tensor(self.theirs)
        if ours.shape != theirs.shape:
            return float("inf")
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        gap = (ours - theirs).abs() - (self.atol + self.rtol * theirs.abs())
        gap = torch.where(same, torch.zeros_like(gap), torch.where(gap.isnan(), torch.inf, gap))
        return max(0.0, float(gap.max())) if gap.numel() else 0.0


Attempt = tuple[str | None, list[Check]]
"""What one reading of the record gives: the id of the peculiarity it imitates (None: our own definition) and the
comparisons."""


class Inputs(dict[str, Any]):
    """Inputs that remember which of them were looked at."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.seen.add(key)
        return super().get(key, default)

    @property
    def unread(self) -> list[str]:
        """The names nobody asked for."""
        return sorted(key for key in self if key not in self.seen)


@dataclass(frozen=True)
class Record:
    """One golden record. Non-finite floats are the strings 'nan', 'inf', '-inf' in the JSON."""

    name: str
    source: str
    dtype: str
    inputs: Inputs
    params: dict[str, Json]
    expected: dict[str, Json]

    @classmethod
    def of(cls, raw: dict[str, Json]) -> "Record":
        """Raises ValueError naming the key that is missing."""
        for key in ("name", "source", "dtype", "inputs", "params", "expected"):
            if key not in raw:
                raise UserError(f"golden record {raw.get('name', '?')!r} has no {key!r}.")
        for key in ("inputs", "params", "expected"):
            if not isinstance(raw[key], dict):
                raise UserError(
                    f"golden record {raw['name']!r}: {key!r} is a {type(raw[key]).__name__}, expected a mapping."
                )
        fields = {key: raw[key] for key in ("name", "source", "dtype", "params", "expected")}
        return cls(**fields, inputs=Inputs(raw["inputs"]))

    @cached_property
    def leaves(self) -> dict[str, Json]:
        """Everything expected, by its path: `loss`, `metrics.actor/ppo_kl`, `agg.token-mean.loss` …; a list is one
        leaf."""
        return dict(_leaves(self.expected, ""))

    def checks(
        self, ours: Mapping[str, Any], under: str = "metrics.", rtol: float = 1e-7, atol: float = 1e-10
    ) -> list[Check]:
        """A check for each of `ours` that the record expects, `under` before its name."""
        if self.single:
            rtol, atol = max(rtol, 2e-5), max(atol, 2e-6)
        found = {under + name: value for name, value in ours.items() if under + name in self.leaves}
        return [Check(leaf, value, self.leaves[leaf], rtol, atol) for leaf, value in found.items()]

    @property
    def single(self) -> bool:
        """True when the whole record is float32."""
        return self.dtype.strip().startswith("float32")

    def tensor(self, name: str) -> Tensor:
        """An input as float64, or float32 where the whole record is."""
        return as_tensor(self.inputs[name]).to(torch.float32 if self.single else torch.float64)

    def has(self, name: str) -> bool:
        """Whether the input is there."""
        return self.inputs.get(name) is not None

    def beside_the_point(self, *names: str) -> None:
        """These inputs reach no number of this record; they are no reason to call a failure unsupported."""
        self.inputs.seen.update(names)

    def batch(self, **fields: Tensor) -> "Padded":
        """The record's rows as a packed batch; `log_prob` gets a gradient."""
        return Padded.of(as_tensor(self.inputs["mask"]) != 0, **fields)

    def tolerance(self) -> dict[str, float]:
        """rtol and atol for losses and gradients of this record's dtype."""
        if self.single:
            return {"rtol": 2e-5, "atol": 2e-6}
        # verl divides a row by n + 1e-8 (P2): up to 1e-8 off for a row of one token.
        padded = self.params.get("loss_agg_mode") == "seq-mean-token-mean" and self.source.startswith("verl")
        return {"rtol": 2e-8, "atol": 1e-9} if padded else {"rtol": 1e-9, "atol": 1e-11}


@dataclass(frozen=True)
class Padded:
    """A packed batch with the way back to the record's [B, T] layout."""

    b: PolicyBatch
    leaf: Tensor
    mask: Tensor

    @classmethod
    def of(cls, mask: Tensor, **fields: Tensor) -> "Padded":
        leaf = fields.pop("log_prob").clone().requires_grad_()
        return cls(PolicyBatch.from_padded(mask, log_prob=leaf, **fields), leaf, mask)

    def gradient(self, loss: Tensor) -> Tensor:
        """[B, T] d loss / d log_prob."""
        (gradient,) = torch.autograd.grad(loss, self.leaf, retain_graph=True)
        return gradient

    def rows(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N] → [B, T], `fill` at padding."""
        out = torch.full(self.mask.shape, fill, dtype=torch.float64)
        rows = self.b.to_padded(values.detach().double(), fill)
        out[:, : rows.shape[1]] = rows
        return out


def _leaves(value: Json, path: str) -> Iterator[tuple[str, Json]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, child in value.items():
        yield from _leaves(child, f"{path}.{key}" if path else key)


def as_tensor(value: Json) -> Tensor:
    """Numbers of any nesting, with 'nan', 'inf' and None (NaN) among them, as float64."""
    return value.double() if isinstance(value, Tensor) else torch.tensor(_floats(value), dtype=torch.float64)


def _floats(value: Json) -> Json:
    return (
        [_floats(item) for item in value]
        if isinstance(value, list)
        else float("nan")
        if value is None
        else float(value)
    )


@dataclass(frozen=True)
class Verdict:
    """What a record showed.

    Args:
        status: `matched`; `differs`, on purpose, for the documented reason `reason`; `failed`; `unsupported`, nothing
            of ours computes this.
        reason: the peculiarity's id (P6, T1 …) for `differs`; what went wrong for `failed`; what is missing for
            `unsupported`.
        compared: the expected leaves that were compared.
    """

    name: str
    status: str
    reason: str | None = None
    compared: tuple[str, ...] = field(default=())


# Expected leaves that no function of ours could produce: a record is not `unsupported` for having them.
BESIDE: tuple[tuple[str, str], ...] = (
    (
        r"(.*[./])?(num_tokens|num_input_tokens_seen|step|global_step|epoch|learning_rate|lr)",
        "bookkeeping of the peer's trainer",
    ),
    (r"(.*[./])?(step_time|.*_seconds|timing.*|time|tokens_per_second)", "wall clock"),
    (r"(.*[./])?(comment|note|notes|version)", "text about the record"),
)


def uncovered(record: Record, compared: Iterable[str]) -> list[str]:
    """The expected leaves that no check looked at and that `BESIDE` does not excuse."""
    known = set(compared)
    return [
        leaf
        for leaf in record.leaves
        if leaf not in known and not any(re.fullmatch(pattern, leaf) for pattern, _ in BESIDE)
    ]


def closest(attempts: Sequence[Attempt]) -> list[Check]:
    """The reading with the fewest checks off; our own where it is as good as another."""
    return min(
        (checks for _, checks in attempts), key=lambda checks: sum(check.error() > 0 for check in checks), default=[]
    )


def judge(name: str, attempts: Iterable[Attempt]) -> Verdict:
    """Matched by the first attempt, differs by a later one, failed by none; `unsupported` where there is none. Stops at
    what fits."""
    seen: list[Attempt] = []
    for peculiarity, checks in attempts:
        seen.append((peculiarity, checks))
        if checks and all(check.error() == 0 for check in checks):
            status = "matched" if peculiarity is None else "differs"
            return Verdict(name, status, peculiarity, tuple(check.name for check in checks))
    nearest = closest(seen)
    off = sorted(((check.error(), check.name) for check in nearest if check.error() > 0), reverse=True)
    what = ", ".join(f"{label} off by {error:.3g}" for error, label in off[:3]) or "nothing to compare"
    return Verdict(name, "failed" if nearest else "unsupported", what, tuple(check.name for check in nearest))
