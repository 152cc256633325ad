"""Warnings about a finished step, and the conditions that end the run after it."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from proxima.core.correction.health import health
from proxima.data.flow import Group
from proxima.rollout.collector import CollectedBatch, score_errors
from proxima.runtime.loop.nothing_left import nothing_left
from proxima.runtime.loop.services import RunServices
from proxima.runtime.loop.training_loop import RESUME_CHANGED, RunEnded
from proxima.training.batch_builder import TrainingBatch
from proxima.training.learner import Learner


class StepReview:
    """Reads what a step measured: warnings, and the conditions under which the run ends.

    Args:
        services: its store has the records, its observer gets the warnings.
        learner: its guard is for when rollout engine and trainer differ too much.
        max_unscored_steps: consecutive steps without a score after which the run ends; 0: never.
        selection: the specs that drop completions before the update.
    """

    def __init__(
        self, services: RunServices, learner: Learner, max_unscored_steps: int, selection: Sequence[Any]
    ) -> None:
        self.store, self.observer, self.limit = services.store, services.observer, max_unscored_steps
        self.learner, self.guard = learner, learner.guard
        self.selection, self._score_error = selection, ""
        self.nothing_left = ""  # why the last step had no update, with a remedy; empty if it had one
        self._accuracy_missing = False  # and said

    def warn(self, record: Mapping[str, Any], collected: CollectedBatch, batch: TrainingBatch) -> None:
        """Tell the user what matters about the step, and what to do."""
        step, invalid = record["step"], record["reward/invalid"]
        if not self._accuracy_missing and (warning := self._missing_accuracy(collected.generated)):
            self._accuracy_missing = True
            self.observer.warning(warning)
        for note in self.learner.warnings():
            self.observer.warning(f"step {step}: {note}")
        if invalid:
            self._score_error = score_errors(collected.generated)
            lead, end = f"{invalid} of {record['completions']} completions have no score", ""
            if invalid == record["completions"]:
                lead = f"step {step}: no completion has a score"
                if self.limit:
                    end = f". The run ends after {self.limit} such steps in a row (runtime.max_unscored_steps)"
            self.observer.warning(
                f"{lead} ({self._score_error}); they count in no mean; see `error` in "
                f"rollouts/{self.store.folder.rollout_file(step).name}{end}"
            )
        for verdict in health(record, self.guard, self.learner.known_mismatch):
            if verdict.level == "act":
                self.observer.lasting(f"step {step}: {verdict.sentence}")
        self.nothing_left = ""
        if not batch.updates:
            self.nothing_left = nothing_left(batch, self.selection)
            self.observer.warning(f"step {step}: {self.nothing_left}")

    def _missing_accuracy(self, groups: Sequence[Group]) -> str:
        """A warning if a selection compares accuracies and no reward gives one; otherwise empty."""
        named = [i for i, spec in enumerate(self.selection) if getattr(spec, "by_accuracy", False)]
        valid = [score for group in groups for score in group.scores if score.valid]
        if not named or not valid or any(score.correct is not None for score in valid):
            return ""
        return (
            f"no reward says which answers are right: algorithm.selection.{named[0]} compares the rewards of a group "
            "in place of their accuracy; set its metric=reward to say so, or give a reward that sets `correct`"
        )

    def stop_if_unscored(self, record: Mapping[str, Any]) -> None:
        """End a run that learns nothing, or learns from log-probs that are not the policy's.

        Raises:
            RunEnded: the last steps have no score: a reward that always fails would let the run use up its questions;
                or `algorithm.mismatch.on_mismatch` is `stop`, and engine and trainer differ too much.
        """
        step, journal = record["step"], self.store.journal
        records = [*islice(journal.history(), self.limit)] if 0 < self.limit <= step else []
        if records and all(r.get("completions") and r["reward/invalid"] == r["completions"] for r in records):
            raise RunEnded(
                f"no completion of the last {self.limit} steps has a score ({self._score_error}); fix the reward and "
                f"{RESUME_CHANGED}, or set runtime.max_unscored_steps=0 to train without scores"
            )
        if self.guard.on_mismatch == "stop" and (excess := self.guard.exceeded(record)):
            raise RunEnded(
                f"step {step}: {excess}: engine and trainer differ too much; the documentation of the "
                "mismatch lists causes. Fix it and resume, or resume with algorithm.mismatch.on_mismatch=reject or warn"
            )
