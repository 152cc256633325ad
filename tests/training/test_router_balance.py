"""The load of experts: the formula written out, the same update however it is cut, and routes from a forward stage."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import PpoClip, TokenMean
from proxima.model.policy import Policy
from proxima.training.forward_stage import LogProbStage
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.objectives.router_balance import RouterBalance
from tests.model.families import make
from tests.model.test_routing import policy
from tests.training.helpers import recorded, trainer_of, trajectories

METRICS = ("routing/balance_loss", "routing/load_max", "routing/load_entropy")


def updated(items, budget=10_000, *, model=None, **settings):
    objective = PolicyObjective(surrogate=PpoClip(), aggregate=TokenMean(), **settings)
    return recorded(objective, items, budget, model=model or Policy(make("Qwen3-MoE")))


def test_the_formula():
    items = [item for item in trajectories() if len(item.tokens)]
    _, result = updated(items, terms=[RouterBalance(coefficient=0.5)])
    _, plain = updated(items)
    model = make("Qwen3-MoE").model
    losses, load = [], torch.zeros(2, 4)
    for item in items:
        with torch.no_grad():
            ids = torch.tensor(np.concatenate([item.prompt_tokens, item.tokens[:-1]]))[None].long()
            logits = model(ids, output_router_logits=True).router_logits
        of_layers = []
        for layer, rows in enumerate(logits):
            p = rows[len(item.prompt_tokens) - 1 :].softmax(-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0)
            load[layer] += chosen.sum(0)
            of_layers.append((4 / (2 * len(p)) * chosen.sum(0) * p.mean(0)).sum())
        losses.append(sum(of_layers) / 2)
    share = load / load.sum(1, keepdim=True)
    expected = [float(sum(losses) / len(losses)), float(share.max())]
    expected.append(float(torch.special.entr(share).sum(1).mean() / np.log(4)))
    assert [result.metrics[name] for name in METRICS] == pytest.approx(expected, rel=1e-5)
    assert result.metrics["loss"] == pytest.approx(plain.metrics["loss"] + 0.5 * expected[0], rel=1e-5)
    assert result.skipped == 0 < plain.skipped  # an advantage of 0 has a load too


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_for_any_micro_batch(checkpointing):
    items = trajectories()
    settings = {"gradient_checkpointing": checkpointing}
    (gradients, whole), (others, result) = (
        updated(items, budget, model=policy(**settings), terms=[RouterBalance(coefficient=2.0)])
        for budget in (10_000, 20)
    )
    assert {name for name in whole.metrics if name.startswith("routing/")} == set(METRICS)
    assert result.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-7, nan_ok=True)
    for name, a in gradients.items():
        torch.testing.assert_close(a, others[name], rtol=0, atol=1e-5 * float(a.abs().max()) + 1e-8)
    without, _ = updated(items, model=policy(**settings))
    assert any(not torch.allclose(a, without[name], rtol=0.01) for name, a in gradients.items())


def test_a_stage_records_what_later_passes_replay():
    items, p = trajectories(), policy()
    t = trainer_of(p, tokens_per_micro_batch=40, replays_routes=True)
    filled = t.stack.fill([LogProbStage("proximal_log_prob", p, records_routes=True)], items)
    assert all(item.routed_experts.shape == (len(item.tokens), 2, 2) for item in filled)
    assert all(item.prompt_routed_experts.shape == (len(item.prompt_tokens), 2, 2) for item in filled)
    with torch.no_grad():  # the routers turn, the routes stay
        for layer in p.backbone.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    replayed = p(p.pack(filled), frozenset({"routed_experts"}))
    assert torch.equal(replayed.routed_experts, p.pack(filled).routed_experts)
    assert replayed.route_counts[0] > 0
    again = LogProbStage("proximal_log_prob", p, records_routes=True)
    assert again.pack(filled).routed_experts is None
    lacking = [replace(filled[0], routed_experts=None, prompt_routed_experts=None), *filled[1:]]
    result = t.update([range(len(items))], lacking)
    trained = [item for item in lacking if len(item.tokens) and item.advantage.any()]
    share = len(lacking[0]) / sum(len(item) for item in trained)
    assert result.metrics["routing/fallback_fraction"] == pytest.approx(share)
    assert 0 < result.metrics["routing/differing_fraction"] < 1
