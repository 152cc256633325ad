"""The capacity formula: AReaL's numbers, and what must hold whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.rollout.prompt_limits import InFlightLimit

SIZES = {"prompts": st.integers(1, 9), "concurrent": st.integers(1, 20), "max_lag": st.integers(1, 5)}
ADMISSIONS = st.builds(InFlightLimit, **SIZES, steps=st.integers(0, 12))
COUNTS = st.tuples(*(st.integers(0, n) for n in (12, 80, 80, 80)))


def counts(numbers):
    finished, accepted, scoring, generating = numbers
    return {"finished": finished, "accepted": accepted, "running": scoring + generating, "generating": generating}


@pytest.mark.parametrize(
    ("finished", "accepted", "running", "generating", "capacity"),
    [
        (0, 0, 0, 0, 6),  # the engine's places
        (0, 8, 4, 4, 0),  # (2 + 0 + 1) * 4 = 12 are on their way
        (0, 8, 3, 3, 1),
        (1, 8, 4, 4, 2),  # one step more: 4 more may come, and 2 places are free
        (1, 8, 8, 2, 0),  # 6 wait for their rewards: the engine is free, the lag is not
        (9, 38, 1, 1, 1),  # the run needs 40
        (0, 20, 8, 8, 0),  # never fewer than none
    ],
)
def test_worked_examples(finished, accepted, running, generating, capacity):
    limit = InFlightLimit(prompts=4, concurrent=6, max_lag=2, steps=10)
    assert limit.capacity(**counts((finished, accepted, running - generating, generating))) == capacity


@given(ADMISSIONS, COUNTS)
def test_a_stall_is_the_lag_alone(limit, numbers):
    expected = counts(numbers)
    if limit.stalled(**expected):
        assert limit.capacity(**expected) == 0
        assert expected["generating"] < limit.concurrent
        further = expected | {"finished": expected["finished"] + 100}
        assert limit.capacity(**further) > 0
