"""Tests that need a sandbox are skipped where it does not work."""

import pytest

from proxima.process.sandbox import bubblewrap_problem

needs_bubblewrap = pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem())
