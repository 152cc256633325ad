"""The time left, and a machine that other work keeps busy."""

import pytest

from proxima.runtime.watch.step_notes import CoreShare, seconds_left


def test_the_time_left_follows_the_last_steps():
    assert seconds_left([3.0] * 12 + [12.0, 13.0, 20.0], 25) == 25 * 15.0
    assert seconds_left([4.0] * 40 + [60.0], 10) == pytest.approx(10 * 68 / 3)  # the median would say 40 s
    assert seconds_left([5.0], 3) == 15.0
    assert seconds_left([], 3) is None


def test_a_machine_that_stays_busy_is_named_once():
    share = CoreShare()
    said = [share.add(2.0, waited) for waited in (0.1, 4.0, 0.1, 2.0, 2.0, 2.0)]
    assert [bool(text) for text in said] == [False, False, True, False, False, False]
    assert "waited for a core 41% of the time in the last 3 steps" in said[2]  # 4.2 of 10.2 s


@pytest.mark.parametrize("step", [(2.0, 0.6), (0.1, 1.5), (0.0, 0.0)])  # few waits, short steps, no counter
def test_a_quiet_machine_is_not_named(step):
    share = CoreShare()
    assert [share.add(*step) for _ in range(9)] == [""] * 9
