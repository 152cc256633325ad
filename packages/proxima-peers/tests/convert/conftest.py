import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from proxima.config.resolution import resolve
from proxima.config.resolved import nested
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Leftover

EXAMPLES = Path(__file__).parents[1] / "examples"


def names(leftovers: Iterable[Leftover]) -> set[str]:
    return {option.name for option in leftovers}


def why(leftovers: Iterable[Leftover]) -> dict[str, str]:
    return {option.name: option.why for option in leftovers}


def listed(done: Draft) -> dict[str, set[str]]:
    """The options in each list of a conversion."""
    return {kind: names(getattr(done, kind)) for kind in ("missing", "unsupported", "unknown", "ignored")}


def options_file(folder: Path, options: dict[str, Any]) -> Path:
    """A file of options, nested or with dotted names."""
    file = folder / "options.json"
    file.write_text(json.dumps(nested(options.items())))
    return file


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Draft]:
    """`converted("trl", {"beta": 0.1})` converts a mapping of options; a nested one, or with dotted names."""

    def run(peer: str, options: dict[str, Any]) -> Draft:
        return convert(options_file(tmp_path, options), peer)

    return run


@pytest.fixture
def specs(converted: Callable[..., Draft]) -> Callable[..., Any]:
    """The resolved `algorithm` section of converted options."""

    def run(peer: str, options: dict[str, Any]) -> Any:
        return resolve(converted(peer, options).filled).config.algorithm

    return run
