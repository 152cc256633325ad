"""The lines that a call is refused with."""

from collections.abc import Callable
from typing import Any

import pytest

from proxima.data import UserError


def refused(call: Callable[..., Any], *given: Any, **more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        call(*given, **more)
    return str(caught.value).splitlines()
