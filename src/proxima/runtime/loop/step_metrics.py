"""Numbers of a step for metrics.jsonl."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data.flow import Group
from proxima.rollout.episodes.figures import episode_metrics
from proxima.training.batch_builder import TrainingBatch

OF_VALUES = ("clip_fraction", "grad_norm", "loss", "lr", "mean")
RENAMED = {"entropy": "entropy/mean"} | {f"value_{name}": f"value/{name}" for name in OF_VALUES}


def mean_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the updates under their names in metrics.jsonl, without those that are not finite."""
    return {RENAMED.get(key, key): value for key, value in metrics.items() if math.isfinite(value)}


def rollout_metrics(generated: Sequence[Group], batch: TrainingBatch) -> dict[str, Any]:
    """Rewards, lengths and counts over all completions generated in the step; invalid scores are counted apart.

    Under dynamic sampling these are not the completions trained on: dropped groups count, groups carried over from the
    step before don't, so the mean reward measures the policy and not the selection. What the batch consists of is in
    `prompts_used`, `prompts_dropped_<reason>` and `dropped/<reason>` (completions).
    """
    pairs = [(c, s) for group in generated for c, s in zip(group.completions, group.scores, strict=True)]
    values = [s.value for _, s in pairs if s.valid]
    judgements = [s.correct for _, s in pairs if s.valid and s.correct is not None]
    lengths = [c.generated for c, _ in pairs]
    mean = sum(values) / len(values) if values else None
    squares = None if mean is None else sum((v - mean) ** 2 for v in values)
    out: dict[str, Any] = {
        "prompts": len(generated),
        "completions": len(pairs),
        "reward/mean": mean,
        "reward/std": None if squares is None else math.sqrt(squares / max(1, len(values) - 1)),
        "reward/invalid": len(pairs) - len(values),
        "length/mean": sum(lengths) / len(lengths) if lengths else None,
        "length/max": max(lengths, default=0),
        "truncated_fraction": sum(c.truncated for c, _ in pairs) / len(pairs) if pairs else None,
        "tokens/generated": sum(lengths),
    }
    if any(c.episode is not None for c, _ in pairs):
        out |= episode_metrics([c for c, _ in pairs])
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
    out |= {f"prompts_dropped_{reason}": count for reason, count in sorted(reasons.items())}
    out["tokens/dropped"] = sum(c.generated for g in batch.groups for c in g.completions if c.key in batch.reasons)
    return out
