from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import TINY

RECIPE = TINY.partition("eval:")[0]  # without evaluations, and with any number of threads


@pytest.fixture
def sweep_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> Callable[[str], Path]:
    """`sweep_file("grid: …")` writes it below `recipe: tiny.yaml`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(model=tiny_model("llama")))

    def write(text: str, head: str = "recipe: tiny.yaml\n") -> Path:
        path = Path("mine.yaml")
        path.write_text(head + text, encoding="utf-8")
        return path

    return write
