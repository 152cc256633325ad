"""The operations of a bf16 training pass between its matrix products, on contiguous CPU tensors, in as few passes over
memory as possible."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from proxima.kernels.compiled import functions, has_tiles, library, unavailable

HERE = Path(__file__).parent
LANES = 16  # widths are multiples of it
HEAD = 32  # head dimensions are
PARTS = 16  # parts in which the gradient of a norm's weight is summed
BF16 = torch.bfloat16
M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_THRESHOLD = -3
MAPPED = 1 << 27
TRIMMED = (1 << 31) - 1
LAYER = {
    "norm": "pppfpppnn",
    "norm_backward": "ppppppppnn",
    "swiglu": "ppnn",
    "swiglu_backward": "ppppnn",
    "log_prob": "ppppppnn",
    "log_prob_backward": "pppppppnnn",
    "transposed": "pppnn",
}
ATTENTION = {"attention": "pppppfppppfnnn", "attention_backward": "pppppfpppppppfnnn"}


class Turns(NamedTuple):
    """Rotation and norms of queries and keys: cos, sin [L, D / 2] float32; the weights of the norms, [D] float32 or
    None."""

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float


class PackedSegments(NamedTuple):
    """The segments, `PackedBatch.edges` and `parents`, int64; the numbers of heads, and the scale of scores."""

    edges: Tensor
    parents: Tensor
    heads: int
    kv_heads: int
    scale: float


class TrainKernels:
    """The functions. They allocate their results, bf16 unless said otherwise."""

    def __init__(self, layer: ctypes.CDLL, attention: ctypes.CDLL | None = None) -> None:
        self._calls = functions(layer, LAYER)
        if attention is not None:
            self._calls |= functions(attention, ATTENTION)

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """x + delta [n, D], float32; its RMS norm; 1 / RMS [n], float32. x [n, D], weight [D] float32."""
        total = x if delta is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=BF16)
        scale = x.new_empty(len(x))
        self._calls["norm"](x, delta, weight, eps, total, out, scale, *x.shape)
        return total, out, scale

    def norm_backward(
        self, grad: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor, *, both: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The gradient of x [n, D] float32, the same of delta if `both`, and of the weight [D] float32."""
        grad_x = torch.empty_like(total)
        parts = total.new_empty(PARTS, total.shape[1])
        grad_delta = None
        if both:
            grad_delta = torch.empty_like(total, dtype=BF16)
        self._calls["norm_backward"](grad, grad_sum, total, weight, scale, grad_x, grad_delta, parts, *total.shape)
        return grad_x, grad_delta, parts.sum(0)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [n, F] of [n, 2 F]."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._calls["swiglu"](gate_up, out, *out.shape)
        return out

    def swiglu_backward(self, gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient [n, 2 F], and the result of `swiglu`, recomputed."""
        grad_gate_up = torch.empty_like(gate_up)
        out = torch.empty_like(grad)
        self._calls["swiglu_backward"](gate_up, grad, grad_gate_up, out, *grad.shape)
        return grad_gate_up, out

    def log_prob(
        self, logits: Tensor, temperature: Tensor, target: Tensor, log_z: Tensor, out: Tensor, entropy: Tensor | None
    ) -> None:
        """Fill log Z, the targets' log-probs and the entropies, [n] float32, of logits [n, V] / temperature [n]."""
        self._calls["log_prob"](logits, temperature, target, log_z, out, entropy, *logits.shape)

    def log_prob_backward(
        self, logits: Tensor, temperature: Tensor, target: Tensor, log_z: Tensor, grad: Tensor,
        entropy: Tensor | None, grad_entropy: Tensor | None, first: int,
    ) -> None:  # fmt: skip
        """Turn the logits [n, w] of the vocabulary from token `first` on into their gradient, in place."""
        args = (logits, temperature, target, log_z, grad, entropy, grad_entropy)
        self._calls["log_prob_backward"](*args, first, *logits.shape)

    def transposed(self, x: Tensor, exact: Tensor | None = None) -> Tensor:
        """[w, n] of [n, w]; if given, in `exact`, which is float32."""
        if exact is not None:
            self._calls["transposed"](x, None, exact, *x.shape)
            return exact
        out = torch.empty(*x.shape[::-1], dtype=BF16)
        self._calls["transposed"](x, out, None, *x.shape)
        return out

    def attention(self, qkv: Tensor, turns: Turns, segments: PackedSegments) -> tuple[Tensor, Tensor]:
        """[L, H * D], and the log of the sum of the weights [L, H], float32, of qkv [L, (H + 2 H_kv) * D]."""
        length = len(qkv)
        heads = segments.heads
        kv_heads = segments.kv_heads
        out = qkv.new_empty(length, qkv.shape[1] * heads // (heads + 2 * kv_heads))
        log_sum = torch.empty(length, heads)
        sizes = (segments.scale, len(segments.parents), heads, kv_heads)
        self._calls["attention"](qkv, *turns, segments.edges, segments.parents, out, log_sum, *sizes)
        return out, log_sum

    def attention_backward(
        self, qkv: Tensor, turns: Turns, segments: PackedSegments, out: Tensor, log_sum: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of qkv, and of the norms of queries and keys, [2, D] float32."""
        heads = segments.heads
        kv_heads = segments.kv_heads
        grad_qkv = torch.empty_like(qkv)
        norms = None
        if turns.query_norm is not None:
            tasks = kv_heads * int((segments.parents < 0).sum())
            norms = torch.zeros(tasks, 2, len(turns.query_norm))
        sizes = (segments.scale, len(segments.parents), heads, kv_heads)
        results = (out, log_sum, grad, grad_qkv, norms)
        self._calls["attention_backward"](qkv, *turns, segments.edges, segments.parents, *results, *sizes)
        if norms is None:
            return grad_qkv, None
        return grad_qkv, norms.sum(0)


@cache
def train_kernels(head_dim: int | None = None) -> TrainKernels | None:
    """The kernels, those of attention for heads of `head_dim`; None if the machine can't compile them."""
    if unavailable():
        return None
    keep_freed_memory()
    layer = library(HERE / "layer.cpp")
    if head_dim is None:
        return TrainKernels(layer)
    flags = () if has_tiles() else ("-mno-amx-tile", "-mno-amx-bf16")
    return TrainKernels(layer, library(HERE / "attention.cpp", f"-DHEAD_DIM={head_dim}", *flags))


def keep_freed_memory() -> None:
    """Make the C library keep the freed memory of tensors, up to MAPPED bytes each, for reuse: otherwise it goes back
    to the system, and a pass spends a fifth of its time waiting for new pages. Libraries other than glibc are left
    alone."""
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.mallopt(M_MMAP_THRESHOLD, MAPPED)
        c_library.mallopt(M_TRIM_THRESHOLD, TRIMMED)
