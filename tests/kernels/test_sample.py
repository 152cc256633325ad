"""The compiled draw against the eager sampler."""

import math
from types import SimpleNamespace

import pytest
import torch

from proxima.engine.local.sampler import sample_tokens
from proxima.kernels.compiled import PRODUCTS, unavailable
from proxima.kernels.decode_step import sample_kernel
from tests.engine.test_sampler import settings

pytestmark = pytest.mark.skipif(unavailable(PRODUCTS) is not None, reason=f"{unavailable(PRODUCTS)}")


def drawn(logits, uniform, temperature=1.0):
    """The tokens and their log-probs."""
    columns = sample_tokens(logits, settings(len(logits), temperature=temperature), uniform).columns
    return SimpleNamespace(**columns)


@pytest.mark.parametrize("vocabulary", [32, 127, 512, 4_128])
def test_the_draw_is_that_of_the_eager_sampler(vocabulary):
    """Float32 logits take the eager path; a draw on the edge of two tokens may take the other one."""
    torch.manual_seed(vocabulary)
    n = 500
    logits, uniform = (3 * torch.randn(n, vocabulary)).bfloat16(), torch.rand(n)
    temperature = [0.0, 0.3, 1.0, 1.7, 1.0] * (n // 5)
    actual, expected = drawn(logits, uniform, temperature), drawn(logits.float(), uniform, temperature)
    same = actual.tokens == expected.tokens
    assert same.float().mean() > 0.99
    greedy = torch.arange(0, n, 5)
    assert torch.equal(actual.tokens[greedy], logits.argmax(1)[greedy])
    for name in ("sampled_log_prob", "untruncated_log_prob"):
        torch.testing.assert_close(getattr(actual, name)[same], getattr(expected, name)[same], rtol=0, atol=3e-6)


@pytest.mark.slow
def test_every_token_is_drawn_as_often_as_its_probability_says():
    torch.manual_seed(0)
    steps, logits = 100_000, (2 * torch.randn(1, 1_056)).bfloat16()
    tokens = drawn(logits.repeat(steps, 1), (torch.arange(steps) + 0.5) / steps).tokens
    share = torch.bincount(tokens, minlength=1_056) / steps
    torch.testing.assert_close(share, logits[0].float().softmax(0), rtol=0, atol=2.1 / steps)
    assert (tokens.diff() >= 0).all()  # the first token whose cumulative probability exceeds the number


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((1, 701), -math.inf).bfloat16()
    logits[0, [40, 700]] = torch.tensor([0.0, 1.0]).bfloat16()
    for u, token in ((0.0, 40), (0.26, 40), (0.27, 700), (1 - 2**-24, 700)):
        assert int(drawn(logits, torch.tensor([u])).tokens) == token


def test_rows_do_not_know_each_other_and_nan_shows():
    torch.manual_seed(1)
    logits, uniform = torch.randn(24, 544).bfloat16(), torch.rand(24)
    logits[5, 77] = torch.nan
    batch = drawn(logits, uniform)
    assert batch.sampled_log_prob.isnan().nonzero().tolist() == [[5]] and (batch.tokens < 544).all()
    nothing = torch.full((2, 5), torch.nan).bfloat16()
    assert (drawn(nothing, uniform[:2], [0.0, 1.0]).tokens < 5).all()
    for row in (0, 4, 23):
        alone = drawn(logits[row : row + 1], uniform[row : row + 1])
        assert alone.tokens[0] == batch.tokens[row] and alone.sampled_log_prob[0] == batch.sampled_log_prob[row]


def test_no_kernel_for_truncated_rows_or_top_k(monkeypatch):
    calls = []
    monkeypatch.setattr("proxima.engine.local.sampler.sample_kernel", lambda: calls.append(1) or sample_kernel())
    logits = torch.randn(2, 64).bfloat16()
    sample_tokens(logits, settings(2, top_p=0.5), torch.rand(2))
    sample_tokens(logits, settings(2), torch.rand(2), 3)
    assert not calls
    sample_tokens(logits, settings(2), torch.rand(2))
    assert calls
