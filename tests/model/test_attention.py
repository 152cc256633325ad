"""Packed sequences stay apart: every attention path against one sequence at a time, on tiny architectures."""

import pytest
import torch

from proxima.data import UserError
from proxima.model.attention import ATTENTION
from tests.campaigns import campaign
from tests.model.rows import MIXED, assert_close, forked, gradients_of, loaded, policy, reference, rows
from tests.model.varlen_reference import stand_in
from tests.tiny import tiny

PATHS = [(path, share) for path in sorted(ATTENTION) for share in (False, True) if share is False or path != "padded"]
HERE, OTHERS = "tests/model/test_attention.py", ["qwen2", "qwen3"]
TEMPERATURES = (1.0, 0.7, 1.3)


@pytest.fixture(autouse=True)
def _flash_attention_on_a_cpu(monkeypatch):
    stand_in(monkeypatch)


@pytest.mark.parametrize(("path", "share"), PATHS)
@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", *campaign(f"{HERE}::test_log_probs_equal_one_sequence_at_a_time", OTHERS)]
)
def test_log_probs_equal_one_sequence_at_a_time(kind, path, share):
    """Prompts, and what paths begin with, are run once where they are shared."""
    trajectories = [*rows(*MIXED, temperature=TEMPERATURES), *forked()]
    runner = policy(kind, attention=path, share_prompt=share)
    batch = runner.pack(trajectories)
    assert runner.share_prompt is share and (len(batch.tokens) < 0.7 * sum(map(len, trajectories))) is share
    with torch.no_grad():
        actual = runner(batch).log_prob
        expected = reference(tiny(kind), trajectories)
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    torch.testing.assert_close(actual[batch.sampled], expected[batch.sampled], rtol=0, atol=2e-5)


@pytest.mark.parametrize("share", [True, False])
def test_gradients_of_float64_are_those_of_plain_forwards(share):
    """Llama's norms and eager softmax compute in float32 whatever the model's dtype: only GPT-2 can show it."""
    trajectories = rows(*MIXED, temperature=(1.0, 0.75, 1.25))
    weight, exact = torch.linspace(-1, 1, 45, dtype=torch.float64), {"dtype": torch.float64}
    runner = policy("gpt2", share_prompt=share, compute_dtype=torch.float64, **exact)
    model = tiny("gpt2").to(**exact)
    for log_prob in (runner(runner.pack(trajectories)).log_prob, reference(model, trajectories)):
        (log_prob * weight).sum().backward()
    assert_close(gradients_of(runner.model), gradients_of(model), 1e-12)


def test_empty_batches_and_responses():
    runner = policy("llama")
    out = runner(runner.pack([]), frozenset({"entropy"}))
    assert out.log_prob.shape == out.entropy.shape == (0,)
    out = runner(runner.pack(rows((3, (0, 0)))))
    assert out.log_prob.shape == (0,) and out.entropy is None
    for path in ATTENTION:
        alone = policy("llama", attention=path)
        both = alone(alone.pack(rows((3, (0,)), (4, (1,))))).log_prob
        assert both.shape == (1,) and both.isfinite().all()


def test_packed_attention_refuses_what_it_does_not_do():
    from proxima.model.attention import packed_attention

    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="packed does not support softcap of Linear; use model.attention=padded"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None, softcap=30.0)
    with pytest.raises(UserError, match="called without segments"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None)
    model = loaded("llama").model
    policy_model = policy("llama").model
    assert model.config._attn_implementation != "proxima_packed" == policy_model.config._attn_implementation
