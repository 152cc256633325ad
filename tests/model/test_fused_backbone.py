"""The decoder stack of our own against Hugging Face's modules, and both against float64."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
import transformers as hf

from proxima.data.trajectory import Trajectory
from proxima.kernels.compiled import unavailable
from proxima.model import attention
from proxima.model import fused as fused_module
from proxima.model.fused import is_plain
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.model.recompute import recompute_layers
from tests.model.rows import forked, opened, rows, trained
from tests.tiny import drawn, tiny_tokenizer

SIZES = {"vocab_size": 272, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SIZES)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SIZES)),
}
ROWS = rows((3, (1, 9, 5)), (40, (33, 2)), (1, (70,)))

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")


def model_of(kind: str) -> hf.PreTrainedModel:
    made, config = MODELS[kind]
    return drawn(made, deepcopy(config), 1)


def run(
    model: hf.PreTrainedModel, compute: torch.dtype = torch.bfloat16, items: Sequence[Trajectory] = ROWS, **settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their weighted sum by all weights."""
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), path="tiny")
    log_prob, gradients = trained(Policy(loaded, compute_dtype=compute, **settings), items)
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    return log_prob.double(), torch.cat([gradient.double().flatten() for gradient in gradients.values()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_nearer_to_the_truth_than_the_modules(kind, monkeypatch):
    model = model_of(kind)
    truth = run(deepcopy(model).double(), torch.float64)
    calls = []
    fused = fused_module.fused_states
    monkeypatch.setattr(attention, "fused_states", lambda *a: calls.append(fused(*a)) or calls[-1])
    ours = run(model)
    assert calls[0] is not None
    assert all(torch.equal(a, b) for a, b in zip(ours, run(model), strict=True))
    monkeypatch.setattr(attention, "fused_states", lambda *a: None)
    modules = run(model)
    for mine, theirs, exact in zip(ours, modules, truth, strict=True):
        assert 0 < distance(mine, exact) < 1.1 * distance(theirs, exact) < 0.1


def test_layers_that_run_again_change_no_bit(monkeypatch):
    model, runs = model_of("llama"), []
    plain = run(model)
    compute = fused_module._layer_states
    monkeypatch.setattr(fused_module, "_layer_states", lambda *a: runs.append(a[0]) or compute(*a))
    recompute_layers(model)
    again = run(model)
    assert len(runs) == 2 * len(model.model.layers)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "items"), [("llama", forked()), ("qwen3", opened(forked())), ("llama", opened(ROWS))])
def test_what_paths_and_prompts_begin_with_trains_as_apart(kind, items, monkeypatch):
    model, calls, fused = model_of(kind), [], fused_module.fused_states
    monkeypatch.setattr(attention, "fused_states", lambda *a: calls.append(fused(*a)) or calls[-1])
    given = {share: run(model, items=items, share_prompt=share) for share in (True, False)}
    truth = run(deepcopy(model).double(), torch.float64, items)
    assert len(calls) == 2 and calls[0] is not None
    for shared, apart, exact in zip(given[True], given[False], truth, strict=True):
        assert 0 < distance(shared, exact) < 1.1 * distance(apart, exact) < 0.1


def test_other_models_go_through_their_modules():
    hooked, frozen = model_of("llama"), model_of("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda *a: None)
    frozen.requires_grad_(False)
    windowed = model_of("qwen3")
    windowed.model.layers[0].self_attn.sliding_window = 4
    whole, backward = model_of("llama"), model_of("llama")
    whole.model.register_forward_hook(lambda *a: None)
    backward.model.layers[0].register_full_backward_pre_hook(lambda *a: None)
    others = (hooked, whole, backward, windowed, model_of("qwen2").bfloat16())
    assert not any(is_plain(other.model) for other in others)
    assert is_plain(frozen.model)


def test_frozen_weights_get_no_gradient():
    model = model_of("qwen2")
    model.model.layers[0].requires_grad_(False)
    policy = Policy(LoadedModel(model=model, tokenizer=tiny_tokenizer(), path="tiny"), compute_dtype=torch.bfloat16)
    policy(policy.pack(ROWS)).log_prob.sum().backward()
    assert all((p.grad is None) == ("layers.0." in name) for name, p in model.named_parameters())


@pytest.mark.slow
def test_float16_goes_through_the_modules():
    log_prob = run(model_of("llama"), torch.float16)[0]
    exact = run(model_of("llama").double(), torch.float64)[0]
    assert distance(log_prob, exact) < 0.005


def test_gradients_of_a_row_that_is_there_often_are_added_in_float32():
    x = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.tensor([0, 2] + [1] * 999)
    assert torch.equal(fused_module._laid_out(x, rows), x[rows])
    fused_module._laid_out(x, rows).backward(torch.full((1001, 2), 1.25, dtype=torch.bfloat16))
    assert x.grad[:, 0].tolist() == [1.25, 1248.0, 1.25]  # 1248.75, rounded once
