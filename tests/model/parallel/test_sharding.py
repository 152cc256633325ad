"""The settings of sharding, and what needs no ranks."""

import pytest
import torch
from torch import nn

from proxima.data import UserError
from proxima.model.parallel.gather import clip_gradients, total_norm
from proxima.model.parallel.sharding import Sharding


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"kind": "tensor"}, "must be full, hybrid or replicate"),
        ({"param_dtype": "float16"}, "must be bfloat16"),
        ({"sum_gradients": "step"}, "must be micro_batch or update"),
    ],
)
def test_bad_settings_are_refused(settings, bound):
    with pytest.raises(UserError, match=bound):
        Sharding(**settings)


@pytest.mark.parametrize("size", [1.0, 1e-3])  # a small one is not scaled up
def test_norm_and_clipping_of_plain_gradients_are_torch_s(size):
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7))] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = size * torch.randn(a.shape)
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
