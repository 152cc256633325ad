"""The loss of supervised fine-tuning: Hugging Face's own, whatever the packing and the split."""

import numpy as np
import pytest
import torch

from proxima.data import Trajectory
from proxima.model import Policy
from proxima.train.objectives.sft_objective import SftObjective
from tests.model.rows import assert_close, loaded
from tests.tiny import KINDS, tiny
from tests.train.helpers import recorded

LENGTHS = ((6, 5), (2, 30), (11, 1), (3, 17), (9, 9))


def examples():
    """Sequences of other lengths, each of its own group, with holes in the loss mask."""
    draw = np.random.default_rng(2)
    ids = lambda n: draw.integers(3, 259, n).astype(np.int32)  # noqa: E731
    sequences = []
    for group, (before, after) in enumerate(LENGTHS):
        mask = np.arange(after) % 4 != 1 if after > 1 else np.ones(1, bool)
        sequences.append(Trajectory(group=group, prompt_tokens=ids(before), tokens=ids(after), loss_mask=mask))
    return sequences


def hugging_face(kind, items):
    """The loss and the gradients of transformers: one padded batch, labels of -100 where nothing is learnt."""
    model = tiny(kind)
    width = max(map(len, items))
    tokens, labels, seen = (torch.full((len(items), width), fill) for fill in (0, -100, 0))
    for i, item in enumerate(items):
        n = len(item.prompt_tokens)
        tokens[i, : len(item)] = torch.tensor([*item.prompt_tokens, *item.tokens])
        labels[i, n : len(item)] = torch.where(torch.from_numpy(item.loss_mask), tokens[i, n : len(item)], -100)
        seen[i, : len(item)] = 1
    loss = model(input_ids=tokens, labels=labels, attention_mask=seen).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def ours(kind, items, **settings):
    """Loss and gradients of one update, which is not made."""
    seen, result = recorded(SftObjective(), items, **settings, model=Policy(loaded(kind)))
    return result.metrics["loss"], seen


@pytest.mark.parametrize(("kind", "budget"), [*((kind, 40) for kind in KINDS), ("llama", 1), ("gpt2", 4096)])
def test_loss_and_gradient_are_those_of_hugging_face(kind, budget):
    expected, gradients = hugging_face(kind, examples())
    loss, actual_gradients = ours(kind, examples(), budget=budget)
    assert loss == pytest.approx(expected, rel=2e-6)
    assert_close(actual_gradients, gradients, 2e-5)
