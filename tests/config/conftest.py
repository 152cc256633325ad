from collections.abc import Callable
from pathlib import Path

import pytest

BASE = """\
model: {path: org/model}
task: {kind: tests.config.fakes:Sums}
reward: number
algorithm: cppo
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`recipe(text, name)` writes a recipe into an empty current folder and returns its name; no text: the smallest one
    there is."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = BASE, name: str = "run.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write
