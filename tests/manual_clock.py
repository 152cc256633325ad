"""A clock for tests: time moves when a test says so."""

from datetime import datetime, timedelta

from proxima.runtime.watch.clock import Clock


class ManualClock(Clock):
    """Time that stands still until `advance` moves it; `start` is what `wall` says at `now() == 0`."""

    def __init__(self, start: str = "2026-01-01T00:00:00+00:00") -> None:
        self._start, self._now = datetime.fromisoformat(start), 0.0

    def now(self) -> float:
        return self._now

    def wall(self) -> str:
        return (self._start + timedelta(seconds=self._now)).isoformat(timespec="milliseconds")

    def cpu(self) -> float:
        return self._now

    def core_wait(self) -> float:
        return 0.0

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
