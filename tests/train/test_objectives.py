"""Objectives without engine, reward or task: the stack knows no RL, and no split changes a gradient."""

from dataclasses import dataclass

import pytest
import torch

from proxima.core.loss import Loss
from proxima.data import Trajectory
from proxima.model import PackedModel, Policy, ScalarModel, load_scalar_model
from proxima.model.scalar_model import make_value_head
from proxima.train import Objective, TrainStack
from tests.model.rows import assert_close, loaded, same
from tests.train.helpers import recorded, trajectories

BUDGETS = (1, 12, 10_000)


def rows():
    return [row for row in trajectories() if len(row.tokens)]


@dataclass(frozen=True)
class Regression(Objective[Trajectory]):
    """Values towards the number 1, for a scalar head."""

    @property
    def outputs(self):
        return frozenset({"value"})

    def denominators(self, items, statistics=None):
        return [torch.tensor(float(sum(len(item.tokens) for item in items)), dtype=torch.float64)]

    def losses(self, batch, outputs, statistics=None):
        error = (outputs.need("value") - 1).square().sum(dtype=torch.float64)
        return [Loss(error, torch.tensor(float(len(batch.target)), dtype=torch.float64), {})]


def critic(kind: str, folder) -> PackedModel:
    if kind == "scalar":
        return ScalarModel(load_scalar_model(str(folder), device="cpu", new_head=0.2))
    base = loaded("llama")
    return Policy(base, value_head=make_value_head(base.model, 0.2))


@pytest.mark.parametrize(("kind", "head"), [("scalar", "score.weight"), ("policy", "value_head.weight")])
def test_a_scalar_head_is_trained_with_its_trunk(kind, head, tiny_model):
    """The gradient of any split is that of plain forward passes; the head is in the optimizer's state."""
    items, model = rows(), critic(kind, tiny_model("llama"))
    plain = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.2).model
    errors = []
    for row in items:
        states = plain.base_model(torch.tensor([[*row.prompt_tokens, *row.tokens]])).last_hidden_state[0]
        values = states[len(row.prompt_tokens) - 1 : -1] @ plain.score.weight[0]
        errors.append((values - 1).square())
    torch.cat(errors).mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    expected[head] = expected.pop("score.weight")
    for budget in BUDGETS:
        gradient, _ = recorded(Regression(), items, budget, model=model)
        assert_close({name: gradient[name] for name in expected}, expected, 3e-5)

    stack = TrainStack(critic(kind, tiny_model("llama")))
    stack.update(Regression(), [items])
    tensors, facts = stack.state()
    assert f"exp_avg/{head}" in tensors
    again = TrainStack(critic(kind, tiny_model("llama")))
    again.load(tensors, facts)
    assert same(tensors, again.state()[0])
