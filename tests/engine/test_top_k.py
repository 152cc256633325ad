"""Top-k log-probs travel from the engine through the packed batch to the loss."""

import pytest
import torch

from proxima.core import Dppo, TokenMean, policy_loss
from proxima.data import Trajectory
from proxima.model import Policy
from tests.engine.helpers import engine, requests, run
from tests.model.rows import loaded

K = 5


@pytest.fixture(scope="module")
def rolled():
    """A policy, its batch of completions, and these."""
    asked = requests(3, 2, max_tokens=6, temperature=0.8)
    completions = run(engine(top_k_log_probs=K), asked)
    policy, pairs = Policy(loaded("llama")), zip(asked, completions, strict=True)
    batch = policy.pack([Trajectory.of(r.prompt, c, group=r.prompt.uid, advantage=1.0) for r, c in pairs])
    return policy, batch, completions


def test_the_top_k_of_the_engine_are_those_of_a_plain_forward(rolled):
    *_, completions = rolled
    model, prompts = loaded("llama").model, [r.prompt.tokens for r in requests(3, 2)]
    for prompt, completion in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        values, tokens = (logits / 0.8).log_softmax(-1)[len(prompt) - 1 : -1].topk(K)
        assert torch.tensor(completion.top_k).tolist() == tokens.tolist()
        torch.testing.assert_close(torch.tensor(completion.top_k_log_prob), values, rtol=0, atol=2e-5)


def test_the_policy_answers_for_the_same_tokens(rolled):
    policy, batch, completions = rolled
    outputs = policy(batch)
    expected = torch.tensor([row for c in completions for row in c.top_k_log_prob])
    torch.testing.assert_close(outputs.top_k_log_prob, expected, rtol=0, atol=2e-5)
    assert not outputs.top_k_log_prob.requires_grad
    assert outputs.log_prob.requires_grad


def test_without_asking_there_are_none():
    (request,) = requests(1, 1, max_tokens=2)
    (completion,) = run(engine(), [request])
    assert completion.top_k is None
    policy = Policy(loaded("llama"))
    batch = policy.pack([Trajectory.of(request.prompt, completion, group=0, advantage=1.0)])
    with pytest.raises(ValueError, match=r"needs `behavior_top_k_log_prob`"):
        outputs = policy(batch)
        policy_loss(batch.policy_batch(outputs.log_prob), surrogate=Dppo(divergence="topk_tv"), aggregate=TokenMean())
