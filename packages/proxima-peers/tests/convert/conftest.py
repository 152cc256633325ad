import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxima.config import Resolved, resolve
from proxima_peers.convert.conversion import Conversion, convert

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., Conversion]:
    """`converted("trl", {"beta": 0.1})` converts a mapping of options; a nested one, or with dotted names."""

    def run(peer: str, options: dict[str, Any]) -> Conversion:
        nested: dict[str, Any] = {}
        for name, value in options.items():
            *parents, last = name.split(".")
            here = nested
            for part in parents:
                here = here.setdefault(part, {})
            here[last] = value
        (tmp_path / "options.json").write_text(json.dumps(nested))
        return convert(tmp_path / "options.json", peer)

    return run


@pytest.fixture
def specs(converted: Callable[..., Conversion]) -> Callable[..., Any]:
    """The resolved `algorithm` section of converted options."""

    def run(peer: str, options: dict[str, Any]) -> Any:
        return resolve(converted(peer, options).recipe).config.algorithm

    return run


@pytest.fixture
def example() -> Callable[[str, str], tuple[Conversion, Resolved]]:
    """An example file, converted and resolved."""

    def run(name: str, peer: str) -> tuple[Conversion, Resolved]:
        done = convert(EXAMPLES / name, peer)
        return done, resolve(done.recipe)

    return run
