"""Reviews a finished step: warnings, the conditions that end the run after it, and its numbers for metrics.jsonl."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from proxima.core.correction.health import health
from proxima.core.selection.dropping import DropUniformGroups
from proxima.data.flow import Completion, Group, Score, score_errors
from proxima.data.outcomes import Outcomes
from proxima.data.players import contributions_of, role_metrics
from proxima.rollout.collector import BatchNotFilled, CollectedBatch
from proxima.rollout.episodes.figures import episode_metrics, grammar_note, other_format_notes
from proxima.rollout.sources import groups_by_source
from proxima.runtime.loop.training_loop import RESUME_CHANGED, RunEnded, RunServices
from proxima.task.mix import TaskSource
from proxima.training.batch_builder import TrainingBatch
from proxima.training.learner import Learner

OF_VALUES = ("clip_fraction", "grad_norm", "loss", "lr", "mean")
RENAMED = {"entropy": "entropy/mean"} | {f"value_{name}": f"value/{name}" for name in OF_VALUES}


OTHER_QUESTIONS = (
    "Start another run with easier or harder questions or more completions per prompt, or resume "
    "this one (--resume) with a higher algorithm.dynamic_sampling.max_num_gen_batches or "
    "algorithm.dynamic_sampling.exhausted=partial"
)


class StepReview:
    """Reads the measurements of a step: warns, and ends a run that learns nothing.

    Args:
        services: its store has the records, its observer gets the warnings.
        learner: its guard acts when rollout engine and trainer differ too much.
        max_unscored_steps: consecutive steps without a score after which the run ends; 0: never.
        selection: the specs that drop completions before the update.
    """

    def __init__(
        self, services: RunServices, learner: Learner, max_unscored_steps: int, selection: Sequence[Any]
    ) -> None:
        self.store = services.store
        self.observer = services.observer
        self.limit = max_unscored_steps
        self.learner = learner
        self.guard = learner.guard
        self.selection = selection
        self._score_error = ""
        self.exhausted = ""  # why the last step had no update, with a remedy; empty if it had one
        self._accuracy_missing = False  # and warned of
        self._grammar_noted = False

    def warn(self, record: Mapping[str, Any], collected: CollectedBatch, batch: TrainingBatch) -> None:
        """Warn about the problems of the step, with what to do."""
        step = record["step"]
        completions = [each for group in collected.generated for each in group.completions]
        self._warn_of_accuracy(collected.generated)
        for note in self.learner.warnings():
            self.observer.warning(f"step {step}: {note}")
        if record["reward/invalid"]:
            self._warn_of_scores(record, collected.generated)
        self._warn_of_grammar(step, completions)
        for note in other_format_notes(completions):
            self.observer.lasting(f"step {step}: {note}")
        for verdict in health(record, self.guard, self.learner.known_mismatch):
            if verdict.level == "act":
                self.observer.lasting(f"step {step}: {verdict.sentence}")
        self.exhausted = ""
        if not batch.updates:
            self.exhausted = exhausted_batch(batch, self.selection)
            self.observer.warning(f"step {step}: {self.exhausted}")

    def _warn_of_scores(self, record: Mapping[str, Any], generated: Sequence[Group]) -> None:
        """Warn that completions have no score."""
        step = record["step"]
        invalid = record["reward/invalid"]
        self._score_error = score_errors(generated)
        lead = f"{invalid} of {record['completions']} completions have no score"
        end = ""
        if invalid == record["completions"]:
            lead = f"step {step}: no completion has a score"
            if self.limit:
                end = f". The run ends after {self.limit} such steps in a row (runtime.max_unscored_steps)"
        self.observer.warning(
            f"{lead} ({self._score_error}); means leave them out; see `error` in "
            f"rollouts/{self.store.folder.rollout_file(step).name}{end}"
        )

    def _warn_of_grammar(self, step: int, completions: Sequence[Completion]) -> None:
        """Warn once, of what a grammar did to them."""
        if self._grammar_noted:
            return
        note = grammar_note(completions)
        if note:
            self._grammar_noted = True
            self.observer.warning(f"step {step}: {note}")

    def _warn_of_accuracy(self, groups: Sequence[Group]) -> None:
        """Warn once, if a selection compares accuracies and no reward gives one."""
        if self._accuracy_missing:
            return
        comparing = []
        for place, spec in enumerate(self.selection):
            if isinstance(spec, DropUniformGroups) and spec.by_accuracy:
                comparing.append(place)
        valid = [score for group in groups for score in group.scores if score.valid]
        if not comparing or not valid or any(score.correct is not None for score in valid):
            return
        self._accuracy_missing = True
        self.observer.warning(
            f"no reward sets `correct`, so algorithm.selection.{comparing[0]} compares rewards in place of accuracy; "
            "set its metric=reward to state that, or use a reward that sets `correct`"
        )

    def stop_if_unscored(self, record: Mapping[str, Any]) -> None:
        """End a run that learns nothing, or learns from log-probs that are not the policy's.

        Raises:
            RunEnded: the last steps have no score: a reward that always fails would let the run use up its questions;
                or `algorithm.mismatch.on_mismatch` is `stop`, and engine and trainer differ too much.
        """
        if self._unscored(record["step"]):
            raise RunEnded(
                f"no completion of the last {self.limit} steps has a score ({self._score_error}); fix the reward and "
                f"{RESUME_CHANGED}, or set runtime.max_unscored_steps=0 to train without scores"
            )
        if self.guard.on_mismatch != "stop":
            return
        excess = self.guard.exceeded(record)
        if excess:
            raise RunEnded(
                f"step {record['step']}: {excess}: engine and trainer differ too much; docs/mismatch.md "
                "lists causes. Fix it and resume, or resume with algorithm.mismatch.on_mismatch=reject or warn"
            )

    def _unscored(self, step: int) -> bool:
        """True if no completion of the last steps, up to this one, has a score."""
        if not 0 < self.limit <= step:
            return False
        last = list(islice(self.store.journal.history(), self.limit))
        if not last:
            return False
        return all(record.get("completions") and record["reward/invalid"] == record["completions"] for record in last)


def exhausted_batch(batch: TrainingBatch, selection: Sequence[Any]) -> str:
    """Say why a step had no update, with a remedy if another metric of the selection would help."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in batch.drop_counts.items())
    reasons = [(group, batch.dropped.get(group.prompt.uid, "")) for group in batch.groups]
    remedy = _other_metric(selection, reasons)
    text = f"nothing was left to train on ({dropped or 'no groups'}); the weights did not change"
    if remedy:
        return f"{text}. {remedy}"
    return text


def not_filled(shortfall: BatchNotFilled, step: int, file: str, selection: Sequence[Any]) -> RunEnded:
    """The error that ends a run whose generation batches gave too few groups; `file` has their completions."""
    reasons = Counter(reason for _, reason in shortfall.dropped).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons)
    scores = [score.value for group in shortfall.generated for score in group.scores if score.valid]
    if scores:
        found = f"mean reward {sum(scores) / len(scores):.3g}"
        remedy = _other_metric(selection, shortfall.dropped) or OTHER_QUESTIONS
    else:
        found = score_errors(shortfall.generated) or "no score"
        remedy = f"Fix the reward and {RESUME_CHANGED}"
    return RunEnded(f"step {step}: {shortfall} ({counts}; {found}); see rollouts/{file}. {remedy}")


def _other_metric(selection: Sequence[Any], dropped: Sequence[tuple[Group, str]]) -> str:
    """If groups were dropped as uniform in a metric although their rewards differ, name the metric and the field to
    set; otherwise empty."""
    uniform = [group for group, reason in dropped if reason == DropUniformGroups.reason]
    specs = [(i, spec) for i, spec in enumerate(selection) if isinstance(spec, DropUniformGroups)]
    if not uniform or not specs:
        return ""
    differing = sum(map(_rewards_differ, uniform))
    if not differing:
        return ""
    place, spec = specs[0]
    field = f"algorithm.selection.{place}.metric"
    differ = f"the rewards differ in {differing} of {len(uniform)}"
    return (
        f"These groups are uniform in {spec.metric} ({field}), but {differ}. "
        f"To train on those, set {field}=reward in another run, or resume with it and --accept-changes"
    )


def _rewards_differ(group: Group) -> bool:
    outcomes = Outcomes.from_groups([group])
    return bool(DropUniformGroups()(outcomes, outcomes.reward).any())


# ---- the numbers of a step for metrics.jsonl -------------------------------------------------------------------------


def rollout_metrics(generated: Sequence[Group], batch: TrainingBatch) -> dict[str, Any]:
    """Rewards, lengths and counts over all completions generated in the step; invalid scores are counted separately.

    Under dynamic sampling these are not the completions trained on: dropped groups count, groups carried over from the
    previous step don't, so the mean reward measures the policy and not the selection. `prompts_used`,
    `prompts_dropped_<reason>` and `dropped/<reason>` (completions) describe the batch.
    """
    pairs = _scored(generated)
    completions = [completion for completion, _ in pairs]
    valid = [score for _, score in pairs if score.valid]
    values = [score.value for score in valid]
    out: dict[str, Any] = {
        "prompts": len(generated),
        "completions": len(pairs),
        "reward/mean": _mean(values),
        "reward/std": _deviation(values),
        "reward/invalid": _invalid(generated),
        **_lengths(completions),
    }
    if any(completion.episode is not None for completion in completions):
        out |= episode_metrics(completions)
    out |= role_metrics(generated)
    stopped = [completion.generated for completion, score in pairs if score.stopped]
    if stopped:
        out["stopped"] = len(stopped)
        out["tokens/stopped"] = sum(stopped)
    judgements = [score.correct for score in valid if score.correct is not None]
    if judgements:
        out["accuracy"] = _mean(judgements)
    for name in sorted({part for score in valid for part in score.parts}):
        out[f"reward/part/{name}"] = _mean([score.parts[name] for score in valid if name in score.parts])
    return out | _batch_counts(generated, batch)


def _batch_counts(generated: Sequence[Group], batch: TrainingBatch) -> dict[str, Any]:
    """What became of the groups and completions of a step."""
    out: dict[str, Any] = {f"dropped/{reason}": count for reason, count in batch.drop_counts.items()}
    reasons = Counter(batch.dropped.values())
    out["prompts_used"] = len(batch.kept)
    out["prompts_dropped_uniform"] = reasons.pop("uniform_group", 0)
    judged = batch.useful
    if judged:
        out["prompts_useful_fraction"] = sum(judged.values()) / len(judged)
    if batch.kept:
        out["prompts_generated_per_used"] = len(generated) / len(batch.kept)
    for reason, count in sorted(reasons.items()):
        out[f"prompts_dropped_{reason}"] = count
    dropped = 0
    for each in contributions_of(batch.groups):
        if each.paths and each.paths[-1].key in batch.reasons:
            dropped += each.generated
    out["tokens/dropped"] = dropped
    return out


def _lengths(completions: Sequence[Completion]) -> dict[str, Any]:
    """How long completions are, and how many of them reached the limit."""
    lengths = [completion.generated for completion in completions]
    return {
        "length/mean": _mean(lengths),
        "length/max": max(lengths, default=0),
        "truncated_fraction": _mean([completion.truncated for completion in completions]),
        "tokens/generated": sum(lengths),
    }


def _invalid(groups: Sequence[Group]) -> int:
    """Count the completions whose score failed; one that pruning stopped has none, and none failed."""
    return sum(not score.valid and not score.stopped for group in groups for score in group.scores)


def metrics_by_source(
    sources: Sequence[TaskSource], generated: Sequence[Group], batch: TrainingBatch
) -> dict[str, Any]:
    """The figures of each source of a mix among the groups generated in the step, as `source/NAME/metric`; empty for
    one task. `groups_equal` counts the groups whose valid rewards are all equal, which teach a group advantage nothing;
    `prompts_used` those that the step trains on; `seconds/own`, `queued` and `policy` are means over its episodes."""
    out: dict[str, Any] = {}
    for name, groups in groups_by_source(sources, generated).items():
        for key, value in _source_figures(groups, batch).items():
            out[f"source/{name}/{key}"] = value
    return out


def _source_figures(groups: Sequence[Group], batch: TrainingBatch) -> dict[str, Any]:
    pairs = _scored(groups)
    completions = [completion for completion, _ in pairs]
    values = [score.value for _, score in pairs if score.valid]
    figures: dict[str, Any] = {
        "prompts": len(groups),
        "prompts_used": sum(group.prompt.uid not in batch.dropped for group in groups),
        "groups_equal": sum(map(_rewards_are_equal, groups)),
        "reward/mean": _mean(values),
        "reward/invalid": _invalid(groups),
        **_lengths(completions),
    }
    verdicts = [score.correct for _, score in pairs if score.valid and score.correct is not None]
    if verdicts:
        figures["accuracy"] = _mean(verdicts)
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    if episodes:
        figures |= episode_metrics(completions)
        seconds = Counter[str]()
        for episode in episodes:
            seconds.update(episode.seconds)
        for kind, total in sorted(seconds.items()):
            figures[f"seconds/{kind}"] = total / len(episodes)
    return figures


def _scored(groups: Sequence[Group]) -> list[tuple[Completion, Score]]:
    """Every completion with its score."""
    pairs = list[tuple[Completion, Score]]()
    for group in groups:
        pairs.extend(zip(group.completions, group.scores, strict=True))
    return pairs


def _rewards_are_equal(group: Group) -> bool:
    return len({score.value for score in group.scores if score.valid}) <= 1


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; 0 for one value."""
    mean = _mean(values)
    if mean is None:
        return None
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(1, len(values) - 1))


def mean_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite metrics of the updates, under their names in metrics.jsonl."""
    return {RENAMED.get(key, key): value for key, value in metrics.items() if math.isfinite(value)}
