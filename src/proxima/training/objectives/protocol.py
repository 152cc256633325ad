"""The interface between the training stack and an objective."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from proxima.core.loss import Loss, require_valid
from proxima.core.metrics import Metrics
from proxima.data.columns import Bools, Floats
from proxima.data.flow import Key
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.data.transfer import HostCopies
from proxima.model.packed_model import TokenOutputs

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Per-token values of one trajectory from its first forward pass, for the Parquet files of rollouts.

    Args:
        log_prob: [T] float32, nats, of the current policy.
        keep: [T] bool, True if the loss kept the token.
        entropy: [T] float32, nats; None if it was not computed.
        proximal_log_prob: [T] float32, nats; None where it follows from the other columns.
        selected: [T] bool, True if the surrogate selected the token over the whole update; None if it does not select.
        top_k_divergence: [T] float32, for a surrogate that measures it by top-k; else None.
        updates_before: how many updates of the same call had moved the weights before this pass; None if unknown.
    """

    log_prob: Floats
    keep: Bools
    entropy: Floats | None = None
    proximal_log_prob: Floats | None = None
    selected: Bools | None = None
    top_k_divergence: Floats | None = None
    updates_before: int | None = None

    @classmethod
    def of_forward(cls, log_prob: Floats) -> "TokenStatistics":
        """The statistics of a trajectory that no update has used: none of its tokens is kept."""
        return cls(log_prob=log_prob, keep=np.zeros(len(log_prob), np.bool_), updates_before=0)


class Measured:
    """The token statistics of an update, copied to the host after each micro-batch, with a single wait at the end."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._parts: list[tuple[Sequence[Trajectory], Sequence[int], dict[str, Tensor]]] = []

    def add(self, trajectories: Sequence[Trajectory], batch: PackedBatch, columns: Mapping[str, Tensor]) -> None:
        """Add the columns [N] of a micro-batch of these trajectories; no effect without columns."""
        if columns:
            on_host = {name: self._copies.begin(values) for name, values in columns.items()}
            self._parts.append((trajectories, batch.tokens_of, on_host))

    def on_host(self) -> list[TokenStatistics]:
        """The statistics of each trajectory, in order.

        Raises:
            ValueError: a token is invalid, see `core.loss.require_valid`.
        """
        self._copies.wait()
        out: list[TokenStatistics] = []
        for trajectories, lengths, columns in self._parts:
            ends = np.cumsum(lengths)[:-1]
            split = {name: np.split(values.numpy(), ends) for name, values in columns.items()}
            for i, trajectory in enumerate(trajectories):
                statistics: dict[str, Any] = {name: values[i] for name, values in split.items()}
                codes = statistics.pop(INVALID, None)
                if codes is not None:
                    _require_valid(trajectory, codes, statistics)
                out.append(TokenStatistics(**statistics))
        return out


def _require_valid(trajectory: Trajectory, codes: Any, columns: Mapping[str, Any]) -> None:
    def value_of(name: str, at: int) -> float:
        column = columns[name] if name in columns else getattr(trajectory, name)
        if column is None:
            return math.nan
        return float(column[at])

    require_valid(codes, value_of, f"completion {trajectory.key}")


INVALID = "invalid"  # the column of `core.loss.invalid_tokens`
FirstForward = Sequence[tuple[Trajectory, TokenStatistics]]  # of an update's trajectories, under the weights before it


def loss_masks(items: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """The joined loss masks of trajectories, [N] bool, and the edges between them, [S+1] int64."""
    masks = [item.in_loss for item in items]
    joined = np.concatenate([np.empty(0, np.bool_), *masks])
    edges = np.cumsum([0, *map(len, masks)])
    return torch.from_numpy(joined), torch.from_numpy(edges)


class BatchStatistics(Protocol):
    """The outcome of `Objective.batch_statistics` for a whole update; its metrics are counted once."""

    @property
    def metrics(self) -> Metrics: ...

    def take(self, rows: Sequence[int]) -> Any:
        """The part for a micro-batch: its items' `rows`, in the order in which `batch_statistics` read all items.
        Neither the order nor the split of the micro-batches matters."""
        ...


class Objective(Protocol[Item]):
    """The loss to minimise. Subclass it to get the defaults; `PolicyObjective` is the objective of RL.

    An update is a list of items. Its loss is the sum over `losses` of numerator / denominator. Each denominator is that
    of the whole update and is known before the split into micro-batches, so no split changes a gradient.
    """

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs of the forward pass besides those that the model always gives: `entropy`, `entropy_gradient`,
        `top_k_gradient` (see `TokenOutputs`), `value`, `log_sum_square`, `expert_load`."""
        return frozenset()

    @property
    def has_batch_statistics(self) -> bool:
        """True if the loss depends on all tokens of an update; `batch_statistics` then runs before the split."""
        return False

    @property
    def statistics_outputs(self) -> frozenset[str]:
        """Like `outputs`, for the forward pass without gradient that `batch_statistics` reads."""
        return frozenset()

    def at_version(self, version: int) -> Self:
        """The objective of an update that starts from the weights of this version."""
        return self

    def items(self, trajectories: Sequence[Trajectory], updates: Sequence[Sequence[Key]]) -> list[list[Any]]:
        """The items of each update, which `updates` gives by the keys of its trajectories; by default the trajectories
        themselves."""
        by_key = {trajectory.key: trajectory for trajectory in trajectories}
        return [[by_key[key] for key in keys] for keys in updates]

    def sequences(self, item: Item) -> Sequence[Trajectory]:
        """The sequences of an item, which are adjacent in the packed batch and stay in one micro-batch. By default an
        item is a trajectory."""
        assert isinstance(item, Trajectory), f"{type(self).__name__}.sequences"
        return (item,)

    def statistics_sequences(self, item: Item) -> Sequence[Trajectory]:
        """The sequences of an item that `batch_statistics` reads."""
        return self.sequences(item)

    def skippable(self, item: Item) -> bool:
        """True if the item adds exactly zero to loss and gradient, so that its forward pass can be skipped. It still
        counts in the denominators."""
        return False

    def batch_statistics(self, parts: Sequence[tuple[PackedBatch, TokenOutputs]]) -> BatchStatistics:
        """Compute what depends on the whole update, from a forward pass over all its items that are not skipped; called
        if `has_batch_statistics` is true."""
        name = type(self).__name__
        raise NotImplementedError(f"{name}.batch_statistics")

    def denominators(self, items: Sequence[Item], statistics: Any = None) -> list[Tensor]:
        """[] float64, one for each loss, over the whole update; additive over ranks. 0 counts as 1. By default there is
        one loss, whose denominator is the number of items."""
        return [torch.tensor(float(len(items)), dtype=torch.float64)]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        """The losses of a micro-batch. Only their numerators are differentiated; `statistics` is the micro-batch's part
        of `batch_statistics`, None without."""
        ...

    def token_statistics(
        self, batch: PackedBatch, outputs: TokenOutputs, losses: Sequence[Loss]
    ) -> Mapping[str, Tensor]:
        """The fields of `TokenStatistics` for all tokens of the micro-batch, [N] each, on its device, and `INVALID` if
        tokens are still to be checked; by default none. They are copied to the host asynchronously."""
        return {}

    def measure_first(self, first: FirstForward, device: torch.device) -> Metrics:
        """Metrics of the first update's trajectories that were not skipped, from forward passes under the initial
        weights. One call serves the whole update, because many statistics are expensive per micro-batch."""
        return {}
