"""The metric that represents an evaluation in reports and comparisons and selects the best checkpoint: a default, or
`eval.metric`."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from proxima.data.errors import nearest, suggestion
from proxima.evaluation.intervals import PART, bound_keys

Record = Mapping[str, Any]
ACCURACY = "accuracy"
REWARD = "reward/mean"
CUT = "truncated_fraction"
SHORT_NAMES = {
    "accuracy": ACCURACY,
    "acc": ACCURACY,
    "reward": REWARD,
    "score": REWARD,
    "length": "length/mean",
    "truncated": CUT,
}


@dataclass(frozen=True)
class Headline:
    """The metric that represents an evaluation.

    Args:
        key: its key in the records of metrics.jsonl; `reward/part/<name>` for one reward of several.
    """

    key: str = ACCURACY

    @classmethod
    def of(cls, records: Iterable[Record], metric: str | None = None) -> "Headline":
        """The named metric; otherwise the accuracy if a record has it, else the mean reward if a record has that.

        Args:
            records: evaluations of one run or of several, in order.
            metric: `accuracy`, `reward`, `length`, `truncated`, `mean@n`, `pass@k`, a reward or a part of one by its
                name, or a key of the records; None: `eval.metric` as recorded. A reward that has one of the first four
                names needs its key, such as `reward/part/reward`: `reward` is always the mean reward.
        """
        evaluations = list(records)
        named = metric or next((str(record["metric"]) for record in reversed(evaluations) if record.get("metric")), "")

        def has(key: str) -> bool:
            return any(record.get(key) is not None for record in evaluations)

        if named:
            return cls(SHORT_NAMES.get(named) or next(filter(has, (named, PART + named)), named))
        if has(REWARD) and not has(ACCURACY):
            return cls(REWARD)
        return cls(ACCURACY)

    @property
    def name(self) -> str:
        """`accuracy`, `reward`, `length`, `truncated`, a reward's name or another key; `reward/part/reward` for a
        reward with one of these names."""
        short = {key: name for name, key in SHORT_NAMES.items() if name not in ("acc", "score")}
        if self.key in short:
            return short[self.key]
        part = self.key.removeprefix(PART)
        if part in SHORT_NAMES:
            return self.key
        return part

    @property
    def title(self) -> str:
        """The name, with `mean` in front of a mean: `accuracy`, `mean reward`, `mean length`."""
        if self.key.endswith("/mean"):
            return f"mean {self.name}"
        return self.name

    @property
    def lower_is_better(self) -> bool:
        return self.key == "loss"

    def score(self, record: Record) -> float | None:
        """Return the value, negated where lower is better."""
        value = self.value(record)
        if value is not None and self.lower_is_better:
            return -value
        return value

    @property
    def share(self) -> bool:
        """True if the metric is in [0, 1] whatever the reward."""
        return self.key in (ACCURACY, CUT) or self.key.startswith(("mean@", "pass@"))

    def value(self, record: Record) -> float | None:
        """Return the metric of an evaluation; None if it is unknown."""
        value = record.get(self.key)
        if isinstance(value, int | float):
            return float(value)
        return None

    def bounds(self, record: Record) -> tuple[float, float] | None:
        """Return the 95 % interval; None if it is not recorded."""
        low, high = bound_keys(self.key)
        if record.get(low) is None:
            return None
        return (float(record[low]), float(record[high]))


def named_metric(record: Mapping[str, Any], metric: str, *, optional: Collection[str] = ()) -> tuple[str, str]:
    """Return the key of `eval.metric` in the record of an evaluation, and the problem with the name; empty: no problem.

    The parts that a reward reports besides its value are known only after it has run. An evaluation without any valid
    score may lack every metric, and any evaluation those in `optional`: a task's solver has no reward if no proposal
    was valid.
    """
    headline = Headline.of([record], metric)
    if headline.value(record) is not None or record["invalid"] == record["answers"] or metric in optional:
        return headline.key, ""
    names = [Headline(key).name for key in record if bound_keys(key)[0] in record]
    problem = f"eval.metric={metric}: the evaluation has no such metric; {suggestion(metric, names)}"
    instead = nearest(metric, names)
    if not instead and "reward" in names:
        instead = "reward"
    if instead:
        problem = f"{problem}. Continue with --resume eval.metric={instead}"
    return headline.key, problem
