"""Completions that `prune` would drop whatever they are worth: by enumeration, it keeps the same without them."""

import math
import random
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

from proxima.core.advantage.group import Gpg, Grpo, Remax, Rloo
from proxima.core.selection.dropping import Prune
from proxima.core.selection.protocol import select
from proxima.core.selection.stopping import StopRule, stops_in_time
from proxima.data import FieldError
from proxima.data.outcomes import Outcomes

STOPPING = {"stop": True, "reward_range": (0.0, 1.0)}
MEAN = [Grpo(scale="group"), Rloo(), Gpg()]


def outcomes_of(rewards, baseline=None, stopped=()):
    """One group; the rewards of `stopped` are unknown."""
    known = [math.nan if i in stopped else reward for i, reward in enumerate(rewards)]
    mask = torch.tensor([i in stopped for i in range(len(rewards))])
    made = Outcomes.of(torch.tensor(known, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.long), ~mask)
    if baseline is not None:
        made = replace(made, baseline=torch.full((len(rewards),), baseline, dtype=torch.float64))
    return replace(made, stopped=mask if stopped else None)


def kept(prune, advantage, outcomes):
    keep, reasons = select([prune], outcomes, advantage(outcomes))
    assert {reason for reason in reasons if reason} <= {"pruned"}
    return keep.nonzero().flatten().tolist()


def stops(rule, rewards, lengths, baseline=None):
    """Sample → length at which it is stopped, of a group whose completions have these lengths."""
    by_sample = dict(enumerate(lengths))
    values = {i: float(reward) for i, reward in enumerate(rewards)}
    size = len(rewards)
    if baseline is None:
        return stops_in_time(rule, by_sample, values, size)
    return stops_in_time(rule, by_sample | {size: 0}, values | {size: baseline}, size, greedy=size)


def orders(size, count=24):
    """The completions' lengths: all orders of a small group, some of a larger one."""
    if math.factorial(size) <= count:
        return list(permutations(range(1, size + 1)))
    draw = random.Random(size)
    return [draw.sample(range(1, size + 1), size) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.5, 1.0)])
@pytest.mark.parametrize(("size", "rate"), [(5, 0.8), (6, 0.75), (7, 0.7)])
def test_what_is_kept_is_the_same_as_without_stopping(size, rate, values):
    """Every assignment of rewards: no kept completion is stopped, and the rest of the group leads to the same ones."""
    prune, stopped_at_all = Prune(rate=rate, **STOPPING), 0
    assignments = list(product(values, repeat=size))
    for rewards in random.Random(1).sample(assignments, min(40, len(assignments))):
        for lengths in orders(size, 8):
            found = stops(StopRule(prune, "mean", 0, 1), rewards, lengths)
            stopped_at_all += bool(found)
            for advantage in MEAN:
                whole = kept(prune, advantage, outcomes_of(rewards))
                assert kept(prune, advantage, outcomes_of(rewards, stopped=found)) == whole
    assert stopped_at_all


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [0.0, 1.0, 0.25])
@pytest.mark.parametrize(("size", "rate"), [(4, 0.5), (6, 0.75)])
def test_by_a_baseline_the_advantages_are_the_same_too(size, rate, baseline):
    prune, stopped_at_all = Prune(rate=rate, **STOPPING), 0
    for rewards in product((0.0, 1.0), repeat=size):
        for lengths in orders(size, 6):
            found = stops(StopRule(prune, "baseline", 0, 1), rewards, lengths, baseline)
            stopped_at_all += len(found)
            whole, part = outcomes_of(rewards, baseline), outcomes_of(rewards, baseline, found)
            same = kept(prune, Remax(), whole)
            assert kept(prune, Remax(), part) == same
            assert torch.equal(Remax()(part)[same], Remax()(whole)[same])
    assert stopped_at_all


def test_a_completion_that_could_still_be_kept_goes_on():
    """Of 4 with rewards 0 and 1, one is kept. With 0, 0 finished, a 1 would be kept: both others go on, until a third 0
    makes the fourth the only one that could be."""
    rule = StopRule(Prune(rate=0.75, **STOPPING), "mean", 0, 1)
    assert rule.stopped({0: 0.0, 1: 0.0}, [2, 3]) == set()
    # 1 and three zeros, whatever the last one is: with a second 1 the mean is .5, and sample 0 is the first of all
    assert rule.stopped({0: 1.0, 1: 0.0, 2: 0.0}, [3]) == set()
    assert rule.stopped({0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, [4]) == {4}  # of 5, the only 1, or the first of two
    assert rule.stopped({4: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, [0]) == set()  # a 1 would precede it


def test_nothing_is_stopped_before_the_greedy_completion_has_ended():
    rule = StopRule(Prune(rate=0.75, **STOPPING), "baseline", 0, 1)
    finished = {0: 1.0, 1: 1.0}
    assert rule.stopped(finished, [2, 3], None) == set() and rule.stopped(finished, [2, 3], 0.0) == {2, 3}
    lengths = {0: 3, 1: 4, 4: 9}
    found = stops_in_time(rule, lengths, {0: 1.0, 1: 1.0, 4: 0.0}, 4, greedy=4)
    assert found == {2: 9, 3: 9}


def test_completions_of_one_length_end_together():
    """Whether sample 1 ends before or after sample 0 of the same length is the engine's affair, and changes nothing."""
    rule = StopRule(Prune(rate=0.75, **STOPPING), "baseline", 0, 1)
    lengths = {4: 1, 0: 5, 1: 5, 2: 7, 3: 7}
    rewards = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 0.0}
    assert stops_in_time(rule, lengths, rewards, 4, greedy=4) == {2: 5, 3: 5}


def test_the_order_of_arrival_changes_no_rounding():
    """.1 + .2 + .3 is not .3 + .2 + .1: the rule gets the rewards in the order of the samples."""
    sums = []

    class Rule(StopRule):
        def stopped(self, rewards, running, baseline=None):
            sums.append(sum(rewards.values()))
            return super().stopped(rewards, running, baseline)

    rule = Rule(Prune(rate=0.75, **STOPPING), "mean", 0, 1)
    rewards = {0: 0.1, 1: 0.2, 2: 0.3}
    for order in ((0, 1, 2), (2, 1, 0)):
        stops_in_time(rule, dict.fromkeys(order, 5), rewards, 6)
    assert sums == [0.1 + 0.2 + 0.3] * 2 and sums[0] != 0.3 + 0.2 + 0.1


def brute_chances(rule, rewards, running):
    """The chances of `StopRule`, over all assignments of 0 and 1 to the unfinished ones, by their Pólya urn."""
    chances = dict.fromkeys(running, 0.0)
    size = len(rewards) + len(running)
    for assigned in product((0, 1), repeat=len(running)):
        ones = sum(rewards.values()) + 1
        zeros = len(rewards) - sum(rewards.values()) + 1
        probability = 1.0
        for value in assigned:
            probability *= (ones if value else zeros) / (ones + zeros)
            ones, zeros = ones + value, zeros + 1 - value
        mean = (sum(rewards.values()) + sum(assigned)) / size
        for j, value in zip(running, assigned, strict=True):
            before = [i for i, r in rewards.items() if (-abs(r - mean), i) < (-abs(value - mean), j)]
            if len(before) < rule.prune.kept(size):
                chances[j] += probability
    return chances


def test_the_chance_of_being_kept_is_that_of_the_urn():
    """Against all assignments, where no mean is 1/2 (there the rule is careful about rounding)."""
    prune = Prune(rate=0.6, **STOPPING)
    rewards, running = {0: 1.0, 2: 0.0, 3: 0.0, 6: 1.0}, [1, 4, 5]
    exact = brute_chances(StopRule(prune, "mean", 0, 1), rewards, running)
    assert len(set(exact.values())) > 1
    for sample, chance in exact.items():
        for bound, stopped in ((chance + 1e-10, True), (chance - 1e-10, False)):
            rule = StopRule(prune, "mean", 0, 1, chance=bound)
            assert (sample in rule.stopped(rewards, running)) == stopped


def test_by_a_baseline_the_chance_is_that_of_the_next_draw():
    """One 1 of two finished: the next is a 1 with probability (1 + 1) / (2 + 2), and then it precedes the 1 of sample
    5, but not that of sample 0."""
    prune = Prune(rate=0.75, **STOPPING)
    for first, chance in ((5, 0.5), (0, 0.0)):
        rewards = {first: 1.0, 6: 0.0}
        for bound in (0.49, 0.51):
            rule = StopRule(prune, "baseline", 0, 1, chance=bound)
            assert (3 in rule.stopped(rewards, [3, 4], 0.0)) == (bound > chance)


def test_fewer_are_kept_where_fewer_differ():
    """Two of eight are right: |A| is .75 and .25, so half of the largest leaves the two; without it four are kept."""
    rewards = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert kept(Prune(rate=0.5), Grpo(), outcomes_of(rewards)) == [0, 1, 2, 5]
    assert kept(Prune(rate=0.5, at_least=0.5), Grpo(), outcomes_of(rewards)) == [1, 5]
    assert kept(Prune(rate=0.5, at_least=0.35), Grpo(), outcomes_of(rewards)) == [1, 5]
    assert kept(Prune(rate=0.5, at_least=0.33), Grpo(), outcomes_of([0.0, 1.0, 0.0, 1.0])) == [0, 1]


def test_stopped_completions_are_dropped_where_nothing_prunes():
    """As after a resume with another selection: they have no score, and are not trained."""
    given = outcomes_of([1.0, 0.0, 1.0], stopped=[2])
    keep, reasons = select([], given, torch.zeros(3))
    assert keep.tolist() == [True, True, False] and reasons == [None, None, "stopped"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop": True}, "reward_range"),
        ({**STOPPING, "keep": "random"}, "keep=largest"),
        ({**STOPPING, "scope": "batch"}, "scope=group"),
        ({**STOPPING, "reward_range": (1.0, 1.0)}, "the lower one first"),
        ({**STOPPING, "reward_range": (0.0, math.inf)}, "finite"),
        ({"stop_chance": 1.0}, "stop_chance"),
        ({"at_least": 1.5}, "at_least"),
        ({"at_least": 0.5, "keep": "smallest"}, "keep=largest"),
    ],
)
def test_settings_that_can_not_be_are_refused(fields, named):
    with pytest.raises(FieldError, match=named):
        Prune(**fields)
