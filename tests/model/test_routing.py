"""Experts recorded and replayed in the trainer's forward pass, against the routers' own rule written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data import FieldError
from proxima.data.trajectory import Trajectory
from proxima.model.moe import require_moe, split_chosen
from proxima.model.policy import Policy
from tests.model.families import FAMILIES, make
from tests.model.rows import forked, opened, rows

BOTH = frozenset({"routed_experts", "expert_load"})
FORMS = [("Qwen3-MoE", False), ("Qwen3-MoE", True), ("Mixtral", False)]


def items() -> list[Trajectory]:
    """Two groups; a response of one token and an empty one among them."""
    return rows((5, (4, 7)), (3, (1, 0, 6)))


def policy(family="Qwen3-MoE", **settings) -> Policy:
    return Policy(make(family), **{"replays_routes": True} | settings)


def drawn(tokens: int, layers: int = 2, k: int = 2, experts: int = 4):
    order = torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return order[..., :k].to(torch.int8)


def gradients(given: Policy, loss) -> dict[str, torch.Tensor]:
    given.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in given.model.named_parameters() if p.grad is not None}


def near(actual, expected, tolerance=1e-4) -> None:
    """Each matrix by its own largest entry."""
    for name, gradient in expected.items():
        most = tolerance * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=most)


@pytest.mark.parametrize(("family", "checkpointing"), FORMS)
def test_own_routes_replayed_change_no_bit(family, checkpointing):
    p = policy(family, gradient_checkpointing=checkpointing)
    batch = p.pack(items())
    plain = p(batch)
    recorded = p(batch, BOTH)
    again = p(replace(batch, routed_experts=recorded.routed_experts), BOTH)
    assert plain.route_counts is plain.routed_experts is None
    assert torch.equal(plain.log_prob, recorded.log_prob) and torch.equal(plain.log_prob, again.log_prob)
    assert torch.equal(recorded.routed_experts, again.routed_experts)
    assert recorded.routed_experts.dtype == torch.int8 and recorded.routed_experts.shape == (len(batch.tokens), 2, 2)
    assert again.route_counts.tolist() == [0, len(batch.target) * 4]
    first, second = (gradients(p, outputs.log_prob.sum()) for outputs in (plain, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_given_experts_are_weighed_by_the_routers_own_logits(monkeypatch, normalised, checkpointing):
    """Against routers whose forward is written out here, gradient included; every third token falls back."""
    p = policy(gradient_checkpointing=checkpointing)
    batch = p.pack(items())
    given = drawn(len(batch.tokens))
    given[::3] = -1
    gates = [layer.mlp.gate for layer in p.backbone.layers]
    for gate in gates:
        gate.norm_topk_prob = normalised
    outputs = p(replace(batch, routed_experts=given), BOTH)
    ours = gradients(p, outputs.log_prob.sum())
    own = p(batch, BOTH).routed_experts[:, 0]  # of the first layer: what it sees does not depend on the routes
    assert torch.equal(outputs.routed_experts[::3, 0], own[::3])
    assert torch.equal(outputs.routed_experts[given >= 0], given[given >= 0])

    def written_out(gate, ids):
        def forward(hidden):
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            p_t = logits.exp() / logits.exp().sum(-1, keepdim=True)
            chosen = torch.where(ids >= 0, ids.long(), p_t.topk(2).indices)
            weights = torch.stack([p_t[t, row] for t, row in enumerate(chosen)])
            return logits, weights / weights.sum(-1, keepdim=True) if normalised else weights, chosen

        return forward

    for number, gate in enumerate(gates):
        monkeypatch.setattr(gate, "forward", written_out(gate, given[:, number]))
    expected = p(batch)
    torch.testing.assert_close(outputs.log_prob, expected.log_prob, rtol=0, atol=1e-5)
    theirs = gradients(p, expected.log_prob.sum())
    near(ours, theirs)
    assert float(ours["model.layers.1.mlp.gate.weight"].abs().max()) > 1e-3


def test_differing_experts_are_counted():
    """Two experts of four drawn at random: a given one is among the router's own two in half of the cases."""
    p = policy()
    batch = p.pack(items())
    own = p(batch, BOTH).routed_experts
    swapped = own.clone()
    swapped[:, 1] = own[:, 1].flip(-1)  # the same experts in another order
    assert p(replace(batch, routed_experts=swapped)).route_counts.tolist() == [0, 4 * len(batch.target)]
    other = own.clone()
    unused = [next(e for e in range(4) if e not in row) for row in own[batch.predict, 1].tolist()]
    other[batch.predict, 1, 0] = torch.tensor(unused, dtype=torch.int8)
    other[batch.predict[0], 0] = -1
    differing, replayed = p(replace(batch, routed_experts=other)).route_counts.tolist()
    assert (differing, replayed) == (len(batch.target), 4 * len(batch.target) - 4)  # two responses share it


@pytest.mark.parametrize("begin", [list, opened])
def test_routes_of_trajectories_are_packed(begin):
    """Through the columns of the trajectories, shared prompt or not, the pass sees what it recorded. A shared prompt
    has the routes of its first response, and a trajectory without any falls back."""
    p, plain = policy(), begin(items())
    batch = p.pack(plain)
    recorded = p(batch, BOTH)
    columns = split_chosen(recorded.routed_experts, batch)
    ends, prompts = np.cumsum(batch.tokens_of)[:-1], np.cumsum([len(item.prompt_tokens) for item in plain])[:-1]
    responses = np.split(columns["routed_experts"].numpy(), ends)
    of_prompts = np.split(columns["prompt_routed_experts"].numpy(), prompts)
    routed = [
        replace(item, routed_experts=a, prompt_routed_experts=b)
        for item, a, b in zip(plain, responses, of_prompts, strict=True)
    ]
    assert torch.equal(p.pack(routed).routed_experts, recorded.routed_experts)
    apart = policy(share_prompt=False)
    outputs = apart(apart.pack(routed), BOTH)
    torch.testing.assert_close(outputs.log_prob, recorded.log_prob, rtol=0, atol=1e-5)
    assert (apart.pack(routed).routed_experts >= 0).all()
    assert (
        p.pack(routed, replay=False).routed_experts is None
        and Policy(make("Qwen3-MoE")).pack(routed).routed_experts is None
    )
    partly = p.pack([plain[0], *routed[1:]]).routed_experts
    alone = len(plain[0].prompt_tokens) + 3
    assert (partly[:alone] == -1).all() and (partly[alone:] >= 0).all()
    with pytest.raises(ValueError, match=r"Trajectory.routed_experts: int8 of shape \[4, 2, 2\], expected"):
        replace(routed[1], routed_experts=responses[0])
    with pytest.raises(ValueError, match="int64 of shape"):
        replace(routed[0], routed_experts=responses[0].astype(np.int64))


@pytest.mark.parametrize("needs", [frozenset(), BOTH])
@pytest.mark.parametrize("given", [False, True])
def test_a_layer_that_runs_again_has_the_experts_of_the_first_time(given, needs):
    """All scores are alike but for noise, which is another each time a router is asked. The gradient is that of one
    pass over the routes of the first time."""
    noise, sent = torch.Generator().manual_seed(0), []
    p = policy(gradient_checkpointing=True)
    batch = p.pack(items())
    if given:
        routes = drawn(len(batch.tokens))
        routes[::2] = -1
        batch = replace(batch, routed_experts=routes)
    for layer in p.backbone.layers:
        layer.mlp.gate.register_forward_pre_hook(lambda gate, _: set_noise(gate, 1e-6, noise))
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: sent.append(args[1]))
    actual = gradients(p, p(batch, needs).log_prob.sum())
    first, again = sent[:2], sent[:1:-1]
    assert len(again) == 2 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    plain = policy()
    for layer in plain.backbone.layers:
        set_noise(layer.mlp.gate, 0.0, noise)
    replayed = replace(batch, routed_experts=torch.stack(first, 1).to(torch.int8))
    near(actual, gradients(plain, plain(replayed).log_prob.sum()))


def set_noise(gate, scale, generator) -> None:
    gate.weight.data = scale * torch.randn(gate.weight.shape, generator=generator)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_load_of_a_sequence_is_that_of_its_response(checkpointing):
    """Counts and probabilities against those of each sequence alone, and gradient to the routers."""
    p = policy(gradient_checkpointing=checkpointing)
    whole = p(p.pack(items()), BOTH)
    for row, item in enumerate(items()):
        if len(item.tokens):
            alone = p(p.pack([item]), BOTH)
            assert torch.equal(whole.expert_count[row], alone.expert_count[0])
            torch.testing.assert_close(whole.expert_probability[row], alone.expert_probability[0])
            assert alone.expert_count.sum(-1).tolist() == [[2 * len(item.tokens)] * 2]
            torch.testing.assert_close(alone.expert_probability.sum(-1), torch.ones(1, 2))
    router_gradients = gradients(p, whole.expert_probability.square().sum())
    assert all(float(router_gradients[f"model.layers.{i}.mlp.gate.weight"].norm()) > 0.01 for i in range(2))


def test_other_models_are_refused():
    require_moe(FAMILIES["Qwen3-MoE"][1], "algorithm.routing_replay", "rollout")
    with pytest.raises(FieldError, match="needs a mixture of experts .* and model.path is of kind qwen3;"):
        require_moe(FAMILIES["Qwen3"][1], "algorithm.routing_replay", "rollout")
    with pytest.raises(FieldError, match="deepseek_v3"):
        require_moe(FAMILIES["DeepSeek-V3"][1], "algorithm.router_balance", 0.1)


def test_paths_share_tokens_that_were_sent_to_the_same_experts():
    """Of a path whose third token went elsewhere, everything from there on is computed with its own experts."""
    p, apart, plain = policy(), policy(share_prompt=False), forked()
    whole = apart.pack(plain)
    drawn_of = drawn(len(whole.target)).numpy()
    own = np.split(drawn_of, np.cumsum(whole.tokens_of)[:-1])
    routed = [replace(item, routed_experts=ids) for item, ids in zip(plain, own, strict=True)]
    assert len(p.pack(routed).tokens) == len(p.pack(plain[:1] + plain[6:7]).tokens) + sum(
        len(item.tokens) - 1 for item in (*plain[1:6], *plain[7:])
    )
    first = [own[0] if i == 0 else np.concatenate([own[3][:40], ids[40:]]) for i, ids in enumerate(own)]
    routed = [replace(item, routed_experts=ids[: len(item.tokens)]) for item, ids in zip(plain, first, strict=True)]
    assert len(p.pack(routed).tokens) < len(apart.pack(routed).tokens) - 100
    shared, alone = (model(model.pack(routed), BOTH) for model in (p, apart))
    torch.testing.assert_close(shared.log_prob, alone.log_prob, rtol=0, atol=1e-5)
    near(gradients(p, shared.log_prob.sin().sum()), gradients(apart, alone.log_prob.sin().sum()), 1e-5)
