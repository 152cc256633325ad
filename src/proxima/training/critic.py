"""The critic of a run: a separate model, or a head on the policy's trunk."""

from dataclasses import dataclass

from torch import nn

from proxima.data import NotFiniteError
from proxima.model.compute_thread import Progress
from proxima.model.packed_model import PackedModel
from proxima.training.advantage_stages import ValueStage
from proxima.training.batch_builder import TrainingBatch, split_into_updates
from proxima.training.objectives.value_objective import ValueObjective
from proxima.training.stack import TrainStack


@dataclass(frozen=True, kw_only=True)
class ValueHead:
    """A critic that shares the policy's trunk; the policy's stack trains it, with `objective` added to the policy's
    loss. See `Policy` for `layer`, `ValueStage` for `bootstrap`."""

    layer: nn.Linear
    objective: ValueObjective
    bootstrap: bool = True

    def stage(self, policy: PackedModel) -> ValueStage:
        """The forward pass that fills the values, by the policy that it shares."""
        return ValueStage(policy, self.bootstrap)


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A critic that is a separate `ScalarModel`, with its optimizer and loss. Called in the compute thread. `updates`,
    `epochs` and `seed` are those of `split_into_updates`."""

    stack: TrainStack
    objective: ValueObjective
    stage: ValueStage
    updates: int = 1
    epochs: int = 1
    seed: int = 0

    def update(self, batch: TrainingBatch, progress: Progress) -> dict[str, float]:
        """Make the optimizer steps of a step, over every completion with a score; return the metrics, empty without a
        completion.

        Raises:
            NotFiniteError: the critic diverges; see `TrainStack.update`.
        """
        groups, planned = [group.prompt.uid for group in batch.usable], self.updates * self.epochs
        updates = split_into_updates(
            batch.valued, groups, self.seed, batch.step, updates=self.updates, epochs=self.epochs
        )
        try:
            items = self.objective.items(batch.valued, updates)
            metrics = self.stack.update(self.objective, items, progress, planned).metrics
        except NotFiniteError as error:
            raise NotFiniteError(f"the critic: {error}") from error
        del metrics["loss"]  # the aggregate's; `value_loss` is the mean over the loss tokens, of a head too
        return {OWN_NAMES.get(name, name): value for name, value in metrics.items()} if updates else {}


OWN_NAMES = {name: f"value_{name}" for name in ("grad_norm", "lr")}  # the policy's stack has these too
