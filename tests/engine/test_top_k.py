"""Top-k log-probs travel from the engine through the packed batch to the loss."""

import pytest
import torch

from proxima.model.policy import Policy
from tests.engine.helpers import engine, requests, rows_of, run
from tests.model.rows import loaded, plain_logits

K = 5


@pytest.fixture(scope="module")
def rolled():
    """Completions, as rows for a policy too."""
    asked = requests(3, 2, max_tokens=6, temperature=0.8)
    completions = run(engine(top_k_log_probs=K), asked)
    return rows_of(asked, completions), completions


def test_the_top_k_of_the_engine_are_those_of_a_plain_forward(rolled):
    model = loaded("llama").model
    for row, completion in zip(*rolled, strict=True):
        with torch.no_grad():
            values, tokens = plain_logits(model, row).log_softmax(-1).topk(K)
        assert torch.tensor(completion.top_k).tolist() == tokens.tolist()
        torch.testing.assert_close(torch.tensor(completion.top_k_log_prob), values, rtol=0, atol=2e-5)


def test_the_policy_answers_for_the_same_tokens(rolled):
    rows, completions = rolled
    policy = Policy(loaded("llama"))
    outputs = policy(policy.pack(rows))
    expected = torch.tensor([row for c in completions for row in c.top_k_log_prob])
    torch.testing.assert_close(outputs.top_k_log_prob, expected, rtol=0, atol=2e-5)
    assert not outputs.top_k_log_prob.requires_grad
    assert outputs.log_prob.requires_grad
