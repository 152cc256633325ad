"""The metric that `eval.metric` names, in the record of an evaluation."""

from collections.abc import Mapping
from typing import Any

from proxima.data.errors import nearest, suggestion
from proxima.evaluation.headline import Headline
from proxima.evaluation.intervals import bound_keys


def named_metric(record: Mapping[str, Any], metric: str) -> tuple[str, str]:
    """Return the key of `eval.metric` in the record of an evaluation, and the problem with the name, empty if it has
    none.

    The parts that a reward reports besides its value are known only after it has run.
    """
    headline = Headline.of([record], metric)
    if headline.value(record) is not None or record["invalid"] == record["answers"]:
        return headline.key, ""
    names = [Headline(key).name for key in record if bound_keys(key)[0] in record]
    instead = nearest(metric, names) or ("reward" if "reward" in names else None)
    problem = f"eval.metric={metric}: the evaluation has no such metric; {suggestion(metric, names)}"
    return headline.key, problem if instead is None else f"{problem}. Continue with --resume eval.metric={instead}"
