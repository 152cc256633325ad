"""A policy's settings: autocast, checkpointing, attention by name, entropy, and the models it refuses."""

import pytest
import torch

from proxima.model.policy import Policy
from tests.model.rows import MIXED, loaded, plain_logits, policy, rows, trained
from tests.tiny import KINDS, tiny


@pytest.mark.parametrize(("kind", "attention"), [*((kind, "packed") for kind in KINDS), ("qwen2", "padded")])
def test_bf16_autocast_on_float32_weights(kind, attention):
    trajectories = rows(*MIXED)
    exact = policy(kind)
    low = policy(kind, attention=attention, compute_dtype=torch.bfloat16)
    a, wide = trained(exact, trajectories)
    b, narrow = trained(low, trajectories)
    assert b.dtype == torch.float32 and all(p.dtype == torch.float32 for p in low.model.parameters())
    assert 1e-4 < (a - b).abs().mean() < 0.05 and (a - b).abs().max() < 0.4
    assert narrow.keys() == wide.keys() == dict(exact.model.named_parameters()).keys()
    for name, gradient in narrow.items():
        assert gradient.dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.flatten(), wide[name].flatten(), dim=0)
        assert cosine > 0.98, name


@pytest.mark.parametrize(("kind", "share"), [*((kind, True) for kind in KINDS), ("llama", False), ("gpt2", False)])
def test_gradient_checkpointing_changes_nothing(kind, share):
    trajectories = rows(*MIXED)
    plain, gradients = trained(policy(kind, share_prompt=share), trajectories)
    saved = policy(kind, share_prompt=share, gradient_checkpointing=True)
    calls = []
    block = next(m for n, m in saved.backbone.named_modules() if n in ("layers.0.mlp", "h.0.mlp"))
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    again, recomputed = trained(saved, trajectories)
    assert len(calls) == 2, "the block must have been run again in the backward pass"
    assert torch.equal(again, plain)
    assert recomputed.keys() == gradients.keys() == dict(saved.model.named_parameters()).keys()
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-7)


def test_entropy_of_the_policy():
    trajectories = rows(*MIXED, temperature=(1.0, 0.5))
    runner = policy("llama")
    with torch.no_grad():
        out = runner(runner.pack(trajectories), frozenset({"entropy"}))
        plain = [plain_logits(tiny("llama"), row).softmax(dim=1) for row in trajectories]
        expected = [torch.special.entr(p).sum(dim=1) for p in plain]
    torch.testing.assert_close(out.entropy, torch.cat(expected), rtol=0, atol=5e-5)


def test_a_head_that_is_not_linear_is_refused():
    qwen2 = loaded("qwen2")
    qwen2.model.lm_head = torch.nn.Sequential(qwen2.model.lm_head)
    with pytest.raises(ValueError, match="its output head is a Sequential, not a linear layer"):
        Policy(qwen2)
