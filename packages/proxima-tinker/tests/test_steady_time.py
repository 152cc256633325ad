import time

import pytest

from proxima_tinker import service, service_app, steady_time


@pytest.mark.parametrize("hours", [10, -1, -24 * 365 * 56])
def test_what_lasts_an_hour_lasts_an_hour_when_the_clock_is_set(hours, monkeypatch):
    """Of a checkpoint and of an address of a file; each is asked for before the jump, and looked at after it."""
    due, until, wall = service.date(3600), service_app.now() + 3600, time.time()
    monkeypatch.setattr(time, "time", lambda: wall + 3600 * hours)
    assert service.date() < due and service_app.now() < until
    elapsed = steady_time._elapsed()
    monkeypatch.setattr(steady_time, "_elapsed", lambda: elapsed + 3601)
    assert service.date() > due and service_app.now() > until


def test_a_later_time_is_greater_as_a_text(monkeypatch):
    monkeypatch.setattr(steady_time, "now", lambda: 1_000_000_000.0)
    assert steady_time.date() == "2001-09-09T01:46:40.000000+00:00"
    assert steady_time.date() < steady_time.date(0.5) < steady_time.date(1)
