"""The idle time of the engine."""

from collections.abc import Callable


class IdleTime:
    """The seconds in which something kept the engine idle, since the first `update`.

    Args:
        now: a clock, in seconds.
        causes: those that hold at the beginning.
    """

    def __init__(self, now: Callable[[], float], *causes: str) -> None:
        self.now, self._sum, self._causes = now, 0.0, set(causes)
        self._since: float | None = None

    def update(self, cause: str, holds: bool) -> None:
        """Set whether a cause holds from now on."""
        self._sum = self.seconds
        (self._causes.add if holds else self._causes.discard)(cause)
        self._since = self.now() if self._causes else None

    @property
    def seconds(self) -> float:
        """The idle time so far."""
        return self._sum + (0.0 if self._since is None else self.now() - self._since)
