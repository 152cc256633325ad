"""Which figure stands for evaluations, under which name, and with which interval."""

import pytest

from proxima.evaluation.headline import Headline

NAMESAKES = {f"reward/part/{name}": 9.0 for name in ("reward", "length", "truncated", "accuracy")}  # of rewards
ALL = {"accuracy": 0.5, "reward/mean": 0.7, "length/mean": 3.0, "truncated_fraction": 0.1, **NAMESAKES}
JUDGED = {"accuracy": 0.5, "correct": 2, "questions": 4, "reward/mean": 0.7}
UNJUDGED = {"accuracy": None, "reward/mean": 0.7, "reward/low": 0.6, "reward/high": 0.8, "reward/part/style": 0.2}


@pytest.mark.parametrize(
    ("records", "metric", "key", "name", "value"),
    [
        ([JUDGED], None, "accuracy", "accuracy", 0.5),
        ([UNJUDGED, JUDGED], None, "accuracy", "accuracy", 0.5),
        ([UNJUDGED], None, "reward/mean", "reward", 0.7),
        ([{"accuracy": None, "reward/mean": None}], None, "accuracy", "accuracy", None),
        ([], None, "accuracy", "accuracy", None),
        ([JUDGED], "score", "reward/mean", "reward", 0.7),
        ([UNJUDGED], "style", "reward/part/style", "style", 0.2),
        ([UNJUDGED], "nobody", "nobody", "nobody", None),
        ([JUDGED, UNJUDGED | {"metric": "reward/part/style"}], None, "reward/part/style", "style", 0.2),
        ([UNJUDGED | {"metric": "reward/part/style"}], "reward", "reward/mean", "reward", 0.7),
        ([ALL], "reward", "reward/mean", "reward", 0.7),
        ([ALL], "length", "length/mean", "length", 3.0),
        ([ALL], "truncated", "truncated_fraction", "truncated", 0.1),
        ([ALL], "accuracy", "accuracy", "accuracy", 0.5),
        ([NAMESAKES | {"accuracy": None}], "accuracy", "accuracy", "accuracy", None),
        ([ALL], "reward/part/reward", "reward/part/reward", "reward/part/reward", 9.0),
        ([ALL], "reward/part/length", "reward/part/length", "reward/part/length", 9.0),
    ],
)
def test_which_figure(records, metric, key, name, value):
    headline = Headline.of(records, metric)
    assert (headline.key, headline.name) == (key, name)
    assert headline.value(records[-1] if records else {}) == value


def test_intervals():
    assert Headline("reward/mean").bounds(UNJUDGED) == (0.6, 0.8)
    assert Headline("reward/part/style").bounds(UNJUDGED) is None
    assert Headline("reward/part/style").bounds({"reward/part_low/style": 1, "reward/part_high/style": 2}) == (1, 2)
    assert Headline().bounds({"accuracy": 0.5, "accuracy/low": 0.2, "accuracy/high": 0.8}) == (0.2, 0.8)
    assert Headline().bounds(UNJUDGED) is None
