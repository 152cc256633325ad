"""How fast steps are made: the time left, and whether other work holds them up."""

import statistics
from collections import deque
from collections.abc import Sequence

RECENT = 3  # steps: enough to average over one that is long by chance, few enough to notice a machine that became busy
BUSY_SHARE = 0.25
LEAST_SECONDS = 6.0  # of threads that run or wait for a core, within these steps: less says nothing about the machine


def seconds_left(step_seconds: Sequence[float], steps: int) -> float | None:
    """Estimate the seconds of training left, without evaluations: the mean of the last steps times those to come.
    None before the first step.

    Args:
        step_seconds: of all finished steps.
        steps: that are left.
    """
    return statistics.mean(step_seconds[-RECENT:]) * steps if step_seconds else None


class CoreShare:
    """Tells once that the threads of a run wait for cores that other work uses."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._told = False

    def add(self, running: float, waiting: float) -> str:
        """Add the seconds that the threads of a step ran, and waited for a core. Return a warning, or nothing."""
        self._recent.append((running, waiting))
        waited, total = sum(wait for _, wait in self._recent), sum(map(sum, self._recent))
        if self._told or len(self._recent) < RECENT or total < LEAST_SECONDS or waited <= BUSY_SHARE * total:
            return ""
        self._told = True
        return (
            f"the threads of this run waited for a core {waited / total:.0%} of the time in the last {RECENT} steps: "
            "other work keeps this machine busy, and steps take longer until it ends"
        )
