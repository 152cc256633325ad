"""Compiled layers compute what the others do, and a new batch compiles nothing."""

import pytest
import torch
import transformers as hf

from proxima.data import FieldError
from proxima.model import compilation
from proxima.model.adapters.lora import Lora, attach
from proxima.model.policy import Policy
from tests.model.families import FAMILIES
from tests.model.rows import MIXED, loaded, rows
from tests.model.varlen_reference import stand_in

BATCHES = (MIXED, ((5, (3, 1)),), ((2, (4, 4, 9)), (7, (3,))))
SMALL = "tests/model/test_compilation.py::test_a_compiled_policy_is_the_same"
NEEDS = frozenset({"entropy", "entropy_gradient"})


def with_adapters(kind: str, **settings) -> Policy:
    adapted = loaded(kind)
    attach(adapted.model, Lora(rank=4, alpha=8, targets=("q_proj", "down_proj")), 0)
    return Policy(adapted, **settings)


def everything(model: Policy, shape) -> list[torch.Tensor]:
    """Outputs and gradients of a batch."""
    model.model.zero_grad(set_to_none=True)
    out = model(model.pack(rows(*shape, temperature=(0.7, 1.3))), NEEDS)
    (out.log_prob.sin().sum() + out.entropy.cos().sum()).backward()
    grads = [p.grad for _, p in model.named_parameters() if p.grad is not None]
    return [out.log_prob.detach(), out.entropy.detach(), *grads]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.campaign(f"{SMALL}[eager]", minutes=3)),
    ],
)
def test_a_compiled_policy_is_the_same(backend, monkeypatch):
    """With adapters, layers that are recomputed, and flash attention, which is a new function for each batch."""
    monkeypatch.setattr(compilation, "BACKEND", backend)
    stand_in(monkeypatch)
    settings = {"attention": "varlen", "gradient_checkpointing": True}
    plain, ours = with_adapters("qwen3", **settings), with_adapters("qwen3", **settings, compile=True)
    made = 0
    for number, shape in enumerate(BATCHES):
        for one, other in zip(everything(ours, shape), everything(plain, shape), strict=True):
            largest = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * largest)
        before, made = made, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        # the second batch has other rows of logits than the first; from there on their number is a variable
        assert made > 0 and (number < 2 or made == before)


def test_what_is_not_compiled_is_refused():
    mixture = FAMILIES["Qwen3-MoE"][1]
    with pytest.raises(FieldError, match="model.compile.*mixtures of experts"):
        compilation.check_compiles(mixture, attention="packed")
    plain = hf.LlamaConfig()
    with pytest.raises(FieldError, match="model.compile.*padded"):
        compilation.check_compiles(plain, attention="padded")
    with pytest.raises(FieldError, match="model.compile.*tensor_parallel"):
        compilation.check_compiles(plain, attention="packed", tensor_parallel=2)
    compilation.check_compiles(plain, attention="varlen")
