"""Log-probs of the tokens that could be sampled: against a plain masked log-softmax in float64, gradients by finite
differences, and rows that no neighbour, chunk or pack changes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.core import PolicyBatch, PpoClip, TokenMean, policy_loss
from proxima.data import SamplingMask
from proxima.model import Policy, token_log_prob
from proxima.model.distribution_figures import log_sum_square
from proxima.model.kept_tokens import KeptTokens
from tests.model.rows import MIXED, loaded, plain_log_prob, rows
from tests.model.test_log_prob import Largest
from tests.tiny import VOCABULARY, tiny

N, D, V = 13, 5, 17


def inputs(dtype=torch.float64, count=N, empty=()):
    """Random states, head and targets, and sets of 1 to V tokens with the target among them."""
    draw = torch.Generator().manual_seed(count)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((count, D), (V, D), (V,))
    )
    target = torch.randint(V, (count,), generator=draw)
    temperature = 0.5 + torch.rand(count, generator=draw, dtype=torch.float64)
    inside = torch.rand(count, V, generator=draw) < torch.rand(count, 1, generator=draw)
    inside[torch.arange(count), target] = True
    inside[list(empty)] = False
    kept = KeptTokens(inside.nonzero()[:, 1], torch.cat([torch.zeros(1, dtype=torch.long), inside.sum(1).cumsum(0)]))
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves, target, temperature.to(dtype), kept, inside


def naive(leaves, target, temperature, inside):
    hidden, weight, bias = leaves
    logits = (hidden @ weight.T + bias) / temperature[:, None]
    whole = logits.log_softmax(1)
    allowed = inside | ~inside.any(1, keepdim=True)  # an empty set: the whole vocabulary
    log_prob = logits.masked_fill(~allowed, -torch.inf).log_softmax(1).gather(1, target[:, None])[:, 0]
    return log_prob, -(whole.exp() * whole).sum(1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 256])
@pytest.mark.parametrize("empty", [(), (0, 7)])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_equal_a_masked_log_softmax(chunk, empty, entropy):
    leaves, target, temperature, kept, inside = inputs(empty=empty)
    hidden, weight, bias = leaves
    output = token_log_prob(
        hidden, weight, target, temperature, bias=bias, kept=kept, entropy_gradient=entropy, chunk=chunk
    )
    log_prob, full_entropy = naive(leaves, target, temperature, inside)
    torch.testing.assert_close(output.log_prob, log_prob, rtol=1e-12, atol=1e-12)
    mix = torch.linspace(-2, 3, N, dtype=torch.float64)
    ours, theirs = (output.log_prob * mix).sum(), (log_prob * mix).sum()
    if entropy:
        torch.testing.assert_close(output.entropy, full_entropy, rtol=1e-12, atol=1e-12)
        ours, theirs = ours + (output.entropy * mix.flip(0)).sum(), theirs + (full_entropy * mix.flip(0)).sum()
    for mine, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("empty", [(), (1,)])
def test_gradcheck(entropy, others, empty):
    leaves, target, temperature, kept, _ = inputs(count=4, empty=empty)
    more = torch.tensor([[0, 3], [5, 5], [16, 1], [2, 9]]) if others else None

    def f(h, w, b):
        outputs = token_log_prob(
            h,
            w,
            target,
            temperature,
            bias=b,
            kept=kept,
            entropy_gradient=entropy,
            others=more,
            others_gradient=others,
            chunk=3,
        )
        return tuple(x for x in outputs if x is not None)

    assert torch.autograd.gradcheck(f, tuple(leaves))


def test_the_gradient_is_zero_outside_the_set():
    """With the logits themselves as bias: only the logits of the set get one, and it sums to zero."""
    bias = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kept = KeptTokens(torch.tensor([2, 5, 11]), torch.tensor([0, 3]))
    zero = torch.zeros(1, D, dtype=torch.float64), torch.zeros(V, D, dtype=torch.float64)
    output = token_log_prob(*zero, torch.tensor([5]), bias=bias, kept=kept)
    (grad,) = torch.autograd.grad(output.log_prob.sum(), bias)
    p = bias[[2, 5, 11]].softmax(0)
    expected = torch.zeros(V, dtype=torch.float64)
    expected[[2, 5, 11]] = torch.tensor([0.0, 1, 0], dtype=torch.float64) - p.detach()
    torch.testing.assert_close(grad, expected)
    assert grad[[0, 1, 3, 4]].eq(0).all() and abs(float(grad.sum())) < 1e-15


def test_a_set_of_one_is_certain_and_teaches_nothing():
    leaves, target, temperature, _, _ = inputs(torch.float32)
    kept = KeptTokens(target, torch.arange(N + 1))
    output = token_log_prob(leaves[0], leaves[1], target, temperature, bias=leaves[2], kept=kept, entropy=True)
    assert output.log_prob.eq(0).all()
    for grad in torch.autograd.grad(output.log_prob.sum(), leaves):
        assert grad.abs().max() < 1e-6


def test_the_whole_vocabulary_as_a_set_changes_nothing():
    (hidden, weight, bias), target, temperature, _, _ = inputs(torch.float32)
    kept = KeptTokens(torch.arange(V).repeat(N), V * torch.arange(N + 1))
    with_set, plain = (
        token_log_prob(hidden, weight, target, temperature, bias=bias, kept=subset, entropy=True)
        for subset in (kept, None)
    )
    torch.testing.assert_close(with_set.log_prob, plain.log_prob, rtol=0, atol=5e-7)
    assert torch.equal(with_set.entropy, plain.entropy)


def test_no_row_depends_on_another():
    """The same row alone, and in other chunks: only the product with the head may round otherwise."""
    (hidden, weight, bias), target, temperature, kept, inside = inputs(torch.float32)
    whole = token_log_prob(hidden, weight, target, temperature, bias=bias, kept=kept).log_prob
    for n in range(N):
        row = slice(n, n + 1)
        own = KeptTokens(inside[n].nonzero()[:, 0], torch.tensor([0, int(inside[n].sum())]))
        alone = token_log_prob(hidden[row], weight, target[row], temperature[row], bias=bias, kept=own).log_prob
        torch.testing.assert_close(alone, whole[row], rtol=0, atol=2e-6)
    for chunk in (1, 3, 8):
        parts = token_log_prob(hidden, weight, target, temperature, bias=bias, kept=kept, chunk=chunk).log_prob
        torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


def test_no_tokens_and_extreme_logits():
    (hidden, weight, bias), target, temperature, _, _ = inputs(count=4)
    nothing = KeptTokens(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    none = token_log_prob(hidden[:0], weight, target[:0], temperature[:0], bias=bias, kept=nothing)
    assert none.log_prob.shape == (0,)
    far = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    kept = KeptTokens(torch.tensor([1, 2, 0, 2]), torch.tensor([0, 2, 4]))
    output = token_log_prob(far, head, torch.tensor([1, 2]), 0.01, kept=kept)
    assert output.log_prob.tolist() == [-1.5e6, 0.0]
    output.log_prob.sum().backward()
    assert far.grad.isfinite().all() and head.grad.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_the_probability_that_two_draws_from_the_set_agree(chunk):
    (hidden, weight, bias), _, temperature, kept, inside = inputs()
    agreement = log_sum_square(hidden, weight, temperature, bias=bias, kept=kept, chunk=chunk)
    logits = ((hidden @ weight.T + bias) / temperature[:, None]).masked_fill(~inside, -torch.inf)
    torch.testing.assert_close(agreement, logits.softmax(1).square().sum(1).log().detach())


def test_nothing_of_all_tokens_by_vocabulary_is_made():
    count, vocabulary, chunk = 512, 1000, 32
    hidden, weight = torch.randn(count, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    kept = KeptTokens(torch.arange(10).repeat(count), 10 * torch.arange(count + 1))
    with Largest() as seen:
        output = token_log_prob(
            hidden, weight, torch.zeros(count, dtype=torch.long), entropy=True, kept=kept, chunk=chunk
        )
        output.log_prob.sum().backward()
    assert seen.numel == chunk * vocabulary


def test_the_numbers_of_an_independent_script():
    """`tests/golden/make_sampling_mask.py`: truncation, ratio, PPO clip and gradient in plain numpy."""
    with np.load(Path(__file__).parents[1] / "golden" / "sampling_mask.npz") as file:
        golden = {name: torch.from_numpy(file[name]) for name in file.files}
    leaves = [golden[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    target, temperature, count = golden["target"], golden["temperature"], len(golden["target"])
    kept = KeptTokens(golden["ids"], torch.cat([torch.zeros(1, dtype=torch.long), golden["counts"].cumsum(0)]))
    output = token_log_prob(*leaves[:2], target, temperature, bias=leaves[2], kept=kept, entropy=True, chunk=5)
    agreement = log_sum_square(leaves[0], leaves[1], temperature, bias=leaves[2], kept=kept)
    for ours, name in ((output.log_prob, "log_prob"), (output.entropy, "entropy"), (agreement, "log_sum_square")):
        torch.testing.assert_close(ours, golden[name], rtol=1e-12, atol=1e-12)
    batch = PolicyBatch(
        log_prob=output.log_prob,
        behavior_log_prob=golden["behavior"],
        advantage=golden["advantage"],
        loss_mask=torch.ones(count, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, count]),
    )
    loss = policy_loss(batch, surrogate=PpoClip(epsilon_low=0.2, epsilon_high=0.2), aggregate=TokenMean())
    assert loss.value.item() == pytest.approx(float(golden["loss"].mean()), abs=1e-12)
    for mine, name in zip(torch.autograd.grad(loss.value, leaves), ("hidden", "weight", "bias"), strict=True):
        torch.testing.assert_close(mine, golden[f"grad_{name}"], rtol=1e-10, atol=1e-14)


def masked_rows(draw_seed=3):
    """Trajectories of four prompts with random sets around their tokens, and the sets as a boolean table."""
    draw, out = np.random.default_rng(draw_seed), []
    for row in rows(*MIXED, temperature=(1.0, 0.7)):
        sets = [
            np.union1d(draw.choice(VOCABULARY, draw.integers(0, 40), replace=False), [token]) for token in row.tokens
        ]
        out.append(replace(row, sampling_mask=SamplingMask.of_sets(sets)))
    return out


@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_packed_policy_equals_hugging_face_logits_one_sequence_at_a_time(attention, share_prompt):
    """Against float64 over the logits of the Hugging Face model."""
    items, model = masked_rows(), tiny("llama")
    policy = Policy(loaded("llama"), attention=attention, share_prompt=share_prompt)
    batch = policy.pack(items)
    with torch.no_grad():
        actual = policy(batch).log_prob
        expected = []
        for item in items:
            ids = torch.tensor([[*item.prompt_tokens, *item.tokens]])
            logits = model(ids, use_cache=False).logits[0, len(item.prompt_tokens) - 1 : -1].double()
            for t, token in enumerate(item.tokens.tolist()):
                own = torch.tensor(item.sampling_mask.part(t, t + 1).ids, dtype=torch.long)
                scaled = logits[t] / float(np.float32(item.temperature))
                expected.append(scaled[token] - scaled[own].logsumexp(0))
    torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=0, atol=3e-5)
    plain = torch.cat([plain_log_prob(model, item) for item in items if len(item.tokens)])
    assert (actual - plain).min() > -3e-5 and (actual - plain).mean() > 0.5  # less than the vocabulary to share


def test_order_and_neighbours_of_a_pack_change_nothing():
    items, policy = masked_rows(), Policy(loaded("llama"))
    with torch.no_grad():
        together = policy(policy.pack(items)).log_prob.split([len(item.tokens) for item in items])
        for item, expected in zip(items, together, strict=True):
            alone = policy(policy.pack([item])).log_prob
            torch.testing.assert_close(alone, expected, rtol=0, atol=3e-5)
