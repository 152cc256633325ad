import json
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.warm import WarmPopen

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = "import sys; sys.path.insert(0, sys.argv[2]); from worker import answer; answer(int(sys.argv[1]))"


@pytest.fixture(scope="session")
def process() -> Iterator[Connection]:
    """A process that rehearses: a fake device changes it for good."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(Path(__file__).parent)]
    with WarmPopen(command, pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        yield ours
        ours.close()


@pytest.fixture(scope="session")
def one_layer(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, whose weights nobody reads: a rehearsal needs its config alone."""
    folder = tmp_path_factory.mktemp("rehearsal") / "model"
    shutil.copytree(tiny_model("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    return folder


@pytest.fixture(scope="session")
def rehearse(process: Connection, tiny_model: Callable[[str], Path], one_layer: Path) -> Callable[..., Any]:
    """`rehearse(name, recipe, overrides, …)` calls a function of `worker` on a Qwen3 of one layer, or another
    `kind`, of two, or the model in a folder; once for the same arguments."""
    known: dict[str, Any] = {}

    def call(name: str, recipe: str, overrides: list[str], *more: Any, kind: str = "") -> Any:
        model = kind if Path(kind).is_dir() and kind else str(tiny_model(kind) if kind else one_layer)
        words = ["train.tokens_per_micro_batch=100", *(word.replace("MODEL", model) for word in overrides)]
        arguments = (str(ROOT / "recipes" / recipe), [f"model.path={model}", *words], *more)
        key = f"{name}{arguments}"
        if key not in known:
            process.send((name, arguments))
            assert process.poll(300), "no answer in five minutes"
            error, known[key] = process.recv()
            assert error is None, error
        return known[key]

    return call
