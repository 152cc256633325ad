"""Updates in bf16 on a CPU step in one pass over the weights, and are those of torch's optimizer."""

import pytest
import torch
from torch import nn

from proxima.data import NotFiniteError
from proxima.kernels.compiled import unavailable
from proxima.model.policy import Policy
from proxima.training import stack
from proxima.training.optimizer import AdamW, OnePassAdamW, one_pass
from tests.model.rows import loaded, same
from tests.training.helpers import trainer_of, trajectories, weights

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")
PLAN = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(stack, "LEAST_COMPILED", 0)


def in_bf16(**settings):
    return trainer_of(Policy(loaded("llama"), compute_dtype=torch.bfloat16), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("most", [0.0, 1e-3, 1e6])
def test_an_update_is_that_of_torch(most):
    settings = {"optimizer": AdamW(lr=1e-3, weight_decay=0.1), "max_grad_norm": most}
    ours, theirs = in_bf16(**settings), in_bf16(**settings)
    assert isinstance(ours._one_pass, OnePassAdamW)
    theirs.stack._one_pass = None
    actual, expected = (t.update(PLAN, trajectories()).metrics for t in (ours, theirs))
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    exact = weights(theirs)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, exact[name], rtol=1e-5, atol=1e-7)
    (tensors, _), (states, _) = ours.state(), theirs.state()
    assert tensors.keys() == states.keys() and {tensors[name].dtype for name in tensors} == {torch.float32}
    assert ours._one_pass.weight_norms[1] == pytest.approx(theirs._weight_norm(), rel=1e-6)
    again = in_bf16(**settings)
    again.model.model.load_state_dict(ours.model.model.state_dict())
    again.load(*ours.state())
    assert all(t.update(PLAN, trajectories()) for t in (ours, again))
    assert same(weights(again), weights(ours))


def test_a_gradient_that_is_not_finite_changes_nothing(monkeypatch):
    t = in_bf16()
    before = weights(t)
    monkeypatch.setattr(t._one_pass, "gradient_norm", lambda: torch.tensor(torch.nan))
    with pytest.raises(NotFiniteError, match="gradient norm of update 1 is nan"):
        t.update(PLAN, trajectories())
    assert same(weights(t), before)


def test_weights_that_explode_are_seen():
    with pytest.raises(NotFiniteError, match="the norm of the weights rose from"):
        in_bf16(optimizer=AdamW(lr=100.0)).update(PLAN, trajectories())


def test_what_torch_steps_itself(monkeypatch):
    assert trainer_of(Policy(loaded("llama")))._one_pass is None  # float32 keeps its bits
    half = torch.optim.AdamW([nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], fused=True)
    other = torch.optim.SGD([nn.Parameter(torch.ones(4))])
    assert one_pass(half) is None and one_pass(other) is None
    monkeypatch.setattr(stack, "LEAST_COMPILED", 1 << 20)
    assert in_bf16()._one_pass is None
    monkeypatch.setattr(stack, "LEAST_COMPILED", 0)
    monkeypatch.setattr("proxima.training.optimizer.adamw_kernels", lambda: None)
    assert in_bf16()._one_pass is None
