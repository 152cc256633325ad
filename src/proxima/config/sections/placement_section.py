"""The `placement` section: the processes in which a run computes. The kinds with several are in `ranks_section`."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from proxima.config.resolved import Findings
from proxima.config.sections import PLACEMENTS

PLACED = "the processes that compute"


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """One process."""


def placement_is_installed(placement: Any) -> Findings:
    """The package that starts the processes is installed."""
    if PLACEMENTS.holds(placement, "ray") and importlib.util.find_spec("ray") is None:
        yield "placement.kind", "needs the package ray: pip install 'proxima-rl[ray]'"
