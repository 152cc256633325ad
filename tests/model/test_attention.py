"""Packed sequences stay apart: every attention path against one sequence at a time, on every tiny architecture."""

from dataclasses import replace

import pytest
import torch

from proxima.data import pack
from proxima.model.attention import ATTENTION
from tests.model.rows import MIXED, assert_close, forked, gradients_of, loaded, policy, reference, rows
from tests.model.varlen_reference import stand_in
from tests.tiny import KINDS, tiny

PATHS = [
    (path, share)
    for path in sorted(ATTENTION)
    for share in (False, True)
    if share is False or path in ("packed", "varlen", "mask")
]
TEMPERATURES = (1.0, 0.7, 1.3)


@pytest.fixture(autouse=True)
def _flash_attention_on_a_cpu(monkeypatch):
    stand_in(monkeypatch)


@pytest.mark.parametrize(("path", "share"), PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_one_sequence_at_a_time(kind, path, share):
    trajectories = rows(*MIXED, temperature=TEMPERATURES)
    runner = policy(kind, attention=path, share_prompt=share)
    assert runner.share_prompt is share
    with torch.no_grad():
        actual = runner(runner.pack(trajectories)).log_prob
        expected = reference(tiny(kind), trajectories)
    assert actual.shape == (45,) and actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("path", ["packed", "varlen", "mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_paths_begin_with_is_run_once_and_changes_no_log_prob(kind, path):
    runner, trajectories = policy(kind, attention=path), forked()
    batch = runner.pack(trajectories)
    assert len(batch.tokens) < 0.6 * sum(map(len, trajectories)) and min(batch.parents) == -1
    with torch.no_grad():
        actual = runner(batch).log_prob
        expected = reference(tiny(kind), trajectories)
    torch.testing.assert_close(actual[batch.sampled], expected[batch.sampled], rtol=0, atol=2e-5)


@pytest.mark.parametrize("path", ["packed", "varlen", "mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_no_earlier_log_prob(kind, path):
    """Causality inside a response, and the off-by-one law: log_prob[t] is of token t given all before it."""
    (row,) = rows((5, (8,)))
    runner = policy(kind, attention=path)
    changed = replace(row, tokens=(*row.tokens[:4], row.tokens[4] + 1 - 2 * (row.tokens[4] > 100), *row.tokens[5:]))
    with torch.no_grad():
        a, b = (runner(runner.pack([x])).log_prob for x in (row, changed))
    assert torch.equal(a[:4], b[:4])
    assert (a[4] - b[4]).abs() > 1e-3 and (a[5] - b[5]).abs() > 1e-3


# Llama's norms and eager softmax compute in float32 whatever the model's dtype, so that only GPT-2 can show float64
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [*((k, torch.float32, 2e-5) for k in KINDS), ("gpt2", torch.float64, 1e-12)]
)
def test_sharing_a_prompt_changes_no_gradient(kind, dtype, tolerance):
    """And neither differs from the gradient of the plain forwards."""
    trajectories = rows(*MIXED, temperature=(1.0, 0.75, 1.25))
    weight = torch.linspace(-1, 1, 45, dtype=dtype)

    def gradients(share):
        runner = policy(kind, attention="packed", share_prompt=share, dtype=dtype, compute_dtype=dtype)
        (runner(runner.pack(trajectories)).log_prob * weight).sum().backward()
        return gradients_of(runner.model)

    model = tiny(kind).to(dtype)
    (reference(model, trajectories) * weight).sum().backward()
    expected = gradients_of(model)
    assert any(float(g.abs().max()) > 0.1 for g in expected.values())
    for share in (True, False):
        assert_close(gradients(share), expected, tolerance)


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


def test_native_attention_refuses_shared_prompts():
    runner = policy("llama", attention="native")
    with pytest.raises(ValueError, match="model.attention=native can't share prompts; set model.share_prompt=false"):
        runner(pack(rows((3, (2, 2))), share_prompt=True))


def test_packed_attention_refuses_what_it_does_not_do():
    from proxima.model.attention import packed_attention

    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="packed does not support softcap of Linear; use model.attention=mask"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None, softcap=30.0)
    with pytest.raises(RuntimeError, match="called without segments"):
        packed_attention(torch.nn.Linear(1, 1), x, x, x, None)
    model = loaded("llama").model
    policy_model = policy("llama").model
    assert model.config._attn_implementation != "proxima_packed" == policy_model.config._attn_implementation
