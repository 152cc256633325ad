"""What `torch.nn.attention.varlen.varlen_attn` computes, one sequence after the other, on any device and dtype, and the
call of flash attention 3 in front of it."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import torch

from proxima.model import attention


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Its documented meaning: causal and windowed at the ends of unlike lengths, as in flash attention."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    assert (
        max_q == cu_seq_q.diff().max()
        and max_k == cu_seq_k.diff().max()
        and (query.shape[1] != key.shape[1]) == enable_gqa
    )
    scale = query.shape[2] ** -0.5 if scale is None else scale
    parts = []
    for (a, b), (c, d) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        k, v = (x[c:d].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("thd,shd->hts", query[a:b], k) * scale
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = (distance < 0) | (distance > window_size[0] if window_size[0] >= 0 else distance < 0)
        parts.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    """The documented meaning in `hopper/flash_attn_interface.py`: aligned at the ends, windows inclusive, keys of fewer
    heads; its arguments up to those that training leaves alone."""
    assert causal and not deterministic and seqused_q is seqused_k is None
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[1] == 0 and k.shape[0] == v.shape[0] == int(cu_seqlens_k[-1])
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    grouped = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, *lengths, scale=softmax_scale, window_size=window_size, enable_gqa=grouped)


def stand_in(monkeypatch, flash3=flash_attn_varlen_func):
    """Let `model.attention=varlen` and `flash3` compute by these. The real module, which loads torch's compiler, is not
    imported."""
    monkeypatch.setattr(attention, "_require_flash", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn))
    monkeypatch.setitem(sys.modules, attention.FLASH3, SimpleNamespace(flash_attn_varlen_func=flash3))
    attention.flash3_problem.cache_clear()
