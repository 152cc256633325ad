"""The compiled decode step against eager torch: each kernel on random shapes, and whole steps of a model."""

import pytest
import torch
from torch.nn import functional as F

from proxima.engine.local.decoder import cached_attention, reach_mask
from proxima.engine.local.fast_decoder import FastDecoder
from proxima.kernels.compiled import PRODUCTS, unavailable
from proxima.kernels.decode_step import step_kernels
from tests.engine.helpers import threads
from tests.model.rows import ids, loaded
from tests.model.test_fused_backbone import model_of

pytestmark = pytest.mark.skipif(unavailable(PRODUCTS) is not None, reason=f"{unavailable(PRODUCTS)}")

NONE = torch.zeros(2, 19, dtype=torch.int64)  # no row has a leader
SHAPES = [(64, 3, 2), (32, 1, 2), (96, 4, 1)]  # dimension, group, key heads


def kernels(head_dim=64, group=3):
    compiled = step_kernels(head_dim, group)
    assert compiled is not None
    return compiled


def random_bf16(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("dim", "group", "kv_heads"), SHAPES)
def test_attention_is_that_of_eager_torch(dim, group, kv_heads, norms):
    """Every length from 1 to the capacity, among them odd ones, and rows beyond the batch stay as they are."""
    torch.manual_seed(dim + group)
    rows, capacity, heads = 16, 128, group * kv_heads
    layer = random_bf16(2, rows + 3, kv_heads, capacity, dim)
    expected = layer.clone()
    qkv, angle = random_bf16(rows, (heads + 2 * kv_heads) * dim), 6 * torch.rand(capacity, dim // 2)
    turns = torch.polar(torch.ones_like(angle), angle)
    position = torch.cat([torch.tensor([0, 1, 15, 16, capacity - 1]), torch.randint(0, capacity, (rows - 5,))])
    weights = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if norms else (None, None)
    out = torch.empty(rows, heads * dim, dtype=torch.bfloat16)
    kernels(dim, group).attend(qkv, weights, 1e-5, turns, position, layer, NONE, out)

    whole = qkv.float().view(rows, -1, dim)
    for part, weight in zip((slice(heads), slice(heads, heads + kv_heads)), weights, strict=True):
        own = whole[:, part] if weight is None else F.rms_norm(whole[:, part], (dim,), weight, 1e-5)
        pairs = torch.view_as_complex(own.reshape(rows, -1, dim // 2, 2)) * turns[position][:, None]
        whole[:, part] = torch.view_as_real(pairs).flatten(2)
    rounded = whole.bfloat16()
    for i, kv in enumerate(rounded[:, heads:].view(rows, 2, kv_heads, dim).unbind(1)):
        expected[i][torch.arange(rows), :, position] = kv
    assert (layer != expected).float().mean() < 1e-4  # a float32 product fused with a sum rounds once less
    torch.testing.assert_close(layer, expected, rtol=2**-7, atol=0)
    keys, values = layer[:, :rows].float()
    seen = cached_attention(rounded[:, :heads].float(), keys, values, reach_mask(position, capacity), None)
    torch.testing.assert_close(out.float().view_as(seen), seen, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("dim", "group", "kv_heads"), SHAPES)
def test_what_a_leader_has_is_read_there_and_changes_no_bit(dim, group, kv_heads):
    """Rows whose first positions are overwritten give what they gave, if a leader has them; as far as it does."""
    torch.manual_seed(dim)
    rows, capacity = 16, 64
    layer, qkv = random_bf16(2, rows, kv_heads, capacity, dim), random_bf16(rows, (group + 2) * kv_heads * dim)
    turns, position = torch.ones(capacity, dim // 2, dtype=torch.complex64), torch.arange(rows) + 45
    leaders = torch.stack([torch.arange(rows) // 4 * 4, torch.arange(rows) % 4 * 15])  # 0, 15, 30, 45 in common
    for row, (leader, common) in enumerate(leaders.T):
        layer[:, row, :, :common] = layer[:, leader, :, :common]
    broken = layer.clone()
    for row, common in enumerate(leaders[1]):
        broken[:, row, :, : common // 16 * 16] = torch.nan
    given = []
    for cache, leading in ((layer, NONE), (broken, leaders), (broken, NONE)):
        out = torch.empty(rows, group * kv_heads * dim, dtype=torch.bfloat16)
        given.append(kernels(dim, group).attend(qkv, (None, None), 1e-5, turns, position, cache, leading, out))
    assert torch.equal(given[0], given[1])
    assert given[2].isnan().all(1).tolist() == (leaders[1] >= 16).tolist()


def test_norm_and_swiglu_are_those_of_eager_torch():
    torch.manual_seed(0)
    x, delta, weight = torch.randn(8, 96), random_bf16(8, 96), torch.rand(96)
    sum_ = x + delta.float()
    for added in (None, delta):
        before = x.clone()
        out = kernels().norm(x, added, weight, 1e-5, torch.empty_like(delta))
        assert torch.equal(x, before if added is None else sum_)
        torch.testing.assert_close(out, F.rms_norm(x, (96,), weight, 1e-5).bfloat16(), rtol=2**-7, atol=0)
    gate_up = 30 * random_bf16(8, 256)
    gate_up[0, :8] = torch.tensor([0, -0.0, 1e-30, -1e-30, 100, -100, 3e38, -3e38])
    gate, up = gate_up.chunk(2, dim=1)
    out = kernels().swiglu(gate_up, torch.empty(8, 128, dtype=torch.bfloat16))
    torch.testing.assert_close(out, F.silu(gate).mul(up), rtol=2**-6, atol=1e-30)


def test_what_is_not_finite_stays_so():
    """A model that has diverged must be found where a token is drawn."""
    bad = torch.full((8, 64), torch.nan)
    assert kernels().norm(bad, None, torch.ones(64), 1e-5, torch.empty(8, 64).bfloat16()).isnan().all()
    assert kernels().swiglu(torch.full((8, 64), torch.nan).bfloat16(), torch.empty(8, 32).bfloat16()).isnan().all()
    qkv, layer = random_bf16(8, 5 * 64), random_bf16(2, 8, 1, 64, 64)
    qkv[3] = torch.nan
    turns, out = torch.ones(64, 32, dtype=torch.complex64), torch.empty(8, 3 * 64).bfloat16()
    kernels().attend(qkv, (None, None), 1e-5, turns, torch.full((8,), 20), layer, NONE, out)
    assert out.isnan().all(1).tolist() == [row == 3 for row in range(8)]


def decoded(decoder, rows=range(8), steps=5):
    """Hidden states [steps, rows, D] after prompts of unlike lengths."""
    prompts = [ids(3 + 9 * row, row) for row in rows]
    _, kv = decoder.prefill(prompts)
    cache = decoder.new_cache(8)
    cache.reserve(128)
    for slot, held in enumerate(kv):
        cache.put(torch.tensor([slot]), held)
    padding = torch.zeros(8 - len(prompts), dtype=torch.long)
    states = []
    for step in range(steps):
        tokens = torch.cat([torch.tensor([3 + 7 * step + 11 * row for row in rows]), padding])
        position = torch.cat([torch.tensor([len(prompt) + step for prompt in prompts]), padding])
        states.append(decoder.step(tokens, position, cache, int(position.max()) + 1)[: len(prompts)].float())
    return torch.stack(states)


def test_a_step_is_that_of_the_eager_decoder():
    """And nearer to float32 than two roundings of it are to each other."""
    compiled, eager, exact = (
        FastDecoder(model_of("qwen3"), dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    )
    assert compiled.kernels is not None and exact.kernels is None
    eager.kernels = None
    actual, expected, truth = decoded(compiled), decoded(eager), decoded(exact)
    assert (actual - truth).abs().mean() < 1.1 * (expected - truth).abs().mean() < 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.2)


@pytest.mark.slow
def test_a_rows_bits_depend_on_that_row_alone():
    with threads(1):
        decoder = FastDecoder(model_of("qwen3"), torch.bfloat16)
        whole = decoded(decoder)
        assert torch.equal(decoded(decoder, rows=[2, 7, 5]), whole[:, [2, 7, 5]])
    with threads(2):
        assert torch.equal(decoded(decoder), whole)


def test_no_kernels_for_other_shapes(monkeypatch):
    narrow = loaded("llama").model
    assert FastDecoder(narrow, torch.bfloat16).kernels is None  # heads of 8 numbers
    monkeypatch.setattr("proxima.kernels.decode_step.unavailable", lambda instructions: "no compiler")
    assert step_kernels(32, 9) is None
