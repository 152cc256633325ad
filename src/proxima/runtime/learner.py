"""The trained policy and what changes it. Everything here is called in the worker thread of the loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxima.data import Trajectory
from proxima.model import Policy
from proxima.runtime.algorithm import StepBatch
from proxima.runtime.worker_thread import Progress
from proxima.train import PolicyObjective, TrainStack, UpdateResult


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The weights, what updates them, and by which loss.

    Args:
        policy, stack, objective: the weights, the optimizer and all around it, and the loss.
        reference: the frozen policy that a penalty refers to; None: no penalty.
        recompute_proximal: compute the proximal log-probs before the updates (`proximal: recompute`); with one update
            per step, the update's own first forward gives them.
        updates: optimizer steps of a full batch; the learning rate schedule counts these.
    """

    policy: Policy
    stack: TrainStack
    objective: PolicyObjective
    reference: Policy | None = None
    recompute_proximal: bool = False
    updates: int = 1

    def update(self, batch: StepBatch, version: int, progress: Progress) -> UpdateResult:
        """Log-probs of the frozen policies, then the optimizer steps.

        Args:
            batch: what the step trains on.
            version: of the present weights.
            progress: called with (tokens done, tokens in all).
        """
        trajectories = self.with_log_probs(batch.trajectories)
        objective = replace(self.objective, current_version=version)
        return self.stack.update(objective, batch.updates, trajectories, progress, planned=self.updates)

    def with_log_probs(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the proximal and reference log-probs that the loss needs."""
        out = list(trajectories)
        if self.recompute_proximal and self.objective.proximal != "first_forward":
            values = self.stack.log_prob(out)
            out = [replace(item, proximal_log_prob=value) for item, value in zip(out, values, strict=True)]
        if self.reference is not None:
            values = self.stack.log_prob(out, self.reference)
            out = [replace(item, reference_log_prob=value) for item, value in zip(out, values, strict=True)]
        return out
