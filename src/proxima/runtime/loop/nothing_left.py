"""Messages about steps in which too little was left to train on, or nothing."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from proxima.core.selection.dropping import DropUniformGroups
from proxima.data.flow import Group
from proxima.data.outcomes import Outcomes
from proxima.rollout.collector import BatchNotFilled, score_errors
from proxima.runtime.loop.training_loop import RESUME_CHANGED, RunEnded
from proxima.training.batch_builder import TrainingBatch


def not_filled(shortfall: BatchNotFilled, step: int, file: str, selection: Sequence[Any]) -> RunEnded:
    """The end of a run whose generation batches gave too few groups; `file` has their completions."""
    reasons = Counter(reason for _, reason in shortfall.dropped).most_common()
    scores = [score.value for group in shortfall.generated for score in group.scores if score.valid]
    mean = f"mean reward {sum(scores) / len(scores):.3g}" if scores else score_errors(shortfall.generated) or "no score"
    counts = f"({', '.join(f'{count} {reason}' for reason, count in reasons)}; {mean}); see rollouts/{file}"
    remedy = f"Fix the reward and {RESUME_CHANGED}"
    if scores:
        remedy = _other_metric(selection, shortfall.dropped) or (
            "Start another run with easier or harder questions or more completions per prompt, or resume "
            "this one (--resume) with a higher algorithm.dynamic_sampling.max_num_gen_batches or "
            "algorithm.dynamic_sampling.exhausted=partial"
        )
    return RunEnded(f"step {step}: {shortfall} {counts}. {remedy}")


def nothing_left(batch: TrainingBatch, selection: Sequence[Any]) -> str:
    """Say why a step had no update, and what helps where another metric of the selection would."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in batch.drop_counts.items())
    reasons = [(group, batch.dropped.get(group.prompt.uid, "")) for group in batch.groups]
    remedy = _other_metric(selection, reasons)
    text = f"nothing was left to train on ({dropped or 'no groups'}); the weights did not change"
    return f"{text}. {remedy}" if remedy else text


def _other_metric(selection: Sequence[Any], dropped: Sequence[tuple[Group, str]]) -> str:
    """Where groups were dropped as uniform in a metric although their rewards differ, name it and the field to set;
    otherwise empty."""
    uniform = [group for group, reason in dropped if reason == DropUniformGroups.reason]
    specs = [(i, spec) for i, spec in enumerate(selection) if isinstance(spec, DropUniformGroups)]
    if not uniform or not specs:
        return ""
    outcomes = Outcomes.from_groups(uniform)
    differing = len(outcomes.group[DropUniformGroups()(outcomes, outcomes.reward)].unique())
    if not differing:
        return ""
    place, spec = specs[0]
    field, differ = f"algorithm.selection.{place}.metric", f"the rewards differ in {differing} of {len(uniform)}"
    return (
        f"These groups are uniform in {spec.metric} ({field}), but {differ}. "
        f"To train on those, set {field}=reward in another run, or resume with it and --accept-changes"
    )
