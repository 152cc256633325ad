"""Flash attention over unlike lengths: the same numbers as `packed`, by a stand-in of the kernel's documented meaning.

test_attention.py has the laws that it shares with the other paths, tests/gpu the kernel itself.
"""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from proxima.data import FieldError
from proxima.model import attention
from proxima.model.attention import FLASH, flash_path, head_sizes, require_flash3, why_flash
from tests.model.rows import MIXED, assert_close, policy, rows, trained
from tests.model.varlen_reference import flash_attn_varlen_func, stand_in, varlen_attn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind", "window"),
    [("varlen", "llama", None), ("varlen", "gpt2", None), ("varlen", "qwen3", 4), ("flash3", "qwen3", 4)],
)
def test_log_probs_and_gradients_are_those_of_packed(path, kind, window, monkeypatch):
    """A window matters where one is."""
    stand_in(monkeypatch)
    runs = []
    for own in (path, "packed"):
        runner = policy(kind, attention=own)
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


@pytest.mark.parametrize("path", sorted(FLASH))
def test_it_is_refused_where_it_can_not_compute(path, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, attention.FLASH3, SimpleNamespace(flash_attn_varlen_func=None))
    runner = policy("llama", attention=path)
    with pytest.raises(ValueError, match=f"{path} does not compute on cpu in float32; use model.attention=packed"):
        runner(runner.pack(rows((3, (2,)))))


GPU, BF16 = torch.device("cuda"), torch.bfloat16


def gpus(monkeypatch, major: int, minor: int = 0) -> None:
    """GPUs of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    attention.flash3_problem.cache_clear()


def test_auto_chooses_it_where_it_computes(monkeypatch):
    stand_in(monkeypatch)
    heads = head_sizes(policy("llama").model)
    for major, minor, expected in ((9, 0, "flash3"), (10, 0, "varlen"), (8, 0, "varlen"), (7, 5, None)):
        gpus(monkeypatch, major, minor)
        assert flash_path(heads, GPU, BF16) == expected
    gpus(monkeypatch, 9)
    assert flash_path(heads, torch.device("cpu"), BF16) is flash_path(heads, GPU, torch.float32) is None
    assert all(flash_path(sizes, GPU, BF16) is None for sizes in ([12, 16], [512, 16], [], [0]))
    assert policy("llama").attention == "packed"
    monkeypatch.setattr("proxima.model.packed_model.flash_path", lambda *_: "varlen")
    assert policy("llama").attention == "varlen"


def test_without_flash_attention_3_it_is_torchs(monkeypatch):
    """Not installed, or built for another torch; the reason is said."""
    stand_in(monkeypatch)
    gpus(monkeypatch, 9)
    assert "flash attention 3 is installed" in why_flash("flash3", GPU)
    monkeypatch.delitem(sys.modules, attention.FLASH3)
    gpus(monkeypatch, 9)
    assert flash_path([16], GPU, BF16) == "varlen"
    assert "torch's own; flash attention 3 is not installed (package flash-attn-3" in why_flash("varlen", GPU)
    with pytest.raises(FieldError, match="flash3.*is not installed.*model.attention=auto"):
        require_flash3("flash3", GPU)

    def fails(name):
        raise ImportError("undefined symbol: _ZN3c10")

    gpus(monkeypatch, 9)
    monkeypatch.setattr(attention.importlib, "import_module", fails)
    assert flash_path([16], GPU, BF16) == "varlen" and "undefined symbol" in why_flash("varlen", GPU)
    gpus(monkeypatch, 8)
    with pytest.raises(FieldError, match="is for Hopper GPUs"):
        require_flash3("flash3", GPU)
    older = SimpleNamespace(varlen_attn=lambda query, key, value, is_causal=False: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", older)
    assert flash_path([16], GPU, BF16) is None
    require_flash3("flash3", torch.device("cpu"))


def test_flash_attention_3_gets_whole_sequences(monkeypatch):
    """The lengths of queries and of keys with what they share, the longest of both, causal, the window inclusive; its
    first releases return sums of rows too."""
    calls = []

    def recorded(q, k, v, **options):
        calls.append(options)
        return flash_attn_varlen_func(q, k, v, **options), None

    stand_in(monkeypatch, recorded)
    runner = policy("qwen3", attention="flash3")
    first = next(module for module in runner.model.modules() if hasattr(module, "layer_idx"))
    first.sliding_window = 4
    with torch.no_grad():
        runner(runner.pack(rows((5, (3, 1)), (2, (4,)))))
    of_first, *others = calls
    assert len(others) == runner.model.config.num_hidden_layers - 1
    assert of_first["window_size"] == (3, 0) and all(call["window_size"] == (-1, 0) for call in others)
    for call in calls:
        assert call["causal"] is True and call["deterministic"] is False
        assert call["softmax_scale"] == pytest.approx(runner.model.config.head_dim**-0.5)
        # prompts of 5 and 2 tokens, and responses but for their last tokens, whose keys begin with the prompt's
        lengths = [call[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
        assert sorted(zip(*lengths, strict=True)) == [(2, 2), (2, 7), (3, 5), (5, 5)]
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (5, 7)


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
