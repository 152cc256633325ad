"""Cases that `make test` leaves to `make test-all`, because a small test fails with the same fault."""

from collections.abc import Iterable
from typing import Any

import pytest


def campaign(sibling: str, cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, as campaigns; `sibling` is the id of a test, or that of a function of which a case is small."""
    mark = pytest.mark.campaign(sibling)
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=mark) for case in cases]
