"""Top-k log-probs travel from the engine through the packed batch to the loss."""

import asyncio

import pytest
import torch

from proxima.core import TokenMean, policy_loss
from proxima.core.surrogate import Cppo, Dppo
from proxima.data import Prompt, Trajectory
from proxima.engine import Local, LocalEngine, Request, Sampling
from proxima.engine.local import collect
from proxima.model import Policy, load, token_log_prob

K = 5


@pytest.fixture
def rolled(tiny_model):
    loaded = load(str(tiny_model("llama")), device="cpu")
    prompts = [Prompt(uid=i, messages=(), tokens=(5 + i, 17, 42)) for i in range(3)]
    requests = [
        Request(prompt=p, sample=s, sampling=Sampling(max_tokens=6, temperature=0.8), seed=3)
        for p in prompts
        for s in range(2)
    ]
    engine = LocalEngine(loaded, Local(dtype="float32", top_k_log_probs=K))
    completions = asyncio.run(collect(engine, requests))
    return (
        loaded,
        [Trajectory.of(prompts[c.prompt_uid], c, group=c.prompt_uid, advantage=1.0) for c in completions],
        completions,
    )


def test_the_top_k_of_the_engine_are_those_of_a_plain_forward(rolled):
    loaded, trajectories, completions = rolled
    for item, completion in zip(trajectories, completions, strict=True):
        ids = torch.tensor([[*item.prompt_tokens, *item.tokens]])
        with torch.no_grad():
            plain = (loaded.model(ids).logits[0] / 0.8).log_softmax(-1)[len(item.prompt_tokens) - 1 : -1]
        values, tokens = plain.topk(K)
        assert torch.tensor(completion.top_k).tolist() == tokens.tolist()
        torch.testing.assert_close(torch.tensor(completion.top_k_log_prob), values, rtol=0, atol=2e-5)


def test_the_policy_answers_for_the_same_tokens(rolled):
    loaded, trajectories, completions = rolled
    policy = Policy(loaded)
    batch = policy.pack(trajectories)
    outputs = policy(batch)
    expected = torch.tensor([row for c in completions for row in c.top_k_log_prob])
    torch.testing.assert_close(outputs.top_k_log_prob, expected, rtol=0, atol=2e-5)
    assert not outputs.top_k_log_prob.requires_grad
    assert outputs.log_prob.requires_grad


@pytest.mark.parametrize(
    "surrogate", [Dppo(divergence="topk_tv"), Dppo(divergence="topk_kl"), Cppo(divergence="topk_tv")]
)
def test_the_loss_finds_them_and_an_unmoved_policy_is_kept_whole(rolled, surrogate):
    loaded, trajectories, _ = rolled
    policy = Policy(loaded)
    batch = policy.pack(trajectories)
    outputs = policy(batch)
    loss = policy_loss(
        batch.policy_batch(outputs.log_prob, None, outputs.top_k_log_prob), surrogate=surrogate, aggregate=TokenMean()
    )
    assert bool(loss.keep.all())
    gone = batch.policy_batch(
        outputs.log_prob + 0.5, None, outputs.top_k_log_prob.roll(1, dims=1)
    )  # A > 0, r > 1, and far away
    far = type(surrogate)(divergence=surrogate.divergence, delta=1e-4)
    assert not bool(policy_loss(gone, surrogate=far, aggregate=TokenMean(), check=False).keep.any())


def test_without_asking_there_are_none(tiny_model):
    loaded = load(str(tiny_model("llama")), device="cpu")
    prompt = Prompt(uid=0, messages=(), tokens=(5, 6))
    (completion,) = asyncio.run(
        collect(LocalEngine(loaded), [Request(prompt=prompt, sample=0, sampling=Sampling(max_tokens=2))])
    )
    assert completion.top_k is None
    batch = Policy(loaded).pack([Trajectory.of(prompt, completion, group=0, advantage=1.0)])
    with pytest.raises(ValueError, match=r"needs `behavior_top_k_log_prob`"):
        outputs = Policy(loaded)(batch)
        policy_loss(batch.policy_batch(outputs.log_prob), surrogate=Dppo(divergence="topk_tv"), aggregate=TokenMean())


def test_the_others_of_the_fused_head_are_exact_and_leave_the_gradient_alone():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True), torch.randn(11, 4, dtype=torch.float64)
    target, others = torch.randint(11, (9,)), torch.randint(11, (9, 3))
    log_probs = token_log_prob(hidden, weight, target, 0.5, others=others, chunk=4)
    plain = (hidden @ weight.T / 0.5).log_softmax(-1)
    torch.testing.assert_close(log_probs.others, plain.gather(1, others).detach())
    (grad,) = torch.autograd.grad(log_probs.log_prob.sum(), hidden)
    (expected,) = torch.autograd.grad(plain.gather(1, target[:, None]).sum(), hidden)
    torch.testing.assert_close(grad, expected)
