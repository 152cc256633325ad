"""A golden record, its numbers as tensors, and their comparison with ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from proxima.data import UserError
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.by_hand import as_tensor, leaves, padded_to
from proxima_peers.verify.record_steps import SLOTS

BY_HAND = "by hand"
Tolerance = tuple[float, float]  # rtol and atol, as `torch.allclose`
DOUBLE: Tolerance = (1e-9, 1e-11)
SINGLE: Tolerance = (2e-5, 2e-6)  # the smallest tolerance for a record in float32


class UnsupportedRecord(Exception):
    """No code of ours computes this record; the message contains the reason."""


@dataclass(frozen=True)
class Check:
    """Ours compared with theirs; `rtol`, `atol` as in `torch.allclose`. NaN (or null) and infinities equal themselves.

    Args:
        name: the name of the expected leaf `theirs` in `Record.leaves`.
        ours: a value, or a tuple of equally valid ones: with the peer's own rounding, or without.
        scale: the sum of the magnitudes that cancel in the result; `rtol` applies to it if it exceeds the result.
        where: [B, T] bool, the positions that both define; none: all.
    """

    name: str
    ours: Any
    theirs: Any
    rtol: float = 1e-9
    atol: float = 1e-11
    scale: float = 0.0
    where: Tensor | None = None

    @cached_property
    def error(self) -> float:
        """The distance from the tolerance, 0 inside it; infinite if the shapes differ."""
        if isinstance(self.ours, tuple):
            candidates = self.ours
        else:
            candidates = (self.ours,)
        return min(self._outside(as_tensor(value)) for value in candidates)

    def _outside(self, ours: Tensor) -> float:
        theirs = as_tensor(self.theirs)
        if ours.shape != theirs.shape:
            return float("inf")
        allowed = self.atol + self.rtol * theirs.abs().nan_to_num(nan=0.0, posinf=0.0).clamp(min=self.scale)
        if ours.numel():
            return max(0.0, float((self.distance(ours, theirs) - allowed).max()))
        return 0.0

    def distance(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """|ours − theirs|; 0 where both are NaN, the same infinity or undefined, infinite where only one is NaN."""
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if self.where is not None:
            same = same | ~self.where
        return torch.where(same, 0.0, (ours - theirs).abs().nan_to_num(nan=torch.inf))


# One interpretation of a record: the peculiarity that it reproduces (None: our own definition), and its checks.
Attempt = tuple[str | None, list[Check]]


class Tracked(dict[str, Any]):
    """Inputs or options that track which of them were read, including nested ones."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        for key, value in given.items():
            self[key] = Tracked(value) if isinstance(value, dict) else value
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """`dict.get`, marking the key as read."""
        self.seen.add(key)
        return super().get(key, default)

    def section(self, name: str) -> "Tracked":
        """The options nested in another one; empty if it is absent or null."""
        options = self.get(name)
        if isinstance(options, Tracked):
            return options
        return Tracked({})

    def mark_irrelevant(self, *names: str) -> None:
        """Mark names, dotted if nested, as read because they affect no number of this record."""
        for name in names:
            own, dot, inside = name.partition(".")
            self.seen.add(own)
            if dot:
                self.section(own).mark_irrelevant(inside)

    def read(self) -> dict[str, Any]:
        """The whole content, marked as read."""
        self.seen.update(self)
        whole = {}
        for key, value in self.items():
            whole[key] = value.read() if isinstance(value, Tracked) else value
        return whole

    @property
    def unread(self) -> list[str]:
        """The names that were never read, dotted if nested."""
        names = {key for key in self if key not in self.seen}
        for key in self.seen & self.keys():
            names |= {f"{key}.{name}" for name in self.section(key).unread}
        return sorted(names)


KEYS = ("name", "source", "dtype", "inputs", "params", "expected", "layout")


@dataclass(frozen=True)
class Record:
    """One golden record. Non-finite floats are the strings 'nan', 'inf', '-inf' in the JSON."""

    name: str
    source: str
    dtype: str
    inputs: Tracked
    params: Tracked
    expected: dict[str, Any]
    unknown: tuple[str, ...] = ()  # keys that are not in `KEYS`

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "Record":
        """A record as read from JSON. One whose source is "by hand" names our specs by slot instead of `params`.

        Raises:
            UserError: a key is missing, or is neither text nor a mapping, as it must be; names the key.
        """
        keys: tuple[str, ...] = KEYS
        if raw.get("source") in ("hand", BY_HAND):
            keys = (*KEYS, *SLOTS)
            specs = {slot: raw[slot] for slot in SLOTS if slot in raw}
            raw = {"dtype": "float64", **raw, "source": BY_HAND, "params": specs}
        for key in ("name", "source", "dtype", "inputs", "params", "expected"):
            if key not in raw:
                raise UserError(f"golden record {raw.get('name', '?')!r} has no {key!r}")
            wanted: type = dict
            what = "a mapping"
            if key in ("name", "source", "dtype"):
                wanted = str
                what = "text"
            if not isinstance(raw[key], wanted):
                kind = type(raw[key]).__name__
                raise UserError(f"golden record {raw['name']!r}: {key!r} is a {kind}, expected {what}")
        fields = {key: raw[key] for key in ("name", "source", "dtype", "expected")}
        unknown = tuple(sorted(set(raw) - set(keys)))
        return cls(**fields, inputs=Tracked(raw["inputs"]), params=Tracked(raw["params"]), unknown=unknown)

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """The expected values by path: `loss`, `metrics.actor/ppo_kl`, `agg.token-mean.loss` …; a list is one leaf."""
        return leaves(self.expected)

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] bool, the input `mask`."""
        return as_tensor(self.inputs["mask"]) != 0

    def checks(
        self,
        ours: Mapping[str, Any],
        under: str = "metrics.",
        rtol: float = 2e-7,
        atol: float = 1e-10,
        where: Tensor | None = None,
    ) -> list[Check]:
        """A check for each value in `ours` that the record expects under that name with the prefix `under`.

        Shares of tokens or rows are float32 in all peers.
        """
        expected = {under + name: value for name, value in ours.items() if under + name in self.leaves}
        return [self.expect(leaf, value, rtol, atol, where=where) for leaf, value in expected.items()]

    def expect(
        self,
        name: str,
        ours: Any,
        rtol: float = 1e-9,
        atol: float = 1e-11,
        *,
        scale: float = 0.0,
        where: Tensor | None = None,
    ) -> Check:
        """A check of a leaf that the record must contain, with float32's tolerance if the whole record is float32;
        `scale` and `where` as in `Check`."""
        if self.single:
            rtol = max(rtol, SINGLE[0])
            atol = max(atol, SINGLE[1])
        return Check(name, ours, self.leaves[name], rtol, atol, scale, where)

    def loss_checks(
        self, value: Tensor, leaf: Tensor, gradient: str = "grad_logp", tolerance: Tolerance | None = None
    ) -> list[Check]:
        """A check of the loss, and one of d value / d leaf, which the record calls `gradient`.

        The terms of the loss have either sign, and each is about as large as its gradient times max(1, |leaf|).
        """
        if tolerance is None:
            tolerance = self.tolerance()
        (slope,) = torch.autograd.grad(value, leaf, retain_graph=True)
        scale = float((slope.abs() * leaf.detach().abs().clamp(min=1)).nan_to_num().sum())
        loss = self.expect("loss", value.detach(), *tolerance, scale=scale)
        return [loss, self.expect(gradient, slope, *tolerance)]

    @property
    def single(self) -> bool:
        """True when the whole record is float32."""
        return self.dtype.strip().startswith("float32")

    def tensor(self, name: str) -> Tensor:
        """An input as float64, or float32 where the whole record is."""
        dtype = torch.float32 if self.single else torch.float64
        return as_tensor(self.inputs[name]).to(dtype)

    def has(self, name: str) -> bool:
        """Return True if the record has the input."""
        return self.inputs.get(name) is not None

    def batch(self, **fields: Tensor) -> "Padded":
        """The record's rows as a packed batch; `log_prob` gets a gradient."""
        return Padded.of(self.mask, **fields)

    def actor_batch(self, **fields: Tensor) -> "Padded":
        """`batch` with the policy's and the behavior policy's log-probs and the advantages."""
        names = {"log_prob": "logp", "behavior_log_prob": "behavior_logp", "advantage": "advantages"}
        return self.batch(**{field: self.tensor(name) for field, name in names.items()}, **fields)

    def tolerance(self) -> Tolerance:
        """rtol and atol for losses and gradients of this record."""
        if not self.source.startswith("verl"):
            return DOUBLE
        # verl divides rows, and the weights of a batch, by n + 1e-8 (P2, P10, P31): 1e-8 off for a single token.
        correction = self.params.section("policy_loss").section("rollout_correction")
        if self.params.get("loss_mode") == "geo_mean" or correction.get("rollout_is_batch_normalize"):
            return 1e-7, 1e-11
        padded = self.params.get("loss_agg_mode") == "seq-mean-token-mean"
        return (2e-8, 1e-11) if padded else DOUBLE


@dataclass(frozen=True)
class Padded:
    """A packed batch, and the conversion back to the record's [B, T] layout."""

    b: PolicyBatch
    leaf: Tensor
    mask: Tensor

    @classmethod
    def of(cls, mask: Tensor, **fields: Tensor) -> "Padded":
        leaf = fields.pop("log_prob").clone().requires_grad_()
        return cls(PolicyBatch.from_padded(mask, log_prob=leaf, **fields), leaf, mask)

    def rows(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[N] → [B, T], `fill` at padding."""
        return padded_to(self.b, values, self.mask.shape, fill)
