"""When a held-out figure no longer improves."""

import pytest

from proxima.data import FieldError
from proxima.evaluation.plateau import Plateau


def evaluations(*values, key="accuracy", **more):
    return [{"step": 5 * i, key: value, **more} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "ends"),
    [
        ((0.1, 0.2, 0.2), 1, 0, True),
        ((0.1, 0.2, 0.2), 2, 0, False),
        ((0.1, 0.2, 0.2, 0.1), 2, 0, True),
        ((0.1, 0.2, 0.1, 0.3), 2, 0, False),
        ((0.3, 0.2), 1, 0, True),
        ((0.3,), 1, 0, False),
        ((), 1, 0, False),
        ((0.10, 0.14, 0.18), 2, 0.05, False),  # together more than min_delta over the best
        ((0.10, 0.12, 0.14), 2, 0.05, True),
        ((0.3, None, None, 0.2), 2, 0, False),  # no value, no evaluation
        ((0.3, None, 0.1, 0.2), 2, 0, True),
    ],
)
def test_the_last_evaluations_without_an_improvement(values, patience, min_delta, ends):
    assert bool(Plateau(patience=patience, min_delta=min_delta).reached(evaluations(*values))) is ends


def test_lower_is_better_for_a_loss_and_the_best_is_named():
    rule = Plateau(patience=2, min_delta=0.1)
    assert rule.reached(evaluations(2.0, 1.5, 1.2, key="loss", metric="loss")) == ""
    line = rule.reached(evaluations(2.0, 1.5, 1.45, 1.48, key="loss", metric="loss"))
    assert line == "plateau: loss has not improved by more than 0.1 in 2 evaluations, its best is 1.5 at step 5"


def test_any_key_of_the_records_can_be_named():
    records = [{"step": i, "accuracy": 0.1 * i, "math/accuracy": 0.5} for i in range(3)]
    assert Plateau(patience=2).reached(records) == ""
    line = Plateau(patience=2, metric="math/accuracy").reached(records)
    assert "math/accuracy has not improved in 2 evaluations" in line
    assert Plateau(patience=2, metric="acc").unknown(records[0]) == ""
    assert "no such metric; it has accuracy, math/accuracy" in Plateau(patience=2, metric="maths").unknown(records[0])


def test_settings_that_make_no_rule_are_refused():
    for fields, name in (({"patience": 0}, "patience"), ({"patience": 1, "min_delta": -1}, "min_delta")):
        with pytest.raises(FieldError, match=name):
            Plateau(**fields)
