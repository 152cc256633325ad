"""A mixture of experts in the local engine: decoded with a cache, and the experts of each token reported."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data import FieldError
from proxima.data.trajectory import Trajectory
from proxima.engine.local.general_decoder import GeneralDecoder
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.policy import Policy
from tests.engine.helpers import prompt, run
from tests.engine.test_kept_prefixes import next_turns
from tests.model.families import make

SHAPES = ((5, 12), (1, 1), (33, 7), (12, 24))  # tokens of the prompt, most of the completion


def asked() -> list[Request]:
    return [
        Request(prompt=prompt(uid, length), sample=sample, sampling=Sampling(max_tokens=most, temperature=0.8), seed=3)
        for uid, (length, most) in enumerate(SHAPES)
        for sample in range(3)
    ]


def engine(dtype="float32", **settings) -> LocalEngine:
    loaded = make("Qwen3-MoE")
    Policy(loaded, replays_routes=True)(Policy(loaded).pack([unsampled()]), frozenset({"routed_experts"}))
    return LocalEngine(loaded, Local(**{"dtype": dtype, "slots": 8, "routed_experts": True} | settings))


def unsampled() -> Trajectory:
    return Trajectory(group=0, prompt_tokens=(4, 5), tokens=(6,))


def against_trainer(completions, dtype=torch.float32, *, routes: bool):
    policy = Policy(make("Qwen3-MoE"), replays_routes=True, compute_dtype=dtype)
    pairs = zip(asked(), completions, strict=True)
    batch = policy.pack([Trajectory.of(r.prompt, c, group=r.prompt.uid, advantage=0, routes=routes) for r, c in pairs])
    with torch.no_grad():
        outputs = policy(batch, frozenset({"routed_experts"}))
    return (outputs.log_prob - batch.behavior_log_prob).abs(), outputs, batch


@pytest.mark.slow
def test_log_probs_and_experts_are_the_trainers_in_float32():
    made = engine()
    assert type(made.scheduler.decoder) is GeneralDecoder
    completions = run(made, asked())
    apart, outputs, batch = against_trainer(completions, routes=True)
    assert apart.max() < 1e-5
    assert outputs.route_counts.tolist() == [0, 4 * len(batch.target)]  # also those that the trainer would have chosen
    own = against_trainer(completions, routes=False)[1]
    assert torch.equal(own.routed_experts[batch.predict], batch.routed_experts[batch.predict])
    assert {c.routed_experts.shape for c in completions} == {(len(c.tokens), 2, 2) for c in completions}
    assert {c.prompt_routed_experts.shape[0] for c in completions} == {length for length, _ in SHAPES}


@pytest.mark.slow
def test_a_completion_does_not_depend_on_its_neighbours():
    made = engine()
    together = run(made, asked())
    assert [run(made, [request])[0] for request in asked()[1::4]] == together[1::4]
    silent = run(engine(routed_experts=False), asked())
    assert all(c.routed_experts is c.prompt_routed_experts is None for c in silent)
    assert all(np.array_equal(a.sampled_log_prob, b.sampled_log_prob) for a, b in zip(together, silent, strict=True))


def test_a_later_turn_has_the_experts_of_its_whole_prompt():
    """None is taken from a kept prefix, whose experts are not."""
    made, first = engine(), [replace(r, shared=(len(r.prompt.tokens),)) for r in asked()[::3]]
    again = next_turns(first, run(made, first))
    given = run(made, again)
    assert [len(c.prompt_routed_experts) for c in given] == [len(r.prompt.tokens) for r in again]
    assert given == run(engine(), [replace(request, shared=()) for request in again])


@pytest.mark.slow
def test_replay_brings_bf16_nearer():
    """Where engine and trainer round alike, on a processor without products of bfloat16, they choose the same."""
    completions = run(engine("bfloat16"), asked())
    replayed, own = (against_trainer(completions, torch.bfloat16, routes=routes) for routes in (True, False))
    if int(replayed[1].route_counts[0]):
        assert replayed[0].max() < own[0].max() and replayed[0].mean() < own[0].mean()
    else:
        assert torch.equal(replayed[0], own[0])


@pytest.mark.slow
async def test_new_weights_midway_leave_the_experts_that_sampled():
    """A token keeps those of its version, though its KV is run again."""
    made, other = engine(), make("Qwen3-MoE")
    with torch.no_grad():
        for layer in other.model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))

    (whole,) = await collect(engine(), asked()[-1:])
    job = asyncio.create_task(collect(made, asked()[-1:]))
    while made.scheduler.generated_tokens < 5:
        await asyncio.sleep(0)
    await made.publish(WeightUpdate(version=1, module=other.model))
    (crossed,) = await job
    old = int((crossed.policy_version == 0).sum())
    assert 0 < old < len(crossed.tokens)
    assert np.array_equal(crossed.routed_experts[:old], whole.routed_experts[:old])
    assert np.array_equal(crossed.prompt_routed_experts, whole.prompt_routed_experts)
    assert crossed.routed_experts.shape == (len(crossed.tokens), 2, 2) and (crossed.routed_experts >= 0).all()


def test_a_dense_model_has_none():
    with pytest.raises(FieldError, match="engine.routed_experts.* needs a mixture of experts"):
        LocalEngine(make("Qwen3"), Local(routed_experts=True))
