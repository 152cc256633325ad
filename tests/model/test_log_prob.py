"""The fused head against plain log-softmax: values, gradients, entropy, temperature, chunks, memory."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rank_memory.rank import LiveTensors
from proxima.model import logit_rows, token_log_prob
from proxima.model.distribution_figures import log_sum_square, top_k_log_prob
from tests.model.rows import MIXED, policy, rows

N, D, V = 11, 5, 13


def inputs(dtype=torch.float64, bias=True, count=N):
    draw = torch.Generator().manual_seed(count)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(V, (count,), generator=draw)
    temperature = (0.5 + torch.rand(count, generator=draw, dtype=torch.float64)).to(dtype)
    return normal(count, D), normal(V, D), normal(V) if bias else None, target, temperature


def naive(hidden, weight, bias, target, temperature):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = (logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)).log_softmax(
        dim=1
    )
    return log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scalar", [None, 1.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 4, 11, 256])
def test_values_and_gradients_equal_plain_log_softmax(bias, scalar, chunk):
    hidden, weight, b, target, temperature = inputs(bias=bias)
    temperature = temperature if scalar is None else scalar
    log_prob, entropy, _ = token_log_prob(
        hidden, weight, target, temperature, bias=b, entropy=True, entropy_gradient=True, chunk=chunk
    )
    expected, expected_entropy = naive(hidden, weight, b, target, temperature)
    torch.testing.assert_close(log_prob, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    mix = torch.linspace(-2, 3, N, dtype=torch.float64)
    leaves = [x for x in (hidden, weight, b) if x is not None]
    ours = torch.autograd.grad((log_prob * mix + entropy * mix.flip(0)).sum(), leaves)
    theirs = torch.autograd.grad((expected * mix + expected_entropy * mix.flip(0)).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradcheck(entropy_gradient):
    hidden, weight, bias, target, temperature = inputs(count=4)

    def f(h, w, b):
        log_prob, entropy, _ = token_log_prob(
            h, w, target, temperature, bias=b, entropy_gradient=entropy_gradient, entropy=True, chunk=3
        )
        return (log_prob, entropy) if entropy_gradient else log_prob

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


OTHERS = torch.tensor([[0, 3, 7], [12, 1, 0], [5, 5, 2], [4, 3, 2]])  # with a duplicate, and with targets among them


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_gradients_of_other_tokens_equal_plain_log_softmax(bias, entropy, chunk):
    hidden, weight, b, target, temperature = inputs(bias=bias, count=4)
    leaves = [x for x in (hidden, weight, b) if x is not None]

    def ours(h, w, c=None):
        outputs = token_log_prob(
            h,
            w,
            target,
            temperature,
            bias=c,
            others=OTHERS,
            others_gradient=True,
            entropy_gradient=entropy,
            chunk=chunk,
        )
        return tuple(x for x in outputs if x is not None)

    assert torch.autograd.gradcheck(ours, tuple(leaves))
    log_prob, *_, others = ours(*leaves)
    logits = hidden @ weight.T + (0 if b is None else b)
    expected = (logits / temperature[:, None]).log_softmax(1).gather(1, OTHERS)
    torch.testing.assert_close(others, expected, rtol=1e-12, atol=1e-12)
    mix = torch.linspace(-2, 3, 12, dtype=torch.float64).view(4, 3)
    pairs = zip(
        torch.autograd.grad((others * mix).sum() + log_prob.sum(), leaves),
        torch.autograd.grad((expected * mix).sum() + naive(hidden, weight, b, target, temperature)[0].sum(), leaves),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_other_tokens_carry_no_gradient_unless_asked():
    hidden, weight, bias, target, temperature = inputs(count=4)
    assert not token_log_prob(hidden, weight, target, temperature, bias=bias, others=OTHERS).others.requires_grad


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_the_most_probable_tokens(chunk):
    hidden, weight, bias, target, temperature = inputs()
    own, ids, log_prob = top_k_log_prob(hidden, weight, target, temperature, 4, bias=bias, vocabulary=9, chunk=chunk)
    plain = ((hidden @ weight.T + bias) / temperature[:, None]).log_softmax(1)
    torch.testing.assert_close(own, plain.gather(1, target[:, None])[:, 0], rtol=1e-12, atol=1e-12)
    expected = plain[:, :9].topk(4)
    assert torch.equal(ids, expected.indices) and not log_prob.requires_grad
    torch.testing.assert_close(log_prob, expected.values, rtol=1e-12, atol=1e-12)
    whole = top_k_log_prob(hidden, weight, target, temperature, V, bias=bias, chunk=chunk)[2]
    torch.testing.assert_close(whole.exp().sum(1), torch.ones(N).double())


def test_the_entropy_carries_no_gradient_unless_asked():
    hidden, weight, bias, target, temperature = inputs()
    log_prob, entropy, _ = token_log_prob(hidden, weight, target, temperature, bias=bias, entropy=True)
    assert log_prob.requires_grad and not entropy.requires_grad
    assert token_log_prob(hidden, weight, target, temperature)[1] is None
    assert token_log_prob(hidden, weight, target, temperature, entropy_gradient=True)[1].requires_grad


def test_by_hand():
    """Two tokens, logits (0, ln 3) at temperature 1: p = (1/4, 3/4); at temperature 2 p is as of (0, ln √3)."""
    weight, hidden = torch.tensor([[0.0], [math.log(3)]]), torch.ones(2, 1)
    log_prob, entropy, _ = token_log_prob(hidden, weight, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), entropy=True)
    q = math.sqrt(3) / (1 + math.sqrt(3))
    assert log_prob.tolist() == pytest.approx([math.log(0.25), math.log(q)], abs=1e-6)
    assert entropy[0].item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-6)


def test_no_tokens():
    hidden, weight, bias, target, temperature = inputs(count=0)
    log_prob, entropy, _ = token_log_prob(
        hidden, weight, target, temperature, bias=bias, entropy=True, entropy_gradient=True
    )
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, D) and not weight.grad.any() and not bias.grad.any()


def test_the_chunk_changes_no_value_of_a_row():
    hidden, weight, bias, target, temperature = (
        x.detach() if x.is_floating_point() else x for x in inputs(torch.float32, count=33)
    )
    whole = token_log_prob(hidden, weight, target, temperature, bias=bias, entropy=True, chunk=64)
    for chunk in (1, 5, 8, 32):
        parts = token_log_prob(hidden, weight, target, temperature, bias=bias, entropy=True, chunk=chunk)
        for a, b in zip(whole[:2], parts[:2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, bias, target, temperature = inputs()
    weight, bias = weight.detach(), bias.detach()
    token_log_prob(hidden, weight, target, temperature, bias=bias)[0].sum().backward()
    expected = torch.autograd.grad(naive(hidden, weight, bias, target, temperature)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)
    assert weight.grad is None


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    log_prob, entropy, _ = token_log_prob(
        hidden, weight, torch.tensor([0, 0]), 0.01, entropy=True, entropy_gradient=True
    )
    assert log_prob.tolist() == [0.0, -2e6] and entropy.tolist() == [0.0, 0.0]
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_bf16_autocast_keeps_float32_after_the_product():
    hidden, weight, bias, target, temperature = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, entropy, _ = token_log_prob(hidden, weight, target, temperature, bias=bias, entropy=True)
    assert log_prob.dtype == entropy.dtype == torch.float32
    logits = (
        torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16()).float() / temperature[:, None]
    )
    expected = logits.log_softmax(dim=1).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-5)
    log_prob.sum().backward()
    exact = torch.autograd.grad(naive(hidden, weight, bias, target, temperature)[0].sum(), (hidden, weight, bias))
    for mine, other in zip((hidden.grad, weight.grad, bias.grad), exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.06)


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


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_all_tokens_by_vocabulary_is_ever_made(entropy):
    count, width, vocabulary, chunk = 512, 4, 1000, 32
    hidden, weight = torch.randn(count, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    target = torch.randint(vocabulary, (count,))
    with Largest() as seen:
        _, ids, _ = top_k_log_prob(hidden.detach(), weight.detach(), target, torch.ones(count), 16, chunk=chunk)
        log_prob, ent, others = token_log_prob(
            hidden,
            weight,
            target,
            entropy=entropy,
            entropy_gradient=entropy,
            others=ids,
            others_gradient=True,
            chunk=chunk,
        )
        (log_prob.sum() + others.sum() + (ent.sum() if entropy else 0)).backward()
    assert seen.numel == chunk * vocabulary
    with Largest() as plain:
        naive(hidden, weight, None, target, 1.0)[0].sum().backward()
    assert plain.numel == count * vocabulary


@pytest.mark.parametrize("entropy", [False, True])
def test_a_chunk_is_let_go_before_the_next_is_made(monkeypatch, entropy):
    """As on a GPU, where its rows are processed at once: the logits, and two of their size in float32."""
    count, width, vocabulary, chunk = 256, 4, 1000, 32
    monkeypatch.setattr(logit_rows, "ROWS", chunk)
    hidden, weight = (torch.randn(n, width).bfloat16().requires_grad_() for n in (count, vocabulary))
    target, temperature, most = torch.randint(vocabulary, (count,)), torch.ones(count), {}

    def peak(name, compute):
        with LiveTensors() as live:
            result = compute()
        most[name] = live.most / (chunk * vocabulary)  # bytes of an element
        return result

    options = {"entropy": entropy, "entropy_gradient": entropy, "chunk": chunk}
    output = peak("forward", lambda: token_log_prob(hidden, weight, target, **options))
    peak("backward", (output.log_prob.sum() + (output.entropy.sum() if entropy else 0)).backward)
    peak("top", lambda: top_k_log_prob(hidden.detach(), weight.detach(), target, temperature, 16, chunk=chunk))
    peak("square", lambda: log_sum_square(hidden, weight, temperature, chunk=chunk))
    masks = 1.0 if entropy else 0.0
    small = 1.0  # what has no column for each of the vocabulary, and the gradient of the head
    assert most["forward"] < 2 + 4 + 4 + masks + small
    assert most["backward"] < 2 + 4 + 4 * entropy + masks + small
    assert most["top"] < 2 + 4 + 4 + small and most["square"] < 2 + 4 + 4 + small


def test_a_policy_makes_none_either():
    runner = policy("llama", log_prob_chunk=8)
    batch = runner.pack(rows(*MIXED))
    with Largest() as seen:
        runner(batch, frozenset({"entropy"})).log_prob.sum().backward()
    assert seen.numel < len(batch.target) * 259


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_the_probability_that_two_draws_agree(bias, chunk):
    hidden, weight, b, _, temperature = inputs(bias=bias)
    agreement = log_sum_square(hidden, weight, temperature, bias=b, chunk=chunk)
    logits = (hidden @ weight.T + (0 if b is None else b)) / temperature[:, None]
    torch.testing.assert_close(agreement, logits.softmax(1).square().sum(1).log().detach())
    assert not agreement.requires_grad
