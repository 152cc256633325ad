"""The kernels against torch in float64, for the instructions that a processor may lack."""

import resource

import pytest
import torch
from torch.nn import functional as F

from proxima.kernels.compiled import library, unavailable
from proxima.kernels.train_pass import HERE, PackedSegments, TrainKernels, Turns, train_kernels
from tests.engine.helpers import threads

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")
NO_AMX = ("-mno-amx-tile", "-mno-amx-bf16")
FLAGS = {"native": (), "no AMX": NO_AMX, "no bf16": (*NO_AMX, "-mno-avx512bf16")}
EDGES, PARENTS = (0, 37, 40, 40, 112, 113, 150), (-1, 0, 0, 0, -1, 4)
HEADS, KV, SIZE = 6, 2, 32


def exact_attention(qkv, turns):
    """[L, H * D] float64, segment by segment."""
    length = len(qkv)
    q, k, v = (x.transpose(0, 1) for x in qkv.view(length, -1, SIZE).split([HEADS, KV, KV], dim=1))
    if turns.query_norm is not None:
        q, k = (F.rms_norm(x, (SIZE,), w, turns.eps) for x, w in ((q, turns.query_norm), (k, turns.key_norm)))
    cos, sin = (torch.cat([x, x], 1).double() for x in (turns.cos, turns.sin))
    q, k = (x * cos + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // KV, 0) for x in (k, v))
    number = torch.repeat_interleave(torch.arange(len(PARENTS)), torch.tensor(EDGES).diff())
    order, parent = torch.arange(length), torch.tensor(PARENTS)[number]
    seen = (number[:, None] == number) & (order[:, None] >= order) | (parent[:, None] == number)
    weights = (q @ k.transpose(1, 2) * 0.2).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(length, -1)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
def test_attention(flags, normed):
    torch.manual_seed(3)
    if FLAGS[flags]:
        sources = ((HERE / "layer.cpp", ()), (HERE / "attention.cpp", (f"-DHEAD_DIM={SIZE}",)))
        kernels = TrainKernels(*(library(source, *sizes, *FLAGS[flags]) for source, sizes in sources))
    else:
        kernels = train_kernels(SIZE)
    qkv = torch.randn(EDGES[-1], (HEADS + 2 * KV) * SIZE).bfloat16()
    grad = torch.randn(EDGES[-1], HEADS * SIZE).bfloat16()
    norms = [torch.rand(SIZE) + 0.5 for _ in range(2)] if normed else [None, None]
    angle = torch.rand(EDGES[-1], SIZE // 2) * 6
    turns = Turns(angle.cos(), angle.sin(), *norms, 1e-6)
    segments = PackedSegments(torch.tensor(EDGES), torch.tensor(PARENTS), HEADS, KV, 0.2)
    out, log_sum = kernels.attention(qkv, turns, segments)
    grad_qkv, grad_norms = kernels.attention_backward(qkv, turns, segments, out, log_sum, grad)
    leaf = qkv.double().requires_grad_()
    leaves = [w.double().requires_grad_() for w in norms if w is not None]
    exact = exact_attention(leaf, turns._replace(**dict(zip(("query_norm", "key_norm"), leaves, strict=False))))
    exact.backward(grad.double())
    for ours, theirs in (
        (out, exact),
        (grad_qkv, leaf.grad),
        *zip(grad_norms if normed else (), [w.grad for w in leaves], strict=True),
    ):
        assert (ours - theirs).norm() < 0.006 * theirs.norm()


def test_attention_does_not_depend_on_threads_or_neighbours():
    torch.manual_seed(4)
    kernels = train_kernels(SIZE)
    qkv = torch.randn(EDGES[-1], (HEADS + 2 * KV) * SIZE).bfloat16()
    angle = torch.rand(EDGES[-1], SIZE // 2)
    turns = Turns(angle.cos(), angle.sin(), None, None, 0.0)
    whole = PackedSegments(torch.tensor(EDGES), torch.tensor(PARENTS), HEADS, KV, 0.2)
    out, log_sum = kernels.attention(qkv, turns, whole)
    first = PackedSegments(torch.tensor(EDGES[:5]), torch.tensor(PARENTS[:4]), HEADS, KV, 0.2)
    assert torch.equal(kernels.attention(qkv[:112], turns, first)[0], out[:112])
    grads = []
    for count in (1, 3):
        with threads(count):
            grads.append(kernels.attention_backward(qkv, turns, whole, out, log_sum, torch.ones_like(out))[0])
    assert torch.equal(*grads)


def test_norm_and_swiglu():
    torch.manual_seed(5)
    kernels = train_kernels()
    x, delta, weight = torch.randn(21, 48), torch.randn(21, 48).bfloat16(), torch.rand(48)
    grad, grad_sum = torch.randn(21, 48).bfloat16(), torch.randn(21, 48)
    total, out, scale = kernels.norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    leaves = total.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.rms_norm(leaves[0], (48,), leaves[1], 1e-5)
    torch.testing.assert_close(out.double(), exact, atol=0, rtol=0.004)
    torch.autograd.backward([exact, leaves[0]], [grad.double(), grad_sum.double()])
    grad_x, grad_delta, grad_weight = kernels.norm_backward(grad, grad_sum, total, weight, scale, both=True)
    torch.testing.assert_close(grad_x.double(), leaves[0].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_weight.double(), leaves[1].grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(grad_delta, grad_x.bfloat16())
    assert torch.equal(kernels.norm(x, None, weight, 1e-5)[0], x)

    gate_up, grad = (torch.randn(21, 96) * 5).bfloat16(), torch.randn(21, 48).bfloat16()
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    gated = F.silu(gate) * up
    gated.backward(grad.double())
    torch.testing.assert_close(kernels.swiglu(gate_up).double(), gated, atol=1e-6, rtol=0.004)
    of_gate_up, again = kernels.swiglu_backward(gate_up, grad)
    torch.testing.assert_close(of_gate_up.double(), leaf.grad, atol=1e-5, rtol=0.005)
    assert torch.equal(again, kernels.swiglu(gate_up))


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_transposed(rows):
    kernels, x = train_kernels(), torch.randn(rows, 32).bfloat16()
    assert torch.equal(kernels.transposed(x), x.T)
    assert torch.equal(kernels.transposed(x, torch.empty(32, rows)), x.T.float())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1 << 23, 49_152 * 576])
def test_freed_memory_is_kept(count):
    """The second is the gradient of the demo model's embedding."""
    train_kernels()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(count)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # of 8,192 or 27,648 pages; glibc before 2.38 asks for a little more than what it gave and got back, some times
    assert any(faults() < 1_000 for _ in range(32))
