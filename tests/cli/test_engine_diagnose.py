"""`proxima engine diagnose`: faults that are planted in an engine are named, each by its own line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.http.faulty_vllm import FAULTS, HEALTHY, TRUNCATED, start_faulty
from tests.engine.serve.programs import fake_program

SERVED = """\
model: {{path: {model}, compute_dtype: float32, max_length: 128}}
task: {{kind: arithmetic, low: 1, high: 9, size: 40}}
reward: number
algorithm: cppo
engine: {{kind: vllm, serve: {{executable: {program}}}}}
sampling: {{max_tokens: 12}}
train: {{steps: 2, prompts_per_step: 2, completions_per_prompt: 2, optimizer: {{lr: 1e-4}}}}
runtime: {{threads: 1}}
"""
OF_RECIPE = {  # what the recipe of a fault has besides
    "log-probs before top-p": ["sampling.top_p=0.8"],
    "fp8 cache": ["engine.serve.arguments=[--kv-cache-dtype, fp8]"],
}


@pytest.fixture
def diagnosed(here: Path, tiny_model: Any, done: Callable[..., str], monkeypatch: Any) -> Callable[..., Any]:
    """`diagnosed(fault, *words)`: what the command says of a server with a fault, as JSON."""
    monkeypatch.setattr("proxima.engine.http.weights.weight_folders.SHARED_MEMORY", here)
    monkeypatch.setattr("proxima.engine.http.weights.to_vllm.UPDATE_POLLS", 0)
    (here / "served.yaml").write_text(SERVED.format(model=tiny_model("llama"), program=fake_program(here)))

    def diagnose(fault: str, *words: str) -> Any:
        monkeypatch.setattr("proxima.engine.http.engine.start_servers", start_faulty(fault))
        overrides = OF_RECIPE.get(fault, [])
        return json.loads(done("engine", "diagnose", "served.yaml", *overrides, "--prompts", "6", "--json", *words))

    return diagnose


@pytest.mark.slow
def test_a_healthy_server_has_no_fault(diagnosed: Callable[..., Any]) -> None:
    assert diagnosed(HEALTHY)["found"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("line", "fault"), [*FAULTS.items(), ("sampling: the stated distribution", TRUNCATED)])
def test_a_planted_fault_is_named_by_its_own_line(line: str, fault: str, diagnosed: Callable[..., Any]) -> None:
    found = diagnosed(fault)["found"]
    print("FOUND", fault, found)
    assert line in found
