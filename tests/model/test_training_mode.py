"""The pass that trains is the model's own: whatever its settings draw in training mode is off, with gradient
checkpointing too. `test_every_type` has the same of every type of transformers."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from proxima.data import FieldError, UserError
from proxima.data.trajectory import Trajectory
from proxima.model.adapters.lora import Lora, attach
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.model.proof import proof_of
from proxima.model.recompute import recomputes
from proxima.model.scalar_model import ScalarModel
from scripts.family_sweep import DRAWN
from tests.model.families import DENSE, FAMILIES
from tests.model.rows import MIXED, gradients_of, plain_log_prob, rows
from tests.tiny import drawn, tiny_tokenizer

PHIMOE = (PhimoeForCausalLM, PhimoeConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2))
DRAWING = {"Llama": 1, "GPT-2": 4, "Mixtral": 2, "DeepSeek-V3": 1, "Phi-MoE": 3}  # kind → settings that draw
KINDS = {"Phi-MoE": PHIMOE, **FAMILIES}


def in_training_mode(kind: str, adapted: bool = False) -> LoadedModel:
    """A model whose every setting of dropout and noise is .2, as `train()` leaves it."""
    model_class, config = KINDS[kind]
    config = deepcopy(config)
    names = [name for name, value in vars(config).items() if DRAWN.fullmatch(name) and isinstance(value, int | float)]
    assert len(names) == DRAWING[kind], names
    for name in names:
        setattr(config, name, 0.2)
    model = drawn(model_class, config, seed=0)
    if adapted:
        attach(model, Lora(rank=2), seed=0)
    return LoadedModel(model=model.train(), tokenizer=tiny_tokenizer(), path=kind)


def passes(policy: Policy, items: list[Trajectory]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log-probs of two passes, which must be equal, and the gradients of the second."""
    first = policy(policy.pack(items)).log_prob
    again = policy(policy.pack(items)).log_prob
    assert torch.equal(first, again)
    policy.model.zero_grad()
    again.sum().backward()
    return again.detach(), gradients_of(policy.model)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("kind", DRAWING)
def test_two_passes_are_equal_and_are_the_model(kind, adapted):
    items = rows(*MIXED)
    alone = in_training_mode(kind, adapted).model.eval()
    with torch.no_grad():
        expected = torch.cat([plain_log_prob(alone, row) for row in items])
    whole, gradients = passes(Policy(in_training_mode(kind, adapted)), items)
    assert (whole - expected).abs().max() < 3e-5  # nats
    recomputing = Policy(in_training_mode(kind, adapted), gradient_checkpointing=True)
    assert sum(map(recomputes, recomputing.model.modules())) == 2  # layers
    again, recomputed = passes(recomputing, items)
    assert torch.equal(again, whole)
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_critic_is_not_random(checkpointing):
    def critic() -> ScalarModel:
        loaded = in_training_mode("Llama")
        loaded.model.score = nn.Linear(loaded.model.config.hidden_size, 1, bias=False)
        with torch.no_grad():
            loaded.model.score.weight.fill_(0.1)
        return ScalarModel(loaded, gradient_checkpointing=checkpointing)

    items = rows(*MIXED)
    first, second = critic(), critic()
    with torch.no_grad():
        assert torch.equal(first.values(first.pack(items)), second.values(second.pack(items)))


def test_a_model_that_draws_in_eval_mode_is_refused(monkeypatch):
    plain = LlamaMLP.forward

    def dropping(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(plain(self, x), 0.2)

    monkeypatch.setattr(LlamaMLP, "forward", dropping)
    model = LlamaForCausalLM(deepcopy(FAMILIES["Llama"][1]))
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}  # proven by no other test
    with pytest.raises(UserError, match=r"two passes of a small copy over the same tokens are \S+ nats apart"):
        proof_of(model)


def test_a_layer_that_can_not_be_recomputed_is_refused(monkeypatch):
    """Its second run, in the backward pass, gives other shapes."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    plain, calls = GPT2MLP.forward, []

    def once(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.requires_grad)
        kept = plain(self, x)
        return kept * kept.detach().abs().clamp(min=1).pow(0) if len(calls) % 2 else kept

    model = GPT2LMHeadModel(deepcopy(FAMILIES["GPT-2"][1]))
    model.config.initializer_range = 0.017  # proven by no other test
    proof = proof_of(model)
    monkeypatch.setattr(GPT2MLP, "forward", once)
    assert proof.problem("packed", recompute=True)


def test_a_model_without_layers_to_recompute_is_refused():
    from transformers import GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM

    config = GPTNeoXJapaneseConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    proof = proof_of(GPTNeoXJapaneseForCausalLM(config))
    assert proof.problem("padded") is None
    with pytest.raises(FieldError, match=r"=True is not possible: a gpt_neox_japanese has no layers that can be"):
        proof.attention(recompute=True)
