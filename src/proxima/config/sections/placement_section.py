"""The `placement` section: the processes in which a run computes. The kinds with several are in `ranks_section`."""

import os
from dataclasses import dataclass

KIND = "placement.kind"
STARTED_BY = "PROXIMA_RANKS_STARTED_BY"  # set for ranks that something other than torchrun started
STARTED_AGAIN = "placement.restarts"  # in an error that already says what the ranks' supervisor will do
PLACED = "the processes that compute"


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """One process."""


def is_supervised() -> bool:
    """True if a cluster's supervisor has started this process, and restarts all ranks when one dies."""
    return STARTED_BY in os.environ
