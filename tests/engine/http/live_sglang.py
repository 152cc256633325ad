"""A real SGLang server for tests, on a tiny model. PROXIMA_SGLANG names its environment."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers

ENVIRONMENT = os.environ.get("PROXIMA_SGLANG")
needs_sglang = pytest.mark.skipif(
    ENVIRONMENT is None, reason="PROXIMA_SGLANG names no environment; proxima engine install sglang makes one"
)


def serve_section(**settings: Any) -> dict[str, Any]:
    """`engine.serve` of a recipe."""
    return {"environment": ENVIRONMENT, "dtype": "float32", "threads": 1} | settings


@contextmanager
def live_sglang(folder: Path, model: Path, *, routed_experts: bool = False, **settings: Any) -> Iterator[str]:
    """The URL of a server that is ended with all its processes; it takes sequences of 250 tokens."""
    options = {"max_length": 250, "key": "", "log": folder / "sglang.log", "routed_experts": routed_experts}
    with closing(start_servers("sglang", Serve(**serve_section(**settings)), model=str(model), **options)) as servers:
        yield servers.urls[0]
