"""Running means of a curve."""

import pytest

from proxima.experiments.running_mean import running_mean, smoothed


def test_running_mean():
    assert running_mean([0.0, 3.0, 6.0, 0.0, 0.0, 9.0]) == [1.5, 3, 3, 2, 3, 4.5]
    assert running_mean([1.0, None, 3.0]) == [1.0, None, 3.0]


def test_a_short_curve_stays_as_it_is():
    assert smoothed([1.0, 5.0, 0.0]) == [1.0, 5.0, 0.0]
    values = [float(i % 2) for i in range(20)]
    assert smoothed(values)[0] == 0.5
    assert smoothed(values)[1:3] == pytest.approx([1 / 3, 2 / 3])
    assert smoothed([7.0] * 30) == [7.0] * 30
