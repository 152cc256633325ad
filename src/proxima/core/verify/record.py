"""A golden record, its numbers as tensors, and how two sets of numbers are compared."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proxima.data import PolicyBatch

Json = Any


@dataclass(frozen=True)
class Check:
    """Ours against theirs; `rtol`, `atol` as `torch.allclose`. Both NaN counts as equal, as do equal infinities."""

    name: str
    ours: Any
    theirs: Any
    rtol: float = 1e-9
    atol: float = 1e-11

    def error(self) -> float:
        """How far outside the tolerance, 0 when inside; infinite when the shapes differ."""
        ours, theirs = as_tensor(self.ours), as_tensor(self.theirs)
        if ours.shape != theirs.shape:
            return float("inf")
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        gap = (ours - theirs).abs() - (self.atol + self.rtol * theirs.abs())
        gap = torch.where(same, torch.zeros_like(gap), torch.where(gap.isnan(), torch.inf, gap))
        return max(0.0, float(gap.max())) if gap.numel() else 0.0


Attempt = tuple[str | None, list[Check]]
"""What one reading of the record gives: the id of the peculiarity it imitates (None: our own definition) and the comparisons."""


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
                raise ValueError(f"golden record {raw.get('name', '?')!r} has no {key!r}.")
        for key in ("inputs", "params", "expected"):
            if not isinstance(raw[key], dict):
                raise ValueError(f"golden record {raw['name']!r}: {key!r} is a {type(raw[key]).__name__}, expected a mapping.")
        fields = {key: raw[key] for key in ("name", "source", "dtype", "params", "expected")}
        return cls(**fields, inputs=Inputs(raw["inputs"]))

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
        """These inputs feed only metrics that nobody compares; they are no reason to call a failure unsupported."""
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


def as_tensor(value: Json) -> Tensor:
    """Numbers of any nesting, with 'nan', 'inf' and None (NaN) among them, as float64."""
    return value.double() if isinstance(value, Tensor) else torch.tensor(_floats(value), dtype=torch.float64)


def _floats(value: Json) -> Json:
    return [_floats(item) for item in value] if isinstance(value, list) else float("nan") if value is None else float(value)


@dataclass(frozen=True)
class Verdict:
    """What a record showed.

    Args:
        status: `matched`; `differs`, on purpose, for the documented reason `reason`; `failed`; `unsupported`, nothing of ours computes
            this.
        reason: the peculiarity's id (P6, T1 …) for `differs`; what went wrong for `failed`; what is missing for `unsupported`.
        compared: the names that were compared.
    """

    name: str
    status: str
    reason: str | None = None
    compared: tuple[str, ...] = field(default=())


def judge(name: str, attempts: Iterable[Attempt]) -> Verdict:
    """Matched by the first attempt, differs by a later one, failed by none."""
    first: list[Check] = []
    iterator: Iterator[Attempt] = iter(attempts)
    for number, (peculiarity, checks) in enumerate(iterator):
        if number == 0:
            first = checks
        if checks and all(check.error() == 0 for check in checks):
            status = "matched" if peculiarity is None else "differs"
            return Verdict(name, status, peculiarity, tuple(check.name for check in checks))
    off = sorted(((check.error(), check.name) for check in first if check.error() > 0), reverse=True)
    what = ", ".join(f"{label} off by {error:.3g}" for error, label in off[:3]) or "nothing to compare"
    return Verdict(name, "failed", what, tuple(check.name for check in first))
