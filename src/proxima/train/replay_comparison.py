"""Measures the benefit of routing replay in a run: engine against trainer on some sequences of each step, with and
without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxima.core.correction import mismatch_metrics
from proxima.data import Trajectory
from proxima.data.columns import Floats
from proxima.data.flow import Key
from proxima.model.compute_thread import Progress
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.train.batch_builder import TrainingBatch
from proxima.train.learner import Learner
from proxima.train.objectives.policy_objective import first_forward
from proxima.train.objectives.protocol import Objective, TokenStatistics, loss_tokens
from proxima.train.stack import TrainStack, UpdateResult

SHARE = 16  # at most one token in this many is fed again, without a backward pass: some 2 % of an update
KEPT = ("k3_kl", "log_prob_absdiff_mean")  # of the mismatch metrics, under `routing/replay_…` and `routing/no_replay_…`


@dataclass(frozen=True)
class ReplayComparison:
    """The first sequences of an update, as many as fit in a micro-batch and in 1/`SHARE` of its tokens, at least one;
    and their log-probs with the routers' own choices, under the weights before the update."""

    sample: Sequence[Trajectory]
    unreplayed: Sequence[Floats]

    @classmethod
    def before(cls, stack: TrainStack, objective: Objective[Any], items: Sequence[Any]) -> "ReplayComparison":
        """The comparison for the items of the first update; collective on several ranks."""
        run = [(sequence,) for item in items if not objective.skippable(item) for sequence in objective.sequences(item)]
        run = [(sequence,) for (sequence,) in run if len(sequence.tokens) and sequence.behavior_log_prob is not None]
        shared = stack.model.share_prompt
        budget = min(stack.tokens_per_micro_batch, tokens_fed(run, share_prompt=shared) // SHARE)
        first = next(iter(micro_batches(run, budget, share_prompt=shared)), [])
        sample = [run[i][0] for i in first]
        plain = [replace(sequence, routed_experts=None, prompt_routed_experts=None) for sequence in sample]
        return cls(sample, stack.log_prob(plain) if plain else [])

    def metrics(self, statistics: Mapping[Key, TokenStatistics]) -> dict[str, float]:
        """The mean k3 of KL(μ‖π), nats per token, and the mean |log π - log μ| over the loss tokens of the sample: with
        replay, from the update's own first forward pass, and without."""
        if not any(loss_tokens(sequence) for sequence in self.sample):
            return {}
        replayed = [statistics[sequence.key].log_prob for sequence in self.sample]
        of = {"replay": replayed, "no_replay": self.unreplayed}
        measured = {name: mismatch_metrics(first_forward(self.sample, log_probs)) for name, log_probs in of.items()}
        return {
            f"routing/{name}_{metric}": metrics[f"mismatch/{metric}"].value
            for name, metrics in measured.items()
            for metric in KEPT
        }


class ComparingLearner(Learner):
    """A learner that adds the metrics of a `ReplayComparison`, under the weights before the update, to each update."""

    def update(self, batch: TrainingBatch, version: int, progress: Progress, *, own: bool = True) -> UpdateResult:
        if batch.critic_only or not batch.updates:
            return super().update(batch, version, progress, own=own)
        (items,) = self.objective.items(batch.trajectories, batch.updates[:1])
        compared = ReplayComparison.before(self.stack, self.objective, items)
        result = super().update(batch, version, progress, own=own)
        result.metrics |= compared.metrics(result.token_statistics)
        return result
