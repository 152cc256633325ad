"""Reviews a finished step: warnings, the conditions that end the run after it, and its numbers for metrics.jsonl."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from proxima.core.correction.health import health
from proxima.core.selection.dropping import DropUniformGroups
from proxima.data.flow import Group, score_errors
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
        step, invalid = record["step"], record["reward/invalid"]
        if not self._accuracy_missing and (warning := self._missing_accuracy(collected.generated)):
            self._accuracy_missing = True
            self.observer.warning(warning)
        for note in self.learner.warnings():
            self.observer.warning(f"step {step}: {note}")
        if invalid:
            self._score_error = score_errors(collected.generated)
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
        everything = [each for group in collected.generated for each in group.completions]
        if not self._grammar_noted and (note := grammar_note(everything)):
            self._grammar_noted = True
            self.observer.warning(f"step {step}: {note}")
        for note in other_format_notes(everything):
            self.observer.lasting(f"step {step}: {note}")
        for verdict in health(record, self.guard, self.learner.known_mismatch):
            if verdict.level == "act":
                self.observer.lasting(f"step {step}: {verdict.sentence}")
        self.exhausted = ""
        if not batch.updates:
            self.exhausted = exhausted_batch(batch, self.selection)
            self.observer.warning(f"step {step}: {self.exhausted}")

    def _missing_accuracy(self, groups: Sequence[Group]) -> str:
        """A warning if a selection compares accuracies and no reward gives one; otherwise empty."""
        named = [i for i, spec in enumerate(self.selection) if isinstance(spec, DropUniformGroups) and spec.by_accuracy]
        valid = [score for group in groups for score in group.scores if score.valid]
        if not named or not valid or any(score.correct is not None for score in valid):
            return ""
        return (
            f"no reward sets `correct`, so algorithm.selection.{named[0]} compares rewards in place of accuracy; "
            "set its metric=reward to state that, or use a reward that sets `correct`"
        )

    def stop_if_unscored(self, record: Mapping[str, Any]) -> None:
        """End a run that learns nothing, or learns from log-probs that are not the policy's.

        Raises:
            RunEnded: the last steps have no score: a reward that always fails would let the run use up its questions;
                or `algorithm.mismatch.on_mismatch` is `stop`, and engine and trainer differ too much.
        """
        step = record["step"]
        journal = self.store.journal
        if 0 < self.limit <= step:
            records = [*islice(journal.history(), self.limit)]
        else:
            records = []
        if records and all(r.get("completions") and r["reward/invalid"] == r["completions"] for r in records):
            raise RunEnded(
                f"no completion of the last {self.limit} steps has a score ({self._score_error}); fix the reward and "
                f"{RESUME_CHANGED}, or set runtime.max_unscored_steps=0 to train without scores"
            )
        if self.guard.on_mismatch == "stop" and (excess := self.guard.exceeded(record)):
            raise RunEnded(
                f"step {step}: {excess}: engine and trainer differ too much; docs/mismatch.md "
                "lists causes. Fix it and resume, or resume with algorithm.mismatch.on_mismatch=reject or warn"
            )


def exhausted_batch(batch: TrainingBatch, selection: Sequence[Any]) -> str:
    """Say why a step had no update, with a remedy if another metric of the selection would help."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in batch.drop_counts.items())
    reasons = [(group, batch.dropped.get(group.prompt.uid, "")) for group in batch.groups]
    remedy = _other_metric(selection, reasons)
    text = f"nothing was left to train on ({dropped or 'no groups'}); the weights did not change"
    return f"{text}. {remedy}" if remedy else text


def not_filled(shortfall: BatchNotFilled, step: int, file: str, selection: Sequence[Any]) -> RunEnded:
    """The error that ends a run whose generation batches gave too few groups; `file` has their completions."""
    reasons = Counter(reason for _, reason in shortfall.dropped).most_common()
    scores = [score.value for group in shortfall.generated for score in group.scores if score.valid]
    if scores:
        mean = f"mean reward {sum(scores) / len(scores):.3g}"
    else:
        mean = score_errors(shortfall.generated) or "no score"
    counts = f"({', '.join(f'{count} {reason}' for reason, count in reasons)}; {mean}); see rollouts/{file}"
    remedy = f"Fix the reward and {RESUME_CHANGED}"
    if scores:
        remedy = _other_metric(selection, shortfall.dropped) or (
            "Start another run with easier or harder questions or more completions per prompt, or resume "
            "this one (--resume) with a higher algorithm.dynamic_sampling.max_num_gen_batches or "
            "algorithm.dynamic_sampling.exhausted=partial"
        )
    return RunEnded(f"step {step}: {shortfall} {counts}. {remedy}")


def _other_metric(selection: Sequence[Any], dropped: Sequence[tuple[Group, str]]) -> str:
    """If groups were dropped as uniform in a metric although their rewards differ, name the metric and the field to
    set; otherwise empty."""
    uniform = [group for group, reason in dropped if reason == DropUniformGroups.reason]
    specs = [(i, spec) for i, spec in enumerate(selection) if isinstance(spec, DropUniformGroups)]
    if not uniform or not specs:
        return ""
    differing = sum(
        bool(DropUniformGroups()(outcomes, outcomes.reward).any())
        for outcomes in (Outcomes.from_groups([group]) for group in uniform)
    )
    if not differing:
        return ""
    place, spec = specs[0]
    field = f"algorithm.selection.{place}.metric"
    differ = f"the rewards differ in {differing} of {len(uniform)}"
    return (
        f"These groups are uniform in {spec.metric} ({field}), but {differ}. "
        f"To train on those, set {field}=reward in another run, or resume with it and --accept-changes"
    )


# ---- the numbers of a step for metrics.jsonl -------------------------------------------------------------------------


def rollout_metrics(generated: Sequence[Group], batch: TrainingBatch) -> dict[str, Any]:
    """Rewards, lengths and counts over all completions generated in the step; invalid scores are counted separately.

    Under dynamic sampling these are not the completions trained on: dropped groups count, groups carried over from the
    previous step don't, so the mean reward measures the policy and not the selection. `prompts_used`,
    `prompts_dropped_<reason>` and `dropped/<reason>` (completions) describe the batch.
    """
    pairs = [(c, s) for group in generated for c, s in zip(group.completions, group.scores, strict=True)]
    values = [s.value for _, s in pairs if s.valid]
    judgements = [s.correct for _, s in pairs if s.valid and s.correct is not None]
    lengths = [c.generated for c, _ in pairs]
    mean = sum(values) / len(values) if values else None
    if mean is None:
        squares = None
    else:
        squares = sum((v - mean) ** 2 for v in values)
    out: dict[str, Any] = {
        "prompts": len(generated),
        "completions": len(pairs),
        "reward/mean": mean,
        "reward/std": None if squares is None else math.sqrt(squares / max(1, len(values) - 1)),
        "reward/invalid": _invalid(generated),
        "length/mean": sum(lengths) / len(lengths) if lengths else None,
        "length/max": max(lengths, default=0),
        "truncated_fraction": sum(c.truncated for c, _ in pairs) / len(pairs) if pairs else None,
        "tokens/generated": sum(lengths),
    }
    if any(c.episode is not None for c, _ in pairs):
        out |= episode_metrics([c for c, _ in pairs])
    out |= role_metrics(generated)
    stopped = [c.generated for c, s in pairs if s.stopped]
    if stopped:
        out["stopped"] = len(stopped)
        out["tokens/stopped"] = sum(stopped)
    if judgements:
        out["accuracy"] = sum(judgements) / len(judgements)
    for name in sorted({part for _, s in pairs if s.valid for part in s.parts}):
        parts = [s.parts[name] for _, s in pairs if s.valid and name in s.parts]
        out[f"reward/part/{name}"] = sum(parts) / len(parts)
    for reason, count in batch.drop_counts.items():
        out[f"dropped/{reason}"] = count
    reasons = Counter(batch.dropped.values())
    out["prompts_used"] = len(batch.kept)
    out["prompts_dropped_uniform"] = reasons.pop("uniform_group", 0)
    judged = batch.useful
    if judged:
        out["prompts_useful_fraction"] = sum(judged.values()) / len(judged)
    if batch.kept:
        out["prompts_generated_per_used"] = len(generated) / len(batch.kept)
    out |= {f"prompts_dropped_{reason}": count for reason, count in sorted(reasons.items())}
    out["tokens/dropped"] = sum(
        each.generated for each in contributions_of(batch.groups) if each.paths and each.paths[-1].key in batch.reasons
    )
    return out


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
        pairs = [(c, s) for group in groups for c, s in zip(group.completions, group.scores, strict=True)]
        values = [score.value for _, score in pairs if score.valid]
        verdicts = [score.correct for _, score in pairs if score.valid and score.correct is not None]
        episodes = [c.episode for c, _ in pairs if c.episode is not None]
        figures: dict[str, Any] = {
            "prompts": len(groups),
            "prompts_used": sum(group.prompt.uid not in batch.dropped for group in groups),
            "groups_equal": sum(len({score.value for score in group.scores if score.valid}) <= 1 for group in groups),
            "reward/mean": sum(values) / len(values) if values else None,
            "reward/invalid": _invalid(groups),
            "length/mean": sum(c.generated for c, _ in pairs) / len(pairs),
            "length/max": max(c.generated for c, _ in pairs),
            "truncated_fraction": sum(c.truncated for c, _ in pairs) / len(pairs),
            "tokens/generated": sum(c.generated for c, _ in pairs),
        }
        if verdicts:
            figures["accuracy"] = sum(verdicts) / len(verdicts)
        if episodes:
            figures |= episode_metrics([c for c, _ in pairs])
            seconds = Counter[str]()
            for episode in episodes:
                seconds.update(episode.seconds)
            figures |= {f"seconds/{kind}": total / len(episodes) for kind, total in sorted(seconds.items())}
        out |= {f"source/{name}/{key}": value for key, value in figures.items()}
    return out


def mean_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite metrics of the updates, under their names in metrics.jsonl."""
    return {RENAMED.get(key, key): value for key, value in metrics.items() if math.isfinite(value)}
