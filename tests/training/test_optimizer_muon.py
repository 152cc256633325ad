"""Which weights Muon has, and its schedule; test_optimizer_step.py has its steps."""

import pytest
import torch

from proxima.training.optimizer_muon import Muon
from tests.model.families import make
from tests.training.helpers import trainer, trajectories


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3-MoE"])
def test_matrices_of_layers_are_muon_s_and_the_rest_is_adamw_s(family):
    optimizer = Muon().build_named(make(family).model.named_parameters())
    model = make(family).model
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("model.layers.")]
    (muon,) = [group for group in optimizer.param_groups if group["momentum"] is not None]
    assert len(muon["params"]) == len(names) > 6
    assert all(p.dim() == 2 and min(p.shape) > 1 for p in muon["params"])
    others = [p for group in optimizer.param_groups if group["momentum"] is None for p in group["params"]]
    assert len(others) + len(names) == len(list(model.parameters()))
    assert any(len(p) == model.config.vocab_size for p in others)
    assert any(p.dim() == 3 for p in others) is (family == "Qwen3-MoE")


@pytest.mark.slow
def test_the_schedule_scales_both_learning_rates():
    stack = trainer(optimizer=Muon(lr=1e-3, adamw_lr=1e-4), schedule="linear", total_updates=4, warmup=2)
    rates, items = [], trajectories()
    for factor in (0.5, 1.0, 1.0, 0.5):
        result = stack.update([list(range(13))], items)
        assert result.metrics["lr"] == pytest.approx(factor * 1e-3)  # the metric is that of Muon
        rates.append(sorted({group["lr"] for group in stack.optimizer.param_groups}))
    assert rates == [pytest.approx([f * 1e-4, f * 1e-3]) for f in (0.5, 1.0, 1.0, 0.5)]


@pytest.mark.parametrize("shape", [(2, 8), (8, 2)])
def test_a_step_has_the_scale_of_the_longer_side(shape):
    """lr .2 sqrt(8) for a wide matrix as for a tall one; its orthogonal part has singular values of about 1."""
    torch.manual_seed(0)
    weight, gradient = torch.zeros(shape), torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    Muon(lr=0.1, weight_decay=0.0).build([ours]).step()
    torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(ours, theirs)
    values = torch.linalg.svdvals(ours.detach()) / (0.1 * 0.2 * max(shape) ** 0.5)
    assert all(0.6 < value < 1.3 for value in values.tolist())
