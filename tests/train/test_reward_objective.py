"""The objective of reward models: gradients of plain forward passes, margins, and TRL's golden numbers."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from proxima.core import RewardLoss
from proxima.data import PreferencePair, Trajectory
from proxima.model import ScalarModel, load_scalar_model
from proxima.train.objectives.reward_objective import RewardObjective
from tests.model.rows import ids
from tests.train.helpers import recorded


def pairs(margins=(None, None, None)) -> list[PreferencePair]:
    out = []
    for row, (margin, sizes) in enumerate(zip(margins, ((3, 6), (4, 1), (2, 2)), strict=True)):
        sides = [
            Trajectory(group=row, sample=i, prompt_tokens=ids(4 + row, 50 + row), tokens=ids(size, 10 * row + i))
            for i, size in enumerate(sizes)
        ]
        out.append(PreferencePair(row=row, chosen=sides[0], rejected=sides[1], margin=margin))
    return out


def load(tiny_model, kind="llama"):
    return load_scalar_model(str(tiny_model(kind)), device="cpu", new_head=0.3)


@pytest.mark.parametrize(
    ("budget", "share", "margins"),
    [
        (1, True, (0.5, -1.0, 2.0)),
        (1, False, (None, None, None)),
        (30, True, (None, None, None)),
        (1000, True, (0.5, -1.0, 2.0)),
        (1000, False, (0.5, -1.0, 2.0)),
    ],
)
def test_loss_and_gradient_are_those_of_plain_forwards(budget, share, margins, tiny_model):
    items, objective = pairs(margins), RewardObjective(loss=RewardLoss(center=0.1), margin=0.25, pad=1)
    plain = load(tiny_model).model
    scores = [
        [plain(input_ids=torch.tensor([[*side.prompt_tokens, *side.tokens]])).logits[0, 0] for side in sides]
        for sides in ((item.chosen, item.rejected) for item in items)
    ]
    chosen, rejected = torch.stack([torch.stack(both) for both in scores]).unbind(1)
    margin = torch.tensor([0.25 if m is None else m for m in margins])
    loss = (-logsigmoid(chosen - rejected - margin) + 0.1 * (chosen + rejected) ** 2).mean()
    loss.backward()
    loss = loss.detach()
    model = ScalarModel(load(tiny_model), share_prompt=share)
    gradient, result = recorded(objective, items, budget, model=model)
    assert result.metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    for name, parameter in plain.named_parameters():
        assert (gradient[name] - parameter.grad).abs().max() < 3e-5 * max(1.0, float(parameter.grad.abs().max())), name


def test_a_pair_stays_together_and_shares_its_prompt(tiny_model):
    items, objective = pairs(), RewardObjective()
    model = ScalarModel(load(tiny_model))
    batch = model.pack(objective.sequences(items[0]))
    assert len(batch.tokens) == 4 + 3 + 6 and len(batch.cu_seqlens) == 3 and len(batch.target) == 4 + 7
    assert np.isclose(batch.reward.sum(), 0)
