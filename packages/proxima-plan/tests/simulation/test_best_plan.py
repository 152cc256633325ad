"""Which of the plans that fit is simulated, and which run is returned."""

from types import SimpleNamespace

import pytest

from proxima_plan.simulation import scale

GIB = 1 << 30


def plan(seconds, *, fits=True, needed=1):
    memory = SimpleNamespace(fits=fits, needed=needed * GIB, memory=80 * GIB, least=0, room=0)
    return SimpleNamespace(seconds=seconds, memory=memory)


@pytest.mark.parametrize(("lag", "tried"), [(0, [1.0]), (2, [1.0, 2.0])])
def test_without_lag_the_fastest_plan_is_the_best_and_with_lag_the_best_is_found_by_trying(lag, tried, monkeypatch):
    """With lag, the rate of the engines counts too."""
    seen = []

    def simulated(config, plan, assumed, lag):
        seen.append(plan.seconds)
        return SimpleNamespace(tokens_per_second=plan.seconds)

    monkeypatch.setattr(scale, "simulate_plan", simulated)
    plans = [plan(0.5, fits=False), *map(plan, (5.0, 3.0, 1.0, 2.0, 4.0))]
    best = scale._best(None, 8, lag, plans, None)
    assert seen == tried
    assert best.tokens_per_second == max(tried)


def test_where_none_fits_the_one_that_lacks_least_says_what_it_needs():
    plans = [plan(1.0, fits=False, needed=needed) for needed in (120, 90, 100)]
    refused = scale._best(None, 8, 1, plans, None)
    assert (refused.devices, refused.lag, refused.binds) == (8, 1, "needs 90 GiB a device, which has 80")
    assert scale._best(None, 8, 1, [], None).binds == "too few for the groups of the placement"
