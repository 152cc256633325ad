"""A server that has too much to do: how long it is left alone, and for how long it has been so."""

from proxima.data.random import BUSY_SERVER, mix

FIRST, LONGEST = 0.5, 60.0  # seconds


def busy_seconds(times: int, retry_after: float | None, key: int = 0) -> float:
    """Seconds to leave a busy server alone: what it asks for, else twice as long each time, up to `LONGEST` and with up
    to half of it left out at random, so that the replicas of a run do not come back together.

    Args:
        times: how often in a row it was busy, this one included.
        retry_after: what it asks for.
        key: of the draw.
    """
    if retry_after is not None:
        return min(retry_after, LONGEST)
    seconds = min(FIRST * 2.0 ** min(times - 1, 30), LONGEST)
    return seconds * (1 - mix(BUSY_SERVER, key, times) / 2**65)


class BusyServer:
    """What is known of one server. All times are those of the caller's clock."""

    def __init__(self) -> None:
        self.waiting = False  # it is to be left alone
        self.since: float | None = None  # it has served nothing from then on
        self.times = 0  # in a row
        self.reason = ""

    def refused(self, started_at: float, reason: str, retry_after: float | None, key: int) -> float | None:
        """Note that it was too busy for a call.

        Returns: seconds to leave it alone from now on; None: it is left alone already.
        """
        self.begins(started_at, reason)
        if self.waiting:
            return None
        self.waiting = True
        self.times += 1
        return busy_seconds(self.times, retry_after, key)

    def begins(self, now: float, reason: str) -> None:
        """Note that it was too busy, from then on if it had done something before."""
        self.since = now if self.since is None else self.since
        self.reason = reason

    def served(self) -> None:
        """It has done something."""
        self.since, self.times = None, 0
