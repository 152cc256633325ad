import json
import shutil
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


@pytest.fixture(scope="session")
def one_layer(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, whose weights nobody reads: a rehearsal needs its config alone."""
    folder = tmp_path_factory.mktemp("rehearsal") / "model"
    shutil.copytree(tiny_model("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    return folder


@pytest.fixture
def rehearse(process: ProcessPoolExecutor, tiny_model: Callable[[str], Path], one_layer: Path) -> Callable[..., Any]:
    """`rehearse(function, …, recipe, overrides)` calls a function of `worker` on a Qwen3 of one layer, or another
    `kind`, of two."""

    def call(function: Callable[..., Any], *arguments: Any, kind: str = "") -> Any:
        *before, recipe, overrides = arguments[: _recipe_at(arguments) + 2]
        rest = arguments[_recipe_at(arguments) + 2 :]
        model = str(tiny_model(kind) if kind else one_layer)
        words = ["train.tokens_per_micro_batch=100", *(word.replace("MODEL", model) for word in overrides)]
        path = str(ROOT / "recipes" / recipe)
        return process.submit(function, *before, path, [f"model.path={model}", *words], *rest).result(timeout=300)

    return call


def _recipe_at(arguments: Any) -> int:
    return next(i for i, value in enumerate(arguments) if isinstance(value, str) and value.endswith(".yaml"))
