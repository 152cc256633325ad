"""Routes that nothing records, and experts that a model lacks, are refused in one line."""

import pytest

from proxima.config.resolution import resolve
from proxima.config.sections.algorithm import check_routed
from proxima.config.validate import check
from proxima.data import FieldError
from tests.engine.helpers import saved
from tests.model.families import make

ROWS = {"model": {"path": "org/model"}, "task": "arithmetic"}
REPLAY, VLLM = "algorithm.routing_replay", "engine={kind: vllm, url: 'http://127.0.0.1:9'}"


def test_a_dense_model_has_no_load_to_balance(recipe, tiny_model):
    """Whoever has set it, by recipe, command line or default, is named."""
    folder = f"model.path={tiny_model('llama')}"
    text = "model: {path: org/model}\ntask: arithmetic\nreward: number\nalgorithm:\n  preset: cppo\n"
    name, field = recipe(f"{text}  router_balance: {{coefficient: 0.02}}\n"), "algorithm.router_balance.coefficient"
    bound = ": needs a mixture of experts of the kinds mixtral, olmoe, qwen2_moe, qwen3_moe, and model.path is of kind "
    for overrides, source in (
        ([], "=0.02 (run.yaml:6)"),
        ([f"{field}=0.1"], "=0.1 (command line)"),
        (["algorithm.router_balance=null", f"{REPLAY}=off"], None),
    ):
        problems = [str(p) for p in check(resolve(name, [folder, *overrides])) if "mixture" in p.message]
        assert problems == ([f"{field}{source}{bound}llama; leave it out, or use such a model"] if source else [])


def test_models_without_experts(recipe, tiny_model, tmp_path):
    overrides = [f"{REPLAY}=rollout", "engine.routed_experts=true", "algorithm.router_balance.coefficient=0.1"]
    for field, given in ((REPLAY, overrides), ("engine.routed_experts", overrides[1:2])):
        config = resolve(recipe(), [f"model.path={tiny_model('llama')}", *given]).config
        with pytest.raises(FieldError, match=f"{field}=.* needs a mixture of experts .* of kind llama"):
            check_routed(config)
    folder = saved(make("Qwen3-MoE"), tmp_path / "moe")
    check_routed(resolve(recipe(), [f"model.path={folder}", *overrides]).config)
    with pytest.raises(FieldError, match="model.attention='padded' has no routes"):
        check_routed(resolve(recipe(), [f"model.path={folder}", "model.attention=padded", *overrides]).config)
