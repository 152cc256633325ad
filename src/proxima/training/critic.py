"""The critic of a run, a separate model or a head on the policy's trunk: its loss, its forward pass and its updates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from proxima.core.aggregate import TokenMean
from proxima.core.loss import Aggregate, Loss
from proxima.core.metrics import SumCount
from proxima.core.value import ValueLoss
from proxima.data import NotFiniteError
from proxima.data.packed_batch import PackedBatch
from proxima.data.trajectory import Trajectory
from proxima.model.compute_thread import Progress
from proxima.model.packed_model import PackedModel, TokenOutputs
from proxima.training.batch_builder import TrainingBatch, split_into_updates
from proxima.training.forward_stage import ForwardStage
from proxima.training.objectives.protocol import Objective, loss_masks
from proxima.training.stack import TrainStack


@dataclass(frozen=True, kw_only=True)
class ValueObjective(Objective[Trajectory]):
    """`ValueLoss` over whole updates, for a separate model or a head on the policy.

        coefficient · aggregate(loss_t),    loss_t of V_t against `value`, from before the step's updates, and `returns`

    Args:
        loss: the loss of a token.
        aggregate: reduces tokens to one number; its denominator counts the loss tokens, whatever the policy's does.
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


@dataclass(frozen=True)
class ValueStage(ForwardStage):
    """Fills `value` from a model with a scalar head, the critic.

    bootstrap: also fill `bootstrap` of truncated completions, from the state after the last token; otherwise it stays
        0.
    """

    model: PackedModel
    bootstrap: bool = True
    column: str = "value"

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        bare: list[Trajectory] = []
        for item in trajectories:
            if self.bootstrap and item.truncated:
                bare.append(item.with_sentinel())
            else:
                bare.append(item.bare())
        return self.model.pack(bare)

    def __call__(self, batch: PackedBatch) -> Tensor:
        return self.model.values(batch)


@dataclass(frozen=True, kw_only=True)
class ValueHead:
    """A critic that shares the policy's trunk. The policy's stack trains it, with `objective` added to the policy's
    loss. `layer` is `Policy.value_head`; see `ValueStage` for `bootstrap`."""

    layer: nn.Linear
    objective: ValueObjective
    bootstrap: bool = True

    def stage(self, policy: PackedModel) -> ValueStage:
        """The forward pass that fills the values, by the policy that it shares."""
        return ValueStage(policy, self.bootstrap)


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A critic that is a separate `ScalarModel`, with its optimizer and loss. Called in the compute thread. See
    `split_into_updates` for `updates`, `epochs` and `seed`."""

    stack: TrainStack
    objective: ValueObjective
    stage: ValueStage
    updates: int = 1
    epochs: int = 1
    seed: int = 0

    def update(self, batch: TrainingBatch, progress: Progress) -> dict[str, float]:
        """Make the critic's optimizer steps over all completions with `returns`; return the metrics, empty if there are
        no such completions.

        Raises:
            NotFiniteError: the critic diverged, see `TrainStack.update`.
        """
        groups = [group.prompt.uid for group in batch.usable]
        planned = self.updates * self.epochs
        updates = split_into_updates(
            batch.valued, groups, self.seed, batch.step, updates=self.updates, epochs=self.epochs
        )
        try:
            items = self.objective.items(batch.valued, updates)
            metrics = self.stack.update(self.objective, items, progress, planned).metrics
        except NotFiniteError as error:
            raise NotFiniteError(f"the critic: {error}") from error
        del metrics["loss"]  # the aggregate's; `value_loss` is the mean over the loss tokens, of a head too
        if updates:
            return {OWN_NAMES.get(name, name): value for name, value in metrics.items()}
        return {}


OWN_NAMES = {name: f"value_{name}" for name in ("grad_norm", "lr")}  # the policy's stack has these too
