"""`proxima engine diagnose`: faults that are planted in an engine are named, each by its own line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from proxima.engine.serve.server_variations import ONE_DEVICE, RUNNING
from proxima.engine.variations import NO_GRAPHS
from tests.engine.http.faulty_vllm import FAULTS, HEALTHY, start_faulty
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
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
def diagnosed(here, tiny_model, done, monkeypatch):
    """`diagnosed(fault, *words)`: what the command says of a server with a fault, as JSON."""
    monkeypatch.setattr("proxima.engine.http.weights.weight_folders.SHARED_MEMORY", here)
    monkeypatch.setattr("proxima.engine.http.weights.to_vllm.UPDATE_POLLS", 0)
    (here / "served.yaml").write_text(SERVED.format(model=tiny_model("llama"), program=fake_program(here)))

    def diagnose(fault, *words):
        monkeypatch.setattr("proxima.engine.http.engine.start_servers", start_faulty(fault))
        overrides = OF_RECIPE.get(fault, [])
        return json.loads(done("engine", "diagnose", "served.yaml", *overrides, "--prompts", "6", "--json", *words))

    return diagnose


@pytest.mark.slow
def test_a_healthy_server_has_no_fault(diagnosed: Callable[..., Any]) -> None:
    found = diagnosed(HEALTHY)
    assert found["found"] == []
    assert found["recipe"]["scored"]["mean"]["value"] < 1e-5
    reasons = {row["name"]: row["why_not"] for row in found["rows"] if row["verdict"] == "not tried"}
    assert reasons["CUDA graphs: off"] == NO_GRAPHS and reasons["TP: 1"] == ONE_DEVICE


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stale head", "float16 by auto"])  # of the weights, and of a setting
def test_a_planted_fault_is_named_by_its_own_line(fault: str, diagnosed: Callable[..., Any]) -> None:
    assert FAULTS[fault] in diagnosed(fault)["found"]


@pytest.mark.slow
@pytest.mark.campaign("tests/cli/test_engine_diagnose.py::test_a_planted_fault_is_named_by_its_own_line")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_named_by_its_own_line(fault: str, diagnosed: Callable[..., Any]) -> None:
    assert FAULTS[fault] in diagnosed(fault)["found"]


@pytest.mark.slow
def test_a_server_that_is_running_keeps_its_settings_and_its_weights(
    recipe: Callable[..., str], tiny_model: Any, done: Callable[..., str], here: Path, monkeypatch: Any
) -> None:
    """What is perturbed to see that weights arrive is put back."""
    monkeypatch.setattr("proxima.engine.http.weights.weight_folders.SHARED_MEMORY", here)
    with RawServer(ModelVllm(str(tiny_model("llama")))) as server:
        before = [weight.detach().clone() for weight in server.fake.model.parameters()]
        words = ["engine=vllm", f"engine.url={server.url}", "--prompts", "3", "--json"]
        found = json.loads(done("engine", "diagnose", recipe(), *words))
        after = list(server.fake.model.parameters())
    assert found["found"] == []
    assert {row["why_not"] for row in found["rows"] if row["what"] == "engine"} == {RUNNING}
    assert {row["verdict"] for row in found["rows"] if row["what"] == "requests"} == {"same"}
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.slow
def test_a_trainer_whose_weights_are_in_bfloat16_has_no_other_precision(
    recipe: Callable[..., str], done: Callable[..., str]
) -> None:
    words = ["model.dtype=bfloat16", "model.compute_dtype=bfloat16", "--prompts", "2", "--json"]
    found = json.loads(done("engine", "diagnose", recipe(), *words))
    (trainer,) = (row for row in found["rows"] if row["what"] == "trainer")
    assert trainer["verdict"] == "not tried"


@pytest.mark.slow
@pytest.mark.campaign("tests/cli/test_engine_diagnose.py::test_the_report_names_the_fields_to_set_and_their_cost")
def test_two_settings_that_undo_the_same_fault_add_nothing(diagnosed: Callable[..., Any]) -> None:
    """Without a prefix cache there is none in fp8."""
    found = diagnosed("fp8 cache")
    (pair,) = found["pairs"]
    assert sorted(pair["names"]) == ["prefix cache: off", "quantised cache: off"]
    assert pair["more_than_sum"]["high"] < 0 and pair["less"]["low"] > 0


@pytest.mark.slow
def test_the_report_names_the_fields_to_set_and_their_cost(
    recipe: Callable[..., str], done: Callable[..., str]
) -> None:
    """The local engine, with weights in eight bits and noise on its logits: each hides a part of the other."""
    engine = ["engine.weights=int8", "engine.noise=0.03"]
    lines = done("engine", "diagnose", recipe(), *engine, "--prompts", "8").splitlines()
    (weights,) = (line for line in lines if line.startswith("found"))
    assert weights.startswith("found      engine: quantised weights: off: less by ")
    assert re.search(r", at \d+\.\d\d × the tokens a second; set engine.weights=null$", weights)
    assert lines[-1].strip() == "then diagnose again: a small cause hides behind a large one"
    assert any(line.startswith("not tried  engine: CUDA graphs: off: ") for line in lines)
    names = "noise on the logits: off and quantised weights: off", "quantised weights: off and noise on the logits: off"
    (pair,) = (line for line in lines if line.startswith(tuple(f"pair       {name}: less by" for name in names)))
    more = re.search(r"; [-.\d]+ \[([-.\d]+), [-.\d]+\] more than the sum", pair)
    assert more is not None and float(more[1]) > 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--prompts", "0"], "error: --prompts=0 must be >= 1"),
        (["--prompts", "1", "--samples", "1"], "error: --prompts=1 must be >= 2 with one sample each: intervals need"),
        (["engine.slot=3"], "error: engine.slot=3 (command line): 'local' has no field 'slot'; did you mean 'slots'?"),
        (["placement=torchrun"], "error: placement"),
        (["model.path=models/missing"], "error: model.path=models/missing (command line): does not exist"),
    ],
)
def test_what_can_not_be_diagnosed_is_one_line(
    words: list[str], line: str, recipe: Callable[..., str], refusal: Callable[..., str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("proxima.model.model_source.ModelSource.load", lambda _: pytest.fail("weights were loaded"))
    assert refusal("engine", "diagnose", recipe(), *words).startswith(line)
