from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import here, proxima

if TYPE_CHECKING:
    from .verified_records import Verified

__all__ = ["here", "proxima"]  # fixtures


@pytest.fixture(scope="session")
def golden() -> "dict[str, Verified]":
    """Every golden record by its name, verified once."""
    from .verified_records import verified_records  # torch; what starts the test processes loads this file too

    return verified_records()
