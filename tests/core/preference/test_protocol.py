"""What holds for every preference loss."""

import pytest
import torch

from proxima.core.preference import PREFERENCES
from tests.core.preference.pairs import pairs


@pytest.mark.parametrize("kind", sorted(PREFERENCES))
def test_preference_gradients_are_derivatives_and_raise_the_chosen(kind: str) -> None:
    draw = torch.Generator().manual_seed(7)
    values = [(-3 * torch.rand(5, generator=draw, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    references = {
        f"reference_{side}": -3 * torch.rand(5, generator=draw, dtype=torch.float64) for side in ("chosen", "rejected")
    }
    lengths = {f"{side}_length": torch.randint(1, 9, (5,), generator=draw) for side in ("chosen", "rejected")}
    spec = PREFERENCES[kind]()

    def loss(c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return spec(pairs(c, r, **references, **lengths)).mean()

    assert torch.autograd.gradcheck(loss, tuple(values), eps=1e-6, atol=1e-5)
    assert spec(pairs(*values, **references, **lengths)).shape == (5,)
    gradient = torch.autograd.grad(loss(*values), values, allow_unused=True)
    if kind not in ("apo_down", "sppo_hard", "ipo", "discopop"):  # a target, both lowered, or not monotone
        assert bool((gradient[0] <= 0).all())
