"""Log-probs of the tokens that could be sampled, in packs; test_log_prob.py has them, and their gradients, against a
plain masked log-softmax."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data.columns import SamplingMask
from proxima.model.policy import Policy
from tests.model.rows import MIXED, loaded, plain_log_prob, plain_logits, rows
from tests.tiny import VOCABULARY, tiny


def masked_rows():
    """Trajectories of four prompts with random sets around their tokens, and the sets as a boolean table."""
    draw, out = np.random.default_rng(3), []
    for row in rows(*MIXED, temperature=(1.0, 0.7)):
        sets = [
            np.union1d(draw.choice(VOCABULARY, draw.integers(0, 40), replace=False), [token]) for token in row.tokens
        ]
        out.append(replace(row, sampling_mask=SamplingMask.of_sets(sets)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["packed", "padded"])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_packed_policy_equals_hugging_face_logits_one_sequence_at_a_time(attention, share_prompt):
    """Sums in float64 over the logits of the Hugging Face model."""
    items, model = masked_rows(), tiny("llama")
    policy = Policy(loaded("llama"), attention=attention, share_prompt=share_prompt)
    batch = policy.pack(items)
    with torch.no_grad():
        actual = policy(batch).log_prob
        expected = []
        for item in items:
            for t, (token, scaled) in enumerate(zip(item.tokens, plain_logits(model, item).double(), strict=True)):
                own = torch.tensor(item.sampling_mask.part(t, t + 1).ids, dtype=torch.long)
                expected.append(scaled[token] - scaled[own].logsumexp(0))
    torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=0, atol=3e-5)
    plain = torch.cat([plain_log_prob(model, item) for item in items if len(item.tokens)])
    assert (actual - plain).min() > -3e-5 and (actual - plain).mean() > 0.5  # less than the vocabulary to share
