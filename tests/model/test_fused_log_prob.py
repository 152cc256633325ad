"""The fused head against the one that recomputes logits by rows."""

from functools import partial

import pytest
import torch

from proxima.kernels.compiled import unavailable
from proxima.model import fused as fused_module
from proxima.model.log_prob import token_log_prob

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")


def run(hidden, weight, target, temperature, entropy_gradient, chunk=7):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        out = token_log_prob(
            leaves[0], leaves[1], target, temperature, entropy=True, entropy_gradient=entropy_gradient, chunk=chunk
        )
    slopes = torch.linspace(-1, 1, len(target))
    loss = (out.log_prob * slopes).sum() + (0.5 * (out.entropy * slopes).sum() if entropy_gradient else 0)
    loss.backward()
    return out.log_prob.detach(), out.entropy.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("count", [0, 1, 37])
@pytest.mark.parametrize("chunk", [7, 37])
@pytest.mark.parametrize("vocabulary", [400, 397])  # the second ends within a register
def test_equals_the_general_path(vocabulary, chunk, count, entropy_gradient, monkeypatch):
    torch.manual_seed(2)
    hidden, weight = torch.randn(count, 48), torch.randn(vocabulary, 48) * 0.3
    target, temperature = torch.randint(0, vocabulary, (count,)), torch.linspace(0.5, 2, count)
    fused = run(hidden, weight, target, temperature, entropy_gradient, chunk)
    monkeypatch.setattr("proxima.model.log_prob.fused_log_prob", lambda *a: None)
    general = run(hidden, weight, target, temperature, entropy_gradient, chunk)
    for ours, theirs in zip(fused, general, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= (2e-6 if ours.dim() == 1 else 0.005) * theirs.norm()


def test_an_improbable_token_and_an_infinite_gap():
    hidden, weight = torch.full((2, 16), 4.0), torch.zeros(32, 16)
    weight[0], weight[1] = 8.0, -torch.inf
    log_prob, entropy, grad, _ = run(hidden, weight, torch.tensor([0, 1]), torch.ones(2), True)
    assert log_prob[0] == 0
    assert log_prob[1] == -torch.inf
    assert entropy.isfinite().all()
    assert grad.shape == (2, 16)


def test_how_arguments_lie_in_memory_does_not_matter():
    torch.manual_seed(4)
    weight, target, temperature = torch.randn(400, 48) * 0.3, torch.randint(0, 400, (37,)), torch.full((37,), 0.7)
    hidden = torch.randn(48, 37).T
    expected = run(hidden.contiguous(), weight, target, temperature, False)
    spread = target.repeat_interleave(2)[::2]
    for given in ((target, torch.tensor(0.7).expand(37)), (spread, temperature), (target.int(), temperature)):
        actual = run(hidden, weight, *given, False)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("token", [-1, 32])
def test_a_target_beyond_the_vocabulary_is_refused(token):
    with pytest.raises(IndexError, match=f"target {token} is not a token of a vocabulary of 32"):
        run(torch.randn(2, 16), torch.randn(32, 16), torch.tensor([3, token]), torch.ones(2), False)


@pytest.mark.parametrize(("chunk", "passes"), [(36, 2), (37, 1)])
def test_logits_of_one_chunk_are_computed_once(chunk, passes, monkeypatch):
    """For the first backward pass, which overwrites them: a second one is right all the same."""
    torch.manual_seed(5)
    hidden, weight = torch.randn(37, 48, requires_grad=True), torch.randn(384, 48, requires_grad=True)
    rows = []
    linear = fused_module.F.linear
    monkeypatch.setattr(fused_module.F, "linear", lambda h, w: rows.append(len(h) * len(w)) or linear(h, w))
    with torch.autocast("cpu", torch.bfloat16):
        out = token_log_prob(hidden, weight, torch.arange(37), torch.ones(37), chunk=chunk).log_prob
    gradient = partial(torch.autograd.grad, out.sum(), (hidden, weight), retain_graph=True)
    first = gradient()
    assert sum(rows) == passes * 37 * 384
    again = gradient()
    assert sum(rows) == (passes + 1) * 37 * 384
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
