"""Tests that need a sandbox are skipped where it does not work."""

from pathlib import Path

import pytest

import proxima
from proxima.process.sandbox import bubblewrap_problem

needs_bubblewrap = pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem())


def beside_code(*names: str) -> list[str]:
    """What a code finds in its folder, /tmp: these files, and where the checkout is below /tmp, the folder in which it
    is, since proxima's own modules are shown to the code's process at their place."""
    parts = Path(proxima.__file__).parts
    return sorted([*names, *parts[2:3]] if parts[:2] == ("/", "tmp") else names)
