"""The objective of a critic: moves its value at each loss token towards the `returns` of the trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from proxima.core.aggregate import TokenMean
from proxima.core.loss import Aggregate, Loss
from proxima.core.metrics import SumCount
from proxima.core.value import ValueLoss
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.packed_model import TokenOutputs
from proxima.training.objectives.protocol import Objective, loss_masks


@dataclass(frozen=True, kw_only=True)
class ValueObjective(Objective[Trajectory]):
    """`ValueLoss` over whole updates, for a separate model or a head on the policy.

        coefficient · aggregate(loss_t),    loss_t of V_t against the `value` at rollout time and `returns`

    Args:
        loss: the loss of a token.
        aggregate: from tokens to one number; its denominator is that of the loss tokens, whatever the policy's is.
        coefficient: weight of the loss relative to the policy's, > 0; for a separate model it only scales the gradient.

    Metrics: `value_loss` (mean over the loss tokens, before the coefficient) and those of `ValueLoss`.
    """

    loss: ValueLoss = field(default_factory=ValueLoss)
    aggregate: Aggregate = field(default_factory=TokenMean)
    coefficient: float = 1.0

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"value"})

    def denominators(self, items: Sequence[Trajectory], statistics: Any = None) -> list[Tensor]:
        return [self.aggregate.denominator(*loss_masks(items))]

    def losses(self, batch: PackedBatch, outputs: TokenOutputs, statistics: Any = None) -> list[Loss]:
        if batch.value is None or batch.returns is None:
            raise ValueError("the loss of a critic needs `value` and `returns` in every trajectory.")
        value = outputs.need("value")
        loss, metrics = self.loss(value, batch.value, batch.returns, batch.loss_mask)
        metrics |= {"value_loss": SumCount.over(loss, batch.loss_mask)}
        tokens = batch.policy_batch(value.detach())  # an aggregate reads masks and sequences alone
        denominator = self.aggregate.denominator(batch.loss_mask, batch.cu_seqlens)
        return [Loss(self.coefficient * self.aggregate(loss, tokens), denominator, metrics)]
