"""Flash attention over unlike lengths: the same numbers as `packed`, by a stand-in of the kernel's documented meaning.

test_attention.py has the laws that it shares with the other paths, tests/gpu the kernel itself.
"""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from proxima.model.attention import ATTENTION, has_flash
from tests.model.rows import MIXED, assert_close, policy, rows, trained
from tests.model.varlen_reference import stand_in, varlen_attn


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "window"), [("llama", None), ("gpt2", None), ("qwen3", 4)])
def test_log_probs_and_gradients_are_those_of_packed(kind, window, monkeypatch):
    """A window matters where one is."""
    stand_in(monkeypatch)
    runs = []
    for path in ("varlen", "packed"):
        runner = policy(kind, attention=path)
        for module in runner.model.modules():
            if window is not None and hasattr(module, "layer_idx"):
                module.sliding_window = window
        runs.append(trained(runner, rows(*MIXED)))
    (log_prob, gradients), (expected, reference) = runs
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-5)
    assert_close(gradients, reference, 1e-5)
    whole, _ = trained(policy(kind), rows(*MIXED))
    assert ((log_prob - whole).abs().max() > 1e-3) == (window is not None)


def test_torch_takes_the_arguments_of_the_stand_in():
    from torch.nn.attention.varlen import varlen_attn as real

    own, theirs = (inspect.signature(call).parameters for call in (varlen_attn, real))
    assert own.keys() <= theirs.keys() and list(own)[:7] == list(theirs)[:7]
    assert all(theirs[name].default == own[name].default for name in ("scale", "window_size", "enable_gqa"))


def test_it_is_refused_where_it_can_not_compute():
    assert "varlen" in ATTENTION
    runner = policy("llama", attention="varlen")
    with pytest.raises(ValueError, match="varlen does not compute on cpu in float32; use model.attention=packed"):
        runner(runner.pack(rows((3, (2,)))))


def test_auto_chooses_it_where_it_computes(monkeypatch):
    stand_in(monkeypatch)
    model, gpu, bf16 = policy("llama").model, torch.device("cuda"), torch.bfloat16
    for capability, expected in (((9, 0), True), ((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert has_flash(model, gpu, bf16) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not has_flash(model, torch.device("cpu"), bf16) and not has_flash(model, gpu, torch.float32)
    first = model.model.layers[0].self_attn
    for size in (12, 512):
        with monkeypatch.context() as changed:
            changed.setattr(first, "head_dim", size)
            assert not has_flash(model, gpu, bf16), size
    older = SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: None)
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "torch.nn.attention.varlen", older)
        assert not has_flash(model, gpu, bf16)
    assert policy("llama").attention == "packed"
    monkeypatch.setattr("proxima.model.packed_model.has_flash", lambda *_: True)
    assert policy("llama").attention == "varlen"


def test_torch_without_groups_gets_repeated_keys(monkeypatch):
    """Torch 2.11."""
    stand_in(monkeypatch)

    def without_groups(*args, scale=None, window_size=(-1, -1)):
        return varlen_attn(*args, scale=scale, window_size=window_size)

    expected = policy("llama", attention="varlen")
    batch = expected.pack(rows(*MIXED))
    with torch.no_grad():
        grouped = expected(batch).log_prob
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=without_groups))
        torch.testing.assert_close(policy("llama", attention="varlen")(batch).log_prob, grouped)
