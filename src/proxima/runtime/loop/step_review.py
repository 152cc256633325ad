"""Warnings about a finished step, and the conditions that end the run after it."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.core.correction import MismatchGuard, health
from proxima.rollout.collector import BatchNotFilled, CollectedBatch, score_errors
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.store import Store
from proxima.runtime.watch.observer import Observer, Sample
from proxima.train.batch_builder import TrainingBatch

RESUME_CHANGED = "resume (--resume, with --accept-changes where its file or fields have changed)"


class StepReview:
    """Reads what a step measured: warnings, and the conditions under which the run ends.

    Args:
        store: journal and run folder.
        observer: gets the warnings.
        guard: for when rollout engine and trainer differ too much.
        max_unscored_steps: consecutive steps without a score after which the run ends; 0: never.
    """

    def __init__(self, store: Store, observer: Observer, guard: MismatchGuard, max_unscored_steps: int) -> None:
        self.store, self.observer, self.guard, self.limit = store, observer, guard, max_unscored_steps
        self._score_error = ""

    def warn(
        self, record: Mapping[str, Any], collected: CollectedBatch, batch: TrainingBatch, notes: Sequence[str]
    ) -> None:
        """Tell the user what matters about the step, and what to do; `notes` are further sentences."""
        step, invalid = record["step"], record["reward/invalid"]
        for note in (*collected.notes, *notes):
            self.observer.warning(f"step {step}: {note}")
        if invalid:
            self._score_error = score_errors(collected.generated)
            few = f"{invalid} of {record['completions']} completions have no score"
            lead = f"step {step}: no completion has a score" if invalid == record["completions"] else few
            self.observer.warning(
                f"{lead} ({self._score_error}); they count in no mean; see `error` in "
                f"rollouts/{self.store.folder.rollout_file(step).name}{self._unscored_note(record)}"
            )
        for verdict in health(record, self.guard):
            if verdict.level == "act":
                self.observer.lasting(f"step {step}: {verdict.sentence}")
        if not batch.updates:
            dropped = ", ".join(f"{count} {reason}" for reason, count in batch.drop_counts.items())
            self.observer.warning(
                f"step {step}: nothing was left to train on ({dropped or 'no groups'}); the weights did not change"
            )

    def _unscored_note(self, record: Mapping[str, Any]) -> str:
        """The sentence that says when a run without scores ends."""
        if not self.limit or record["reward/invalid"] < record["completions"]:
            return ""
        return f". The run ends after {self.limit} such steps in a row (runtime.max_unscored_steps)"

    def end_if_hopeless(self, record: Mapping[str, Any]) -> None:
        """End a run that learns nothing, or learns from log-probs that are not the policy's.

        Raises:
            RunEnded: the last steps have no score: a reward that always fails would let the run use up its questions;
                or `algorithm.mismatch.on_mismatch` is `stop`, and engine and trainer differ too much.
        """
        step, journal = record["step"], self.store.journal
        steps = range(step - self.limit + 1, step + 1) if 0 < self.limit <= step else ()
        records = [journal.metrics(number) or {} for number in steps]
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


def not_filled(shortfall: BatchNotFilled, step: int, file: str) -> RunEnded:
    """The end of a run whose generation batches gave too few groups; `file` has their completions."""
    remedy = (
        f"Fix the reward and {RESUME_CHANGED}"
        if shortfall.unscored
        else "Start another run with easier or harder questions or more completions per prompt, or resume "
        "this one (--resume) with a higher algorithm.dynamic_sampling.max_num_gen_batches or "
        "algorithm.dynamic_sampling.exhausted=partial"
    )
    return RunEnded(f"step {step}: {shortfall}; see rollouts/{file}. {remedy}")


def sample_of(batch: TrainingBatch, step: int) -> Sample | None:
    """One completion for people to look at: of another prompt each step."""
    if not batch.groups:
        return None
    group = batch.groups[step % len(batch.groups)]
    completion, score = group.completions[0], group.scores[0]
    return Sample(
        question=group.prompt.question,
        text=completion.text,
        uid=group.prompt.uid,
        answer=group.prompt.answer,
        reward=score.value if score.valid else None,
        correct=score.correct,
        parts=score.parts,
    )
