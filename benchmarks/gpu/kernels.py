"""Without a model: the rate of products, attention of a packed batch by each path, the output head by chunks, and
grouped products in which experts get no token."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.forecast import Forecast, bandwidth, head_seconds, product_rate
from benchmarks.gpu.record import Record, part_options
from benchmarks.gpu.sizes import Batch, config_of
from benchmarks.harness import gemm_rate
from benchmarks.side import clock, device
from proxima.config.sections.model import ModelConfig
from proxima.data.packed_batch import PackedBatch, pack
from proxima.model.attention import Segments, attend_segments, flash_attention
from proxima.model.log_prob import token_log_prob

PRODUCTS = "products in bfloat16"
CHUNKS = (512, 2048, 8192)
Attending = Callable[[], Tensor]


def best(work: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest call, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def peak_gib(work: Callable[[], object]) -> float | None:
    """GiB that a call has allocated at its peak, on top of what there was; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def products(record: Record, *, rehearse: bool) -> None:
    """The rate that shares are of, and the bandwidth."""
    rate = gemm_rate(torch.get_num_threads(), "bfloat16", 256 if rehearse else 2048)
    record.figure(PRODUCTS, rate / 1e12, "TFLOP/s", predicted=product_rate() / 1e12)
    size = 2**20 if rehearse else 2**30
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    seconds = best(lambda: target.copy_(source), repeats=10)
    record.figure("a copy, read and written", 2 * size / seconds / 1e9, "GB/s", predicted=bandwidth() / 1e9)


def attention_paths(batch: Batch, packed: PackedBatch, heads: Sequence[int], dim: int) -> dict[str, Attending]:
    """One layer by each path of `model.attention`, on random queries, keys and values: of the packed tokens or, padded,
    of a row for each sequence with its prompt in it."""
    width = batch.prompt + batch.response
    q, k, v = (_drawn(batch.fed, count, dim) for count in heads)
    rows = [_drawn(batch.sequences, count, width, dim) for count in heads]
    segments = Segments(packed)
    attend = flash_attention(packed)
    return {
        "varlen": lambda: attend(0, q, k, v, None, None),
        "packed": lambda: attend_segments(segments, q, k, v, None, None),
        "padded": lambda: F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True),
    }


def _drawn(*size: int) -> Tensor:
    return torch.randn(size, device=device(), dtype=torch.bfloat16, requires_grad=True)


def attention(record: Record, name: str, batch: Batch, *, rehearse: bool) -> None:
    """Forward and backward of one layer of 4B's heads by each path, and how far the paths are apart."""
    config = config_of("4B", rehearse=rehearse)
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    heads = (config.num_attention_heads, kv_heads, kv_heads)
    packed = pack(batch.trajectories(config.vocab_size), share_prompt=True).to(torch.device(device()))
    plan = Forecast(config, ModelConfig(path="", compute_dtype="bfloat16"), batch).attention
    torch.manual_seed(1)
    outputs: dict[str, Tensor] = {}

    def both(path: str, compute: Attending) -> None:
        out = compute()
        out.backward(torch.ones_like(out))
        outputs[path] = out.detach()

    def measure(path: str, compute: Attending) -> None:
        seconds = best(partial(both, path, compute))
        flops = 4.0 * 3.5 * heads[0] * dim * batch.pairs / seconds
        record.figure(f"{name}, {path}", 1e3 * seconds, "ms", predicted=1e3 * plan, tflops=round(flops / 1e12, 1))

    for path, compute in attention_paths(batch, packed, heads, dim).items():
        record.case(f"{name}, {path}", 1, partial(measure, path, compute))
    if {"varlen", "packed"} <= outputs.keys():
        apart = (outputs["varlen"].float() - outputs["packed"].float()).abs().max().item()
        record.figure(f"{name}: varlen and packed apart by at most", apart, "", allowed=0.02)


def head(record: Record, chunk: int, *, rehearse: bool) -> None:
    """Log-probs of 8,192 tokens over the whole vocabulary of 4B, and their gradients."""
    config = config_of("4B", rehearse=rehearse)
    rows, hidden, vocabulary = (32 if rehearse else 8192), config.hidden_size, config.vocab_size
    torch.manual_seed(1)
    weight = torch.empty(vocabulary, hidden, device=device()).normal_(std=0.02).requires_grad_()
    states = torch.randn(rows, hidden, device=device(), requires_grad=True)
    target = torch.randint(vocabulary, (rows,), device=device())

    def both() -> None:
        weight.grad = states.grad = None
        with torch.autocast(device(), dtype=torch.bfloat16):
            token_log_prob(states, weight, target, chunk=chunk).log_prob.sum().backward()

    name = f"output head, {rows:,} rows of {vocabulary:,} in chunks of {chunk:,}"
    seconds = best(both)
    record.figure(name, 1e3 * seconds, "ms", predicted=1e3 * head_seconds(rows, vocabulary, hidden, chunk))
    record.figure(f"{name}: allocated", peak_gib(both), "GiB")


def grouped(record: Record, *, rehearse: bool) -> None:
    """`_grouped_mm` where a third of the experts get no row, forward and backward, against one product after the
    other."""
    experts, rows, hidden, out = (6, 24, 32, 64) if rehearse else (128, 32_768, 2048, 768)
    torch.manual_seed(1)
    counts = np.random.default_rng(1).multinomial(rows, np.full(experts, 1 / experts))
    counts[1::3] = 0
    counts[0] += rows - counts.sum()
    ends = torch.tensor(counts.cumsum(), dtype=torch.int32, device=device())
    x = torch.randn(rows, hidden, device=device(), dtype=torch.bfloat16)
    w = torch.randn(experts, hidden, out, device=device(), dtype=torch.bfloat16) / hidden**0.5
    edges = [0, *counts.cumsum().tolist()]

    def one_by_one(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x[a:b] @ w[i] for i, (a, b) in enumerate(pairwise(edges))])

    results = []
    for compute in (lambda x, w: torch._grouped_mm(x, w, offs=ends), one_by_one):
        own_x, own_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        result: Any = compute(own_x, own_w)
        result.float().square().sum().backward()
        results.append((result.detach(), own_x.grad, own_w.grad))
    for name, ours, theirs in zip(("forward", "gradient of rows", "gradient of weights"), *results, strict=True):
        apart = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        record.figure(f"_grouped_mm with 0 rows, {name}: apart, relative", apart, "", allowed=0.01)
        if not apart < 0.05:
            raise ArithmeticError(f"{name} is {apart:.3g} from one product after the other")
    seconds = best(lambda: torch._grouped_mm(x, w, offs=ends))
    plan = 2 * rows * hidden * out / product_rate(out)
    record.figure("_grouped_mm with 0 rows", 1e3 * seconds, "ms", predicted=1e3 * plan)


def main() -> None:
    record, rehearse = part_options("kernels")
    if rehearse:
        import pytest

        from tests.model.varlen_reference import stand_in

        torch.set_num_threads(1)
        stand_in(pytest.MonkeyPatch())
    record.case(PRODUCTS, 3, partial(products, record, rehearse=rehearse))
    for tokens in (8192, 16_384):
        batches = {"groups of 8": Batch(tokens // 8192, 8, 256, 992), "one sequence": Batch(1, 1, 256, tokens - 256)}
        for kind, batch in batches.items():
            own = Batch(tokens // 8192, 2, 4, 6) if rehearse else batch
            name = f"attention of {tokens:,} tokens, {kind}"
            record.case(name, 5, partial(attention, record, name, own, rehearse=rehearse))
    for chunk in (8, 16, 32) if rehearse else CHUNKS:
        record.case(f"output head in chunks of {chunk:,}", 3, partial(head, record, chunk, rehearse=rehearse))
    record.case("_grouped_mm with 0 rows", 3, partial(grouped, record, rehearse=rehearse))


if __name__ == "__main__":
    main()
