"""Forward passes of a step before its update: each fills columns of the trajectories."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from proxima.data import PackedBatch, Trajectory
from proxima.model import PackedModel
from proxima.model.lora import adapter_off


class ForwardStage(Protocol):
    """A forward pass without gradient over a step's completions; `TrainStack.fill` splits them into micro-batches.

    It runs once a step, in the compute thread, under the weights that the step starts with: before the advantages and
    over all completions with a score if the advantage names `column` in its `needs`, otherwise after the selection and
    over the completions that are trained.

    column: the field of `Trajectory`, [T] float32, that it fills; a column that is filled already stays. A stage that
        fills several names the one that tells whether it has run.
    """

    @property
    def column(self) -> str: ...

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """The batch for `__call__`, on its device; `PackedModel.pack` of the model that runs it."""
        ...

    def __call__(self, batch: PackedBatch) -> Tensor | Mapping[str, Tensor]:
        """[N] float32, one number for each response token; of a stage with several columns each by its name."""
        ...


@dataclass(frozen=True)
class LogProbStage:
    """Log-probs, nats, under a policy: `proximal_log_prob` of the trained one, `reference_log_prob` of a frozen one, or
    of the trained one without its adapter."""

    column: str
    policy: PackedModel
    adapter: bool = True

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        return self.policy.pack(trajectories)

    def __call__(self, batch: PackedBatch) -> Tensor:
        with nullcontext() if self.adapter else adapter_off(self.policy.model):
            return self.policy(batch).need("log_prob")
