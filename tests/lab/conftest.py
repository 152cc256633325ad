from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """\
model: {{path: {model}, compute_dtype: float32}}
task: {{kind: arithmetic, low: 1, high: 9, size: 20}}
reward: number
algorithm: cppo
engine: {{slots: 8, dtype: float32}}
sampling: {{max_tokens: 4}}
train: {{steps: 2, prompts_per_step: 2, completions_per_prompt: 2, optimizer: {{lr: 1e-4}}}}
"""


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
