from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lab.rehearsal.worker import pool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    with pool() as executor:
        yield executor


@pytest.fixture
def rehearse(process: ProcessPoolExecutor, tiny_model: Callable[[str], Path]) -> Callable[..., Any]:
    """`rehearse(function, …, recipe, overrides)` calls a function of `worker` on a tiny Qwen3, or another `kind`."""

    def call(function: Callable[..., Any], *arguments: Any, kind: str = "qwen3") -> Any:
        *before, recipe, overrides = arguments[: _recipe_at(arguments) + 2]
        rest = arguments[_recipe_at(arguments) + 2 :]
        model = str(tiny_model(kind))
        words = ["train.tokens_per_micro_batch=100", *(word.replace("MODEL", model) for word in overrides)]
        path = str(ROOT / "recipes" / recipe)
        return process.submit(function, *before, path, [f"model.path={model}", *words], *rest).result(timeout=300)

    return call


def _recipe_at(arguments: Any) -> int:
    return next(i for i, value in enumerate(arguments) if isinstance(value, str) and value.endswith(".yaml"))
