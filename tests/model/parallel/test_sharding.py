"""The settings of sharding, and what needs no ranks."""

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.model.parallel.norm import clip_gradients, total_norm
from proxima.model.parallel.sharded import fill_weight, is_sharded, plain_type
from proxima.model.parallel.sharding import Sharding


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"kind": "tensor"}, "must be full, hybrid or replicate"),
        ({"kind": "hybrid", "ranks_per_node": 0}, "must be >= 1"),
        ({"ranks_per_node": 2}, "has no meaning with kind=full"),
        ({"param_dtype": "float16"}, "must be bfloat16"),
        ({"sum_gradients": "step"}, "must be micro_batch or update"),
    ],
)
def test_bad_settings_are_refused(settings, bound):
    with pytest.raises(UserError, match=bound):
        Sharding(**settings)


def test_norm_and_clipping_of_plain_gradients_are_torch_s():
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7))] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    norm = total_norm([p.grad for p in ours])
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    assert norm.dtype == torch.float64 and norm.dim() == 0
    torch.testing.assert_close(norm.float(), expected)
    clip_gradients(ours, 1.0, norm)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert float(total_norm([])) == 0
    assert float(total_norm([torch.tensor([1.0, torch.nan])])) != float(total_norm([torch.zeros(1)]))


def test_a_small_gradient_is_not_scaled_up():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.3, 0.4])
    clip_gradients([weight], 1.0, total_norm([weight.grad]))
    assert torch.equal(weight.grad, torch.tensor([0.3, 0.4]))


def test_a_plain_module_is_what_it_is():
    layer = nn.Linear(2, 1, bias=False)
    assert not is_sharded(layer) and plain_type(layer) is nn.Linear
    fill_weight(layer.weight, torch.tensor([[1.0, 2.0]]))
    assert layer.weight.tolist() == [[1.0, 2.0]]
