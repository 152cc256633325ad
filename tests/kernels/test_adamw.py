"""A step has the bits of torch's fused AdamW, and the norms are those of float64."""

import pytest
import torch
from torch import nn

from proxima.kernels.adamw import adamw_kernels
from proxima.kernels.compiled import unavailable
from tests.engine.helpers import threads

SIZES = (3 * 16_384 + 16, 160, 7, 16_403)
TAILS = 16  # numbers at the end of the last two, which torch rounds otherwise

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")


@pytest.mark.parametrize(("beta1", "beta2", "decay"), [(0.9, 0.999, 0.0), (0.4, 0.95, 0.1)])
def test_steps_have_the_bits_of_torch(beta1, beta2, decay):
    torch.manual_seed(0)
    kernels = adamw_kernels()
    weights = [torch.randn(size) for size in SIZES]
    theirs = [nn.Parameter(weight.clone()) for weight in weights]
    peer = torch.optim.AdamW(theirs, 1e-3, (beta1, beta2), weight_decay=decay, fused=True)
    first, second = ([torch.zeros(size) for size in SIZES] for _ in range(2))
    settings = {"lr": 1e-3, "beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": decay}
    for step in (1, 2, 3):
        grads = [torch.randn(size) for size in SIZES]
        for own, grad in zip(theirs, grads, strict=True):
            own.grad = grad * 0.37
        before = squares(weights)
        slots = list(zip(weights, grads, first, second, [step] * len(SIZES), strict=True))
        norms = kernels.step(slots, torch.tensor(0.37).item(), **settings)
        peer.step()
        assert norms == pytest.approx((before, squares(weights)), rel=1e-6)
        assert kernels.gradient_norm(slots) == pytest.approx(squares(grads) ** 0.5, rel=1e-6)
    for i, own in enumerate(theirs):
        state = peer.state[own]
        for ours, exact in ((weights[i], own), (first[i], state["exp_avg"]), (second[i], state["exp_avg_sq"])):
            whole = SIZES[i] // TAILS * TAILS
            assert torch.equal(ours[:whole], exact[:whole])
            torch.testing.assert_close(ours, exact.detach(), rtol=1e-6, atol=1e-7)


def test_threads_change_no_bit():
    torch.manual_seed(1)
    tensors, runs = [torch.randn(50_000) for _ in range(3)], []
    for count in (1, 3):
        own = [tensor.clone() for tensor in (*tensors, tensors[2].square())]
        settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
        kernels = adamw_kernels()
        with threads(count):
            norms = kernels.gradient_norm([(*own, 1)]), kernels.step([(*own, 1)], 1.0, **settings)
        runs.append((norms, own[0]))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])


def test_what_is_not_finite_is_seen():
    grads = torch.ones(40)
    grads[37] = torch.inf
    assert adamw_kernels().gradient_norm([(grads, grads, grads, grads, 0)]) == torch.inf
    grads[3] = torch.nan
    assert adamw_kernels().gradient_norm([(grads, grads, grads, grads, 0)]) != pytest.approx(0, abs=torch.inf)


def squares(tensors):
    return sum(float((tensor.double() ** 2).sum()) for tensor in tensors)
