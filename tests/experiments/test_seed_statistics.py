"""Student's interval, against the tables, and the running mean."""

import pytest

from proxima.experiments.cell_statistics import SeedMean, mean_over_seeds, smoothed, t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-5)


def test_what_is_missing_does_not_count():
    assert mean_over_seeds([None, 2.0, float("nan")]) == SeedMean(2.0, None, 1)
    assert mean_over_seeds([2.0]).low == 2.0
    assert mean_over_seeds([None]) is None
    assert mean_over_seeds([3.0, 3.0]).half == 0.0


def test_a_curve_is_smoothed_over_a_tenth_of_it_unless_it_is_short():
    assert smoothed([1.0, 5.0, 0.0]) == [1.0, 5.0, 0.0]
    values = [float(i % 2) for i in range(20)]
    assert smoothed(values)[0] == 0.5
    assert smoothed(values)[1:3] == pytest.approx([1 / 3, 2 / 3])
    assert smoothed([float(i == 30) for i in range(60)])[26:34] == [0.0, *[1 / 7] * 7]
