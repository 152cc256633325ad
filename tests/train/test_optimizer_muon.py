"""Muon against torch's own, and which weights it has."""

import pytest
import torch
from torch import nn

from proxima.train.optimizer_muon import Muon
from tests.model.families import make
from tests.train.helpers import trainer, trajectories
from tests.train.optimizer_ranks import drawn


def test_the_steps_are_those_of_torch_s_muon_and_adamw():
    spec = Muon(lr=3e-3, beta2=0.95, weight_decay=0.1, momentum=0.9, adamw_lr=1e-3)
    ours = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in drawn(0).items()}
    matrices = [theirs[name] for name in ("layers.0.a", "layers.0.b")]
    decayed, vectors = [theirs["embed"], theirs["layers.0.experts"]], [theirs["n"]]
    adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    peers = (
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decayed, weight_decay=0.1, **adamw),
        torch.optim.AdamW(vectors, weight_decay=0.0, **adamw),
    )
    optimizer = spec.build_named(ours.items())
    for step in range(4):
        for name, gradient in drawn(1 + step).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        for peer in peers:
            peer.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert set(optimizer.state[ours["layers.0.a"]]) == {"momentum_buffer"}
    assert set(optimizer.state[ours["embed"]]) == {"step", "exp_avg", "exp_avg_sq"}


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


def test_the_schedule_scales_both_learning_rates():
    stack = trainer(optimizer=Muon(lr=1e-3, adamw_lr=1e-4), schedule="linear", total_updates=4, warmup=2)
    rates, items = [], trajectories()
    for _ in range(4):
        stack.update([list(range(13))], items)
        rates.append(sorted({group["lr"] for group in stack.optimizer.param_groups}))
    assert rates == [pytest.approx([f * 1e-4, f * 1e-3]) for f in (0.5, 1.0, 1.0, 0.5)]
