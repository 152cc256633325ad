"""Log-probs of the tokens that could be sampled: by hand, by an independent script, and in packs; test_log_prob.py has
them against a plain masked log-softmax."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.core import PpoClip, TokenMean, policy_loss
from proxima.data import SamplingMask
from proxima.model import Policy, token_log_prob
from proxima.model.distribution_figures import log_sum_square
from proxima.model.kept_tokens import KeptTokens
from tests.core.batches import packed
from tests.model.rows import MIXED, loaded, plain_log_prob, plain_logits, rows
from tests.tiny import VOCABULARY, tiny


def test_the_numbers_of_an_independent_script():
    """`tests/golden/make_sampling_mask.py`: truncation, ratio, PPO clip and gradient in plain numpy."""
    with np.load(Path(__file__).parents[1] / "golden" / "sampling_mask.npz") as file:
        golden = {name: torch.from_numpy(file[name]) for name in file.files}
    leaves = [golden[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    target, temperature = golden["target"], golden["temperature"]
    kept = KeptTokens(golden["ids"], torch.cat([torch.zeros(1, dtype=torch.long), golden["counts"].cumsum(0)]))
    output = token_log_prob(*leaves[:2], target, temperature, bias=leaves[2], kept=kept, entropy=True, chunk=5)
    agreement = log_sum_square(leaves[0], leaves[1], temperature, bias=leaves[2], kept=kept)
    for ours, name in ((output.log_prob, "log_prob"), (output.entropy, "entropy"), (agreement, "log_sum_square")):
        torch.testing.assert_close(ours, golden[name], rtol=1e-12, atol=1e-12)
    batch = packed(log_prob=output.log_prob, behavior_log_prob=golden["behavior"], advantage=golden["advantage"])
    loss = policy_loss(batch, surrogate=PpoClip(epsilon_low=0.2, epsilon_high=0.2), aggregate=TokenMean())
    assert loss.value.item() == pytest.approx(float(golden["loss"].mean()), abs=1e-12)
    for mine, name in zip(torch.autograd.grad(loss.value, leaves), ("hidden", "weight", "bias"), strict=True):
        torch.testing.assert_close(mine, golden[f"grad_{name}"], rtol=1e-10, atol=1e-14)


def masked_rows(draw_seed=3):
    """Trajectories of four prompts with random sets around their tokens, and the sets as a boolean table."""
    draw, out = np.random.default_rng(draw_seed), []
    for row in rows(*MIXED, temperature=(1.0, 0.7)):
        sets = [
            np.union1d(draw.choice(VOCABULARY, draw.integers(0, 40), replace=False), [token]) for token in row.tokens
        ]
        out.append(replace(row, sampling_mask=SamplingMask.of_sets(sets)))
    return out


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
