"""Weights over all versions: the cache and the loss against a rewriting that keeps every log-prob of every version, the
limits in which a chain is a weight that exists without it, and a checkpoint in the middle."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from proxima.core import Importance, Reinforce, VersionChain, chained_log_prob
from proxima.core.aggregate import TokenMean
from proxima.data.flow import Completion
from proxima.data.trajectory import Trajectory
from proxima.engine.protocol import InFlight
from proxima.runtime.state.pending_files import read_next_policy, write_next_policy
from proxima.training.next_policy import NextPolicy, missing_metrics
from tests.engine.helpers import prompt
from tests.training.test_next_policy import Recording, run
from tests.training.test_segment_wise import loss_of, objective

NAN = float("nan")
NEWEST = 8
SAMPLED_BY = (0, 0, 0, 2, 2, 5, 7, 7, 8)  # of each token


def world(seed):
    """[versions, tokens] float32 nats: the log-prob of each token under each version."""
    random = np.random.default_rng(seed)
    walk = random.normal(-1.5, 0.3, len(SAMPLED_BY)) + random.normal(0, 0.5, (NEWEST + 1, len(SAMPLED_BY))).cumsum(0)
    return np.minimum(walk, -0.01).astype(np.float32)


def rewritten(log_probs, seen, chain):
    """The log-weight of each token: every step that somebody has measured, one at a time, in float64."""
    weights = []
    for token, version in enumerate(SAMPLED_BY):
        measured = [v for v in seen if v > version and (chain.versions is None or v - version <= chain.versions)]
        way = [version, *measured, NEWEST]
        log_weight = 0.0
        for earlier, later in pairwise(way):
            step = float(log_probs[later, token]) - float(log_probs[earlier, token])
            log_weight += min(step, math.log(chain.cap))
        weights.append(log_weight)
    return np.array(weights)


class Versions(Recording):
    """Scores a token of the one completion by a table."""

    def __init__(self, log_probs, start):
        super().__init__()
        self.log_probs, self.start = log_probs, start

    async def score(self, asked):
        self.calls.append([len(request.tokens) for request in asked])
        places = [len(request.prompt_tokens) - self.start for request in asked]
        lengths = [len(request.tokens) for request in asked]
        pairs = zip(places, lengths, strict=True)
        return [self.log_probs[self.version, place : place + length] for place, length in pairs]


def completion_of(log_probs):
    count = len(SAMPLED_BY)
    own = log_probs[list(SAMPLED_BY), range(count)]
    columns = {"policy_version": SAMPLED_BY, "sampled_log_prob": own, "untruncated_log_prob": own}
    return Completion(
        prompt_uid=0, sample=0, tokens=range(10, 10 + count), text="", finish_reason="stop", temperature=1.0, **columns
    )


def growing(engine, whole):
    """In flight: the tokens that the versions before an update have sampled."""

    def until(version):
        count = sum(own < version for own in SAMPLED_BY)
        flying = InFlight.of(whole, prompt(0).tokens)
        engine.flying = [replace(flying, tokens=whole.tokens[:count], policy_version=whole.policy_version[:count])]

    return until


def filled_by(cache, whole, advantage=1.0):
    item = Trajectory.of(prompt(0), whole, group=0, advantage=advantage)
    (filled,) = asyncio.run(cache.fill([item], NEWEST))
    return filled


def cached(log_probs, seen, chain, between=lambda cache: cache):
    """The trajectory after an engine has shown some versions, one by one."""
    whole = completion_of(log_probs)
    engine = Versions(log_probs, len(prompt(0).tokens))
    cache = NextPolicy(engine, list, chain=chain)
    until = growing(engine, whole)
    for version in seen:
        until(version)
        run(cache, version)
        cache = between(cache)
    return filled_by(cache, whole), engine


def weights_of(item, proximal, chain):
    tensors = [torch.from_numpy(np.asarray(x)) for x in (item.behavior_log_prob, proximal)]
    tensors += [torch.from_numpy(x) for x in (item.next_log_prob, item.chained_log_ratio, item.policy_version)]
    log_prob = chained_log_prob(*tensors, NEWEST, chain)
    return (log_prob - tensors[0]).numpy()


ALL = tuple(range(1, NEWEST))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seen", [ALL, (1, 2, 4, 7), (3,), ()], ids=["all", "some", "one", "none"])
@pytest.mark.parametrize("versions", [None, 0, 1, 3])
@pytest.mark.parametrize("cap", [1.2, 2.0, math.inf])
def test_every_step_that_was_measured_has_its_own_bound(seed, seen, versions, cap):
    log_probs, chain = world(seed), VersionChain(cap=cap, versions=versions)
    item, _ = cached(log_probs, seen, chain)
    expected = rewritten(log_probs, seen, chain)
    np.testing.assert_allclose(weights_of(item, log_probs[NEWEST], chain), expected, atol=3e-6)
    assert expected[-1] == 0  # of the newest version
    if cap == 1.2:
        assert (expected < log_probs[NEWEST] - item.behavior_log_prob - 0.1).any()  # the bounds matter


def test_in_float64_to_the_last_digits():
    """The mathematics alone, against sums by hand."""
    random = np.random.default_rng(5)
    behavior, proximal, latest = (torch.from_numpy(random.normal(-2, 1, 200)) for _ in range(3))
    chained, version = torch.from_numpy(random.normal(0, 1, 200)), torch.from_numpy(random.integers(-1, 9, 200))
    latest[::3] = NAN
    chain = VersionChain(cap=1.5)
    ours = chained_log_prob(behavior, proximal, latest, chained, version, 8, chain)
    for i in range(200):
        known = not math.isnan(float(latest[i]))
        last = min(float(proximal[i]) - float(latest[i] if known else behavior[i]), math.log(1.5))
        log_weight = 0.0 if version[i] == 8 else (float(chained[i]) if known else 0.0) + last
        assert float(ours[i]) == pytest.approx(float(behavior[i]) + log_weight, abs=1e-12)
    with pytest.raises(ValueError, match="policy_version 8 is later than current_version 7"):
        chained_log_prob(behavior, proximal, latest, chained, version, 7, chain)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_is_computed_once_a_version_and_no_more(seed):
    """The cost: each version after a token's own, until its completion is consumed."""
    log_probs = world(seed)
    _, engine = cached(log_probs, ALL, VersionChain())
    expected = [sum(own < version for own in SAMPLED_BY) for version in ALL]
    assert [sum(call) for call in engine.calls] == expected
    _, engine = cached(log_probs, ALL, VersionChain(versions=2))
    expected = [sum(0 < version - own <= 2 for own in SAMPLED_BY) for version in ALL]
    assert [sum(call) for call in engine.calls] == expected
    cache = NextPolicy(engine, lambda: [(prompt(0), completion_of(log_probs))], chain=VersionChain())
    engine.flying, engine.calls = [], []
    run(cache, 6, 6, 6)
    assert [sum(call) for call in engine.calls] == [6, 0, 0]


def test_a_checkpoint_in_the_middle_changes_no_bit(tmp_path):
    log_probs, chain, path = world(1), VersionChain(cap=1.3), tmp_path / "kept.parquet"

    def stored(cache):
        entries = [entry for _, entry in sorted(cache.entries.items())]
        write_next_policy(path, entries)
        assert read_next_policy(path) == entries
        return NextPolicy(cache.engine, list, entries=read_next_policy(path), chain=chain)

    whole, again = cached(log_probs, ALL, chain)[0], cached(log_probs, ALL, chain, stored)[0]
    assert np.array_equal(whole.next_log_prob, again.next_log_prob, equal_nan=True)
    assert np.array_equal(whole.chained_log_ratio, again.chained_log_ratio, equal_nan=True)


def losses(item, proximal, chain, correction):
    """Loss and gradient of an objective with one correction, `proximal: next` with a chain if there is one."""
    spec = replace(
        objective("decoupled", "given"),
        surrogate=Reinforce(),
        aggregate=TokenMean(),
        corrections=[correction],
        chain=chain,
        next_missing="decoupled" if chain else None,
        current_version=NEWEST,
    )
    item = replace(item, proximal_log_prob=proximal)
    if chain is None:
        item = replace(item, next_log_prob=None, chained_log_ratio=None)
    loss, gradient = loss_of(spec, proximal.tolist(), item)
    return loss, gradient


UNBOUNDED = Importance(bound="none", towards="next")


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_token_is_its_weight(seed):
    log_probs, chain = world(seed), VersionChain(cap=1.2)
    item, _ = cached(log_probs, ALL, chain)
    _, gradient = losses(item, log_probs[NEWEST], chain, UNBOUNDED)
    expected = -np.exp(rewritten(log_probs, ALL, chain)) / len(SAMPLED_BY)
    assert gradient == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("chain", "decoupled"),
    [
        (VersionChain(cap=math.inf), Importance(bound="none")),  # the steps multiply to the whole way
        (VersionChain(cap=1.4, versions=0), Importance(bound="truncate", upper=1.4)),  # one step
    ],
)
def test_in_its_limits_it_is_the_decoupled_weight(chain, decoupled):
    for seed in range(3):
        log_probs = world(seed)
        item, _ = cached(log_probs, ALL, chain)
        _, ours = losses(item, log_probs[NEWEST], chain, UNBOUNDED)
        _, theirs = losses(item, log_probs[NEWEST], None, decoupled)
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_what_was_bounded_is_counted():
    log_probs, chain = world(0), VersionChain(cap=1.2)
    item, _ = cached(log_probs, ALL, chain)
    whole = item.next_log_prob - item.behavior_log_prob
    expected = sum(item.chained_log_ratio[i] < whole[i] - 1e-4 for i in range(len(SAMPLED_BY))) / len(SAMPLED_BY)
    assert missing_metrics([item], NEWEST)["next/capped_fraction"] == expected > 0
    item, _ = cached(log_probs, ALL, VersionChain(cap=math.inf))
    assert missing_metrics([item], NEWEST)["next/capped_fraction"] == 0
    assert "next/capped_fraction" not in missing_metrics([replace(item, chained_log_ratio=None)], NEWEST)


def test_a_token_that_both_policies_exclude_has_a_weight():
    minus = torch.tensor([-math.inf])
    log_prob = chained_log_prob(minus, minus, minus, torch.zeros(1), torch.tensor([3]), 8, VersionChain())
    assert not log_prob.isnan().any()


def test_without_its_columns_it_is_refused():
    log_probs, chain = world(0), VersionChain()
    item, _ = cached(log_probs, ALL, chain)
    spec = replace(objective(), corrections=[UNBOUNDED], chain=chain, current_version=NEWEST)
    with pytest.raises(ValueError, match="needs chained_log_ratio in every trajectory"):
        bare = replace(item, chained_log_ratio=None, proximal_log_prob=log_probs[NEWEST])
        loss_of(spec, log_probs[NEWEST].tolist(), bare)
