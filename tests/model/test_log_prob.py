"""The fused head against plain log-softmax, over the vocabulary and over the tokens that could be sampled: values,
gradients, entropy, temperature, chunks, memory."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rank_memory.rank import LiveTensors
from proxima.model.log_prob import log_sum_square, rows_of_logits, token_log_prob, top_k_log_prob
from proxima.model.masked_logits import PackedSamplingMask
from tests.model.rows import MIXED, policy, rows

N, D, V = 13, 5, 17
CHUNKS = (1, 4, 13, 256)
COMPILED = "tests/model/test_log_prob.py::test_what_comes_between_the_products_may_be_compiled"


@dataclass
class Head:
    """States, an output head and targets; `inside` has the set [N, V] that each target was drawn from."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    temperature: Tensor | float
    inside: Tensor | None = None

    @classmethod
    def drawn(cls, dtype=torch.float64, *, count=N, bias=True, scalar=None, with_sets=False, empty=()) -> "Head":
        """`empty`: rows whose set stands for the whole vocabulary."""
        draw = torch.Generator().manual_seed(count)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

        hidden, weight, shift, target = (
            normal(count, D), normal(V, D), normal(V), torch.randint(V, (count,), generator=draw),
        )  # fmt: skip
        temperature = (0.5 + torch.rand(count, generator=draw, dtype=torch.float64)).to(dtype)
        inside = torch.rand(count, V, generator=draw) < torch.rand(count, 1, generator=draw)
        inside[torch.arange(count), target] = True
        inside[list(empty)] = False
        given = temperature if scalar is None else scalar
        return cls(hidden, weight, shift if bias else None, target, given, inside if with_sets else None)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def sets(self) -> PackedSamplingMask | None:
        if self.inside is None:
            return None
        edges = torch.cat([torch.zeros(1, dtype=torch.long), self.inside.sum(1).cumsum(0)])
        return PackedSamplingMask(self.inside.nonzero()[:, 1], edges)

    def run(self, rows=slice(None), **how):
        """`rows`: some alone."""
        t = self.temperature
        inside = None if self.inside is None else self.inside[rows]
        part = Head(self.hidden[rows], self.weight, self.bias, self.target[rows], t, inside)
        t = t[rows] if isinstance(t, Tensor) else t
        return token_log_prob(part.hidden, part.weight, part.target, t, bias=part.bias, mask=part.sets(), **how)

    def logits(self, temperature: Tensor | float) -> Tensor:
        t = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        return (self.hidden @ self.weight.T + (0 if self.bias is None else self.bias)) / t

    def masked_logits(self, temperature: Tensor | float) -> Tensor:
        """Those of the sets; an empty one is the whole vocabulary."""
        logits = self.logits(temperature)
        if self.inside is None:
            return logits
        return logits.masked_fill(~(self.inside | ~self.inside.any(1, keepdim=True)), -torch.inf)

    def naive(self, others: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and log-probs of other tokens."""
        whole = self.logits(self.temperature).log_softmax(1)
        own = self.masked_logits(self.temperature).log_softmax(1).gather(1, self.target[:, None])[:, 0]
        return own, -(whole.exp() * whole).sum(1), None if others is None else whole.gather(1, others)


@pytest.mark.parametrize(
    "given",
    [
        {"bias": False},
        {"scalar": 1.0, "bias": False},
        {"scalar": 0.3},
        {"with_sets": True},
        {"with_sets": True, "empty": (0, 7)},
    ],
    ids=str,
)
@pytest.mark.parametrize(("entropy", "others"), [(True, True), (True, False), (False, True)])
def test_values_and_gradients_equal_plain_log_softmax(given, entropy, others):
    """Other tokens have duplicates, and targets among them."""
    head = Head.drawn(**given)
    more = (torch.arange(3 * N).view(N, 3) * 5 % V).where(torch.arange(3) < 2, head.target[:, None]) if others else None
    expected = head.naive(more)
    mix = [torch.linspace(-2, 3, N), torch.linspace(3, -2, N) * entropy, torch.linspace(-1, 2, 3 * N).view(N, 3)]

    def gradients(outputs):
        parts = [(x * w).sum() for x, w in zip(outputs, mix, strict=True) if x is not None and w.any()]
        return torch.autograd.grad(sum(parts), head.leaves)

    exact = gradients(expected)
    for chunk in CHUNKS:
        outputs = head.run(entropy=True, entropy_gradient=entropy, others=more, others_gradient=others, chunk=chunk)
        assert outputs.entropy.requires_grad == entropy
        for ours, theirs in zip(outputs, expected, strict=True):
            assert (ours is None) == (theirs is None)
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        for mine, other in zip(gradients(outputs), exact, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_what_is_not_asked_for_carries_no_gradient_or_is_not_there():
    head = Head.drawn()
    plain = head.run(others=torch.zeros(N, 2, dtype=torch.long))
    assert plain.log_prob.requires_grad and not plain.others.requires_grad and plain.entropy is None
    with_entropy = head.run(entropy=True)
    assert not with_entropy.entropy.requires_grad and with_entropy.others is None
    assert head.run(entropy_gradient=True).entropy.requires_grad


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_the_most_probable_tokens(chunk):
    head = Head.drawn()
    given, how = (head.hidden, head.weight, head.target, head.temperature), {"bias": head.bias, "chunk": chunk}
    own, ids, log_prob = top_k_log_prob(*given, 4, vocabulary=9, **how)
    plain = head.logits(head.temperature).log_softmax(1)
    torch.testing.assert_close(own, head.naive()[0], rtol=1e-12, atol=1e-12)
    expected = plain[:, :9].topk(4)
    assert torch.equal(ids, expected.indices) and not log_prob.requires_grad
    torch.testing.assert_close(log_prob, expected.values, rtol=1e-12, atol=1e-12)
    whole = top_k_log_prob(*given, V, **how)[2]
    torch.testing.assert_close(whole.exp().sum(1), torch.ones(N).double())


@pytest.mark.parametrize("with_sets", [False, True])
def test_no_tokens(with_sets):
    head = Head.drawn(count=0, with_sets=with_sets)
    log_prob, entropy, _ = head.run(entropy_gradient=True)
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert head.hidden.grad.shape == (0, D) and not head.weight.grad.any() and not head.bias.grad.any()


@pytest.mark.parametrize("with_sets", [False, True])
def test_no_row_depends_on_another(with_sets):
    """The same row alone, and in other chunks: only the product with the head may round otherwise."""
    head = Head.drawn(torch.float32, count=33, with_sets=with_sets)
    whole = head.run(entropy=True, chunk=64)
    parts = [head.run(entropy=True, chunk=chunk) for chunk in (1, 5, 8, 32)]
    alone = [head.run(slice(n, n + 1), entropy=True) for n in range(33)]
    parts.append([torch.cat(column) for column in zip(*(row[:2] for row in alone), strict=True)])
    for part, i in product(parts, range(2)):
        torch.testing.assert_close(part[i], whole[i], rtol=0, atol=2e-6)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    head = Head.drawn()
    head.weight, head.bias = head.weight.detach(), head.bias.detach()
    head.run().log_prob.sum().backward()
    torch.testing.assert_close(head.hidden.grad, torch.autograd.grad(head.naive()[0].sum(), head.hidden)[0])
    assert head.weight.grad is None


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    log_prob, entropy, _ = token_log_prob(
        hidden, weight, torch.tensor([0, 0]), 0.01, entropy=True, entropy_gradient=True
    )
    assert log_prob.tolist() == [0.0, -2e6] and entropy.tolist() == [0.0, 0.0]
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    mask = PackedSamplingMask(torch.tensor([1, 2, 0, 2]), torch.tensor([0, 2, 4]))
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    output = token_log_prob(hidden, weight, torch.tensor([1, 2]), 0.01, mask=mask)
    assert output.log_prob.tolist() == [-1.5e6, 0.0]
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.log_prob.sum(), (hidden, weight)))


def test_bf16_autocast_keeps_float32_after_the_product():
    head = Head.drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, entropy, _ = head.run(entropy=True)
    assert log_prob.dtype == entropy.dtype == torch.float32
    logits = torch.nn.functional.linear(*(x.bfloat16() for x in head.leaves)).float() / head.temperature[:, None]
    expected = logits.log_softmax(dim=1).gather(1, head.target[:, None]).squeeze(1)
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-5)
    ours, exact = (torch.autograd.grad(x.sum(), head.leaves) for x in (log_prob, head.naive()[0]))
    for mine, other in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.06)


def test_a_bf16_head_sums_its_gradient_over_chunks_in_float32():
    """64 chunks of one direction: in bfloat16 a sum stands still once an addend is below 2^-9 of it."""
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(512, 16, generator=draw) + 1).bfloat16()
    weight, target = torch.randn(40, 16, generator=draw).bfloat16(), torch.zeros(512, dtype=torch.long)

    def gradients(dtype, chunk):
        w, b = (x.to(dtype).requires_grad_() for x in (weight, weight[:, 0]))
        token_log_prob(hidden.to(dtype), w, target, bias=b, chunk=chunk).log_prob.sum().backward()
        return w.grad.double(), b.grad.double()

    for exact, ours in zip(gradients(torch.float64, 512), gradients(torch.bfloat16, 8), strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize(("gib", "rows"), [(22, 2048), (79.2, 4096), (139.8, 4096), (191.7, 8192)])
def test_a_chunk_takes_a_sixteenth_of_a_gpu(gib, rows):
    assert rows_of_logits(int(gib * 2**30), 128_256) == rows
    assert rows_of_logits(int(gib * 2**30), 1000) == 8192  # a small vocabulary


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.slow),  # the graphs alone, in torch's own operations
        pytest.param("inductor", marks=pytest.mark.campaign(f"{COMPILED}[eager]")),
    ],
)
def test_what_comes_between_the_products_may_be_compiled(backend, monkeypatch):
    monkeypatch.setattr("proxima.model.compilation.BACKEND", backend)
    dtype, head = torch.bfloat16, Head.drawn(torch.bfloat16, count=16)
    head.temperature = head.temperature.float()
    more = torch.stack([head.target, head.target.flip(0)], 1)
    how = {"entropy": True, "entropy_gradient": True, "others": more, "others_gradient": True, "chunk": 8}

    def everything(fused):
        outputs = [x for x in head.run(**how, fused=fused) if x is not None]
        sums = sum((x * torch.linspace(-1, 2, x.numel()).view_as(x)).sum() for x in outputs if x.requires_grad)
        return [*outputs, *torch.autograd.grad(sums, head.leaves)]

    for ours, plain in zip(everything(True), everything(False), strict=True):
        step = 2**-7 if ours.dtype == dtype else 1e-5  # of what is rounded to bfloat16
        torch.testing.assert_close(ours, plain, rtol=step, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize(("entropy", "with_sets"), [(False, False), (True, False), (True, True)])
def test_a_chunk_is_let_go_before_the_next_is_made(monkeypatch, entropy, with_sets):
    """As on a GPU, where its rows are processed at once: the logits, and two of their size in float32. A tensor of all
    tokens by the vocabulary would take 16 bytes and more."""
    count, width, vocabulary, chunk = 256, 4, 1000, 32
    monkeypatch.setattr("proxima.model.log_prob.ROWS", chunk)
    hidden, weight = (torch.randn(n, width).bfloat16().requires_grad_() for n in (count, vocabulary))
    target, temperature, most = torch.randint(10, (count,)), torch.ones(count), {}
    mask = PackedSamplingMask(torch.arange(10).repeat(count), 10 * torch.arange(count + 1)) if with_sets else None

    def peak(name, compute):
        with LiveTensors() as live:
            result = compute()
        most[name] = live.most / (chunk * vocabulary)  # bytes of an element
        return result

    how = {"chunk": chunk, "mask": mask}
    options = {"entropy": entropy, "entropy_gradient": entropy, "others": target[:, None], "others_gradient": True}
    output = peak("forward", lambda: token_log_prob(hidden, weight, target, **options, **how))
    sums = output.log_prob.sum() + output.others.sum() + (output.entropy.sum() if entropy else 0)
    peak("backward", sums.backward)
    peak("top", lambda: top_k_log_prob(hidden.detach(), weight.detach(), target, temperature, 16, chunk=chunk))
    peak("square", lambda: log_sum_square(hidden, weight, temperature, **how))
    masks = 1.0 * (entropy + with_sets)
    small = 1.0  # what has no column for each of the vocabulary, and the products of the head
    assert most["forward"] < 2 + 4 + 4 + masks + small
    of_head = 4 * width / chunk  # its gradient, summed in float32
    assert most["backward"] < 2 + 4 + 4 * entropy + masks + small + of_head
    assert most["top"] < 2 + 4 + 4 + small and most["square"] < 2 + 4 + 4 + with_sets + small


def test_a_policy_makes_no_tensor_of_all_tokens_by_vocabulary():
    runner = policy("llama", log_prob_chunk=8)
    batch = runner.pack(rows(*MIXED))
    with Largest() as seen:
        runner(batch, frozenset({"entropy"})).log_prob.sum().backward()
    assert seen.numel < len(batch.target) * 259


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_sets", [True, False])
def test_the_probability_that_two_draws_agree(bias, with_sets):
    head, temperature = Head.drawn(bias=bias, with_sets=with_sets), Head.drawn().temperature
    expected = head.masked_logits(temperature).softmax(1).square().sum(1).log().detach()
    for chunk in CHUNKS:
        agreement = log_sum_square(head.hidden, head.weight, temperature, bias=head.bias, mask=head.sets(), chunk=chunk)
        torch.testing.assert_close(agreement, expected)
        assert not agreement.requires_grad


def test_large_logits_cost_no_digits():
    """Of exact products at T = 1/16: the logits are 400 and less, where a float32 has steps of 3e-5."""
    logits = 25 - torch.arange(24) / 64
    weight = torch.zeros(24, 16)
    weight[:, 0] = logits
    hidden, target = torch.zeros(24, 16), torch.arange(24)
    hidden[:, 0] = 1
    exact = (16 * logits.double()).log_softmax(0)
    result = token_log_prob(hidden, weight, target, 1 / 16, others=target[:, None])
    torch.testing.assert_close(result.log_prob.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.others[:, 0].double(), exact, rtol=0, atol=1e-6)


def test_the_error_of_a_bf16_head_is_that_of_logits_over_the_temperature():
    """docs/mismatch.md: for tokens that were not sampled at the temperature it grows as 1 / temperature."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = 2 * torch.randn(64, 64, generator=draw), 0.5 * torch.randn(500, 64, generator=draw)
    target = torch.randint(500, (64,), generator=draw)
    means = {}
    for temperature in (1.0, 0.05, 0.01):
        exact = token_log_prob(hidden.double(), weight.double(), target, temperature).log_prob
        with torch.autocast("cpu", torch.bfloat16):
            ours = token_log_prob(hidden, weight, target, temperature).log_prob
        logits = (hidden.bfloat16() @ weight.bfloat16().T).float() / temperature
        plain = logits.log_softmax(1).gather(1, target[:, None])[:, 0]
        single = token_log_prob(hidden, weight, target, temperature).log_prob
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
        assert float((single - exact).abs().max()) < 1e-2  # of log-probs in the thousands at .01
        means[temperature] = float((ours - exact).abs().mean())
    assert 0.01 < means[1.0] < 0.1
    assert 15 < means[0.05] / means[1.0] < 30 and 75 < means[0.01] / means[1.0] < 150
