"""The tokens that could be sampled, from the local engine: those of a plain truncation (test_sampler.py has more), with
every token; nothing where nothing is truncated; the same among other requests and when they are interrupted."""

from dataclasses import replace

import pytest
import torch

from proxima.data.trajectory import Trajectory
from proxima.engine.local.sampler import sample_tokens
from proxima.engine.protocol import Sampling
from proxima.model.policy import Policy
from tests.engine.helpers import behavior, engine, requests, rows_of, run
from tests.engine.test_interrupt import SEEDS, published_midway
from tests.engine.test_sampler import brute, settings
from tests.model.rows import loaded, plain_logits

V = 12


def test_rows_that_are_greedy_or_whole_have_none():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    rows = settings(3, temperature=[0.0, 1.0, 1.0], top_p=[0.5, 1.0, 0.5])
    drawn = sample_tokens(logits, rows, torch.zeros(3), masks=True)
    assert [len(ids) > 0 for ids in drawn.sets] == [False, False, True]


CUT = {"temperature": 0.8, "top_p": 0.7, "top_k": 40}


def masked():
    return engine(sampling_mask=True)


@pytest.mark.slow
def test_the_sampled_log_prob_is_that_of_the_set():
    """Against a plain forward in float64: log-softmax over the set, which is what top-k and top-p keep."""
    asked, model = requests(3, 3, **CUT), loaded("llama").model
    given = run(masked(), asked)
    for row, c in zip(rows_of(asked, given), given, strict=True):
        with torch.no_grad():
            logits = plain_logits(model, row).double()
        assert len(c.sampling_mask) == len(c.tokens)
        for t, token in enumerate(c.tokens):
            own = torch.tensor(c.sampling_mask.part(t, t + 1).ids, dtype=torch.long)
            expected = logits[t, token] - logits[t, own].logsumexp(0)
            assert c.sampled_log_prob[t] == pytest.approx(float(expected), abs=2e-5)
            kept = [v for v, p in enumerate(brute(logits[t].tolist(), top_k=40, top_p=0.7)) if p > 0]
            assert len(set(kept) ^ set(own.tolist())) <= 1  # the edge may round the other way
        assert c.sampling_mask.counts.min() >= 1 and c.sampling_mask.counts.max() <= 40


@pytest.mark.slow
def test_only_truncated_sampling_has_them_and_only_when_asked():
    whole, greedy = requests(1, 2, max_tokens=4), requests(1, 1, first=1, max_tokens=4, temperature=0.0, top_p=0.5)
    assert [c.sampling_mask for c in run(masked(), whole + greedy)] == [None] * 3
    assert masked().capabilities.sampling_mask and "sampling_mask" in masked().spec.provides
    plain, asked = engine(), requests(3, 3, **CUT)
    assert not plain.capabilities.sampling_mask and "sampling_mask" not in plain.spec.provides
    assert run(plain, asked) == [replace(c, sampling_mask=None) for c in run(masked(), asked)]
    assert not any(plain.scheduler.table.sets)


@pytest.mark.slow
def test_lines_that_are_used_again_and_other_requests_change_nothing():
    """More requests than slots, of several kinds: each completion has the set that it has alone."""
    kinds = (Sampling(max_tokens=20, **CUT), Sampling(max_tokens=7), Sampling(max_tokens=9, min_p=0.2, stop=("zz",)))
    asked = [replace(request, sampling=kinds[request.sample % 3]) for request in requests(6, 4)]
    together = run(masked(), asked)
    for request, c in zip(asked, together, strict=True):
        assert (c.sampling_mask is None) == (not request.sampling.truncates)
    for i in (0, 2, 9, 23):
        assert run(masked(), [asked[i]]) == [together[i]]


@pytest.mark.slow
def test_each_set_is_of_the_weights_that_sampled_its_token(monkeypatch):
    """New weights twice while completions run: over its set and under its version, each log-prob is the trainer's."""
    monkeypatch.setattr("proxima.engine.local.local_engine.STEPS_PER_TURN", 1)
    asked = requests(2, 4, seed=5, max_tokens=24, top_p=0.8, temperature=0.9)
    made = published_midway("recompute", asked, sampling_mask=True)
    versions = torch.tensor([version for c in made for version in c.policy_version])
    assert len(versions.unique()) > 1
    pairs = zip(asked, made, strict=True)
    items = [Trajectory.of(r.prompt, c, group=r.prompt.uid, advantage=0.0, behavior="sampled") for r, c in pairs]
    with torch.no_grad():
        policies = [Policy(loaded("llama", seed)) for seed in SEEDS]
        under = torch.stack([policy(policy.pack(items)).log_prob for policy in policies])
    torch.testing.assert_close(behavior(made), under.gather(0, versions[None])[0], rtol=0, atol=5e-5)
