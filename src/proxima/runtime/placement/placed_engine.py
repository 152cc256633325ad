"""Lets rank 0 find the servers that its supervisor has started."""

import os
from dataclasses import replace
from typing import Any

URLS, KEY = "PROXIMA_ENGINE_URLS", "PROXIMA_ENGINE_KEY"  # variables of the ranks


def starts_later(placement: Any) -> bool:
    """True if the ranks' supervisor has yet to start the servers, so that they can't be asked."""
    return bool(getattr(placement, "engines", 0)) and URLS not in os.environ


def placed_engine(engine: Any) -> Any:
    """The spec of the rollout engine, pointed at the servers that a supervisor has started; unchanged without them."""
    urls = os.environ.get(URLS)
    if not urls or not hasattr(engine, "serve"):
        return engine
    return replace(engine, url=tuple(urls.split(",")), serve=None, token_env=KEY, allow_remote=True)
