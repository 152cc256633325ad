"""The pool of questions: its rule by hand, its draws, and that no gradient is biased by it, by enumeration."""

import json
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from proxima.core import AGGREGATES, SURROGATES
from proxima.core.advantage import ADVANTAGES
from proxima.core.loss import policy_loss
from proxima.data.errors import FieldError
from proxima.data.pending import Judgement
from proxima.task.prompts import Cursor, PromptSource
from proxima.task.protocol import Row
from proxima.task.question_pool import PooledQuestions, QuestionPool, SourceFigures, chance_of_both
from scripts.enumerable_world import EnumerableWorld
from tests.tiny import tiny_tokenizer

POOL = QuestionPool(least=0.25, forget=0.5)
USELESS, USEFUL = Judgement(useful=False), Judgement(useful=True)


def known_pool(made, settings=POOL, seed=1):
    """A pool that knows enough of its source: half the groups of rows from 1000 on were useful."""
    pool = made(settings, seed=seed)
    for row in range(1000, 1020):
        pool.judged(row, USEFUL if row % 2 else USELESS)
    return pool


def group(right, size=8, weight=1.0):
    """What a group with this many right answers says."""
    return Judgement(useful=0 < right < size, right=right, wrong=size - right, weight=weight)


def rising(start, steps):
    product_of = Fraction(1)
    for step in range(steps):
        product_of *= start + step
    return product_of


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("alpha", [1, 2, 7])
@pytest.mark.parametrize("beta", [1, 5])
def test_the_chance_of_a_useful_group_in_fractions(size, alpha, beta):
    """E[p^G] of a beta law is a quotient of rising factorials."""
    whole = rising(Fraction(alpha + beta), size)
    expected = 1 - rising(Fraction(alpha), size) / whole - rising(Fraction(beta), size) / whole
    assert chance_of_both(alpha, beta, size) == pytest.approx(float(expected), abs=1e-12)


def test_the_rule_by_hand():
    """Sixteen groups of eight of a source: their shares have mean m and variance v; a question with groups of its own
    has their completions besides, the earlier ones by halves."""
    pool = PooledQuestions(QuestionPool(least=0.01, forget=0.5), seed=1)
    rights = [0, 8, 8, 4, 8, 0, 0, 8, 2, 8, 8, 0, 8, 6, 8]
    for row, right in enumerate(rights):
        assert pool.probability(99) == pool.probability(row) == 1  # too little is known
        pool.judged(row, group(right))
    pool.judged(1, group(7))
    assert pool.probability(99) == 1  # earlier groups weigh a little less than 1, so that these are not 16
    pool.judged(2, group(8))

    kept, sums = 255 / 256, [0.0, 0.0, 0.0]
    for right in [*rights, 7, 8]:
        for i, value in enumerate((1, right / 8, (right / 8) ** 2)):
            sums[i] = kept * sums[i] + value
    mean, variance = sums[1] / sums[0], sums[2] / sums[0] - (sums[1] / sums[0]) ** 2
    correlation = (8 * variance / (mean * (1 - mean)) - 1) / 7
    total = 1 / correlation - 1

    def chance(right, wrong):
        alpha, beta = mean * total + right, (1 - mean) * total + wrong
        all_right, all_wrong = 1.0, 1.0
        for already in range(8):  # each completion as likely as those before it make it
            all_right *= (alpha + already) / (alpha + beta + already)
            all_wrong *= (beta + already) / (alpha + beta + already)
        return 1 - all_right - all_wrong

    assert pool.chance(99) == pytest.approx(chance(0, 0), rel=1e-9)
    assert pool.chance(0) == pytest.approx(chance(0, 8), rel=1e-9)
    assert pool.chance(3) == pytest.approx(chance(4, 4), rel=1e-9)
    assert pool.chance(1) == pytest.approx(chance(4 + 7, 1), rel=1e-9)  # 8 of 8, by halves, then 7 of 8
    assert pool.chance(3) > pool.chance(99) > pool.chance(0)


def test_other_rewards_are_counted_by_groups():
    pool = PooledQuestions(QuestionPool(least=0.01), seed=1)
    for row in range(20):
        pool.judged(row, Judgement(useful=row % 4 == 0))
    mean = sum((255 / 256) ** (19 - row) for row in range(0, 20, 4)) / sum((255 / 256) ** row for row in range(20))
    assert pool.chance(99) == pytest.approx(mean)
    assert pool.chance(0) == pytest.approx((mean + 1) / 2) and pool.chance(1) == pytest.approx(mean / 2)
    pool.judged(1, Judgement(useful=True))
    after = pool.chance(99)
    assert after > mean and pool.chance(1) == pytest.approx((after + 1) / 2.5)


def test_a_question_that_was_never_asked_has_the_chance_of_its_source():
    sources = np.array([0] * 100 + [1] * 100)
    pool = PooledQuestions(QuestionPool(least=0.05), seed=1, sources=sources)
    for row in range(30):
        pool.judged(row, group(0 if row % 6 else 3))
        pool.judged(100 + row, group(3 + row % 3))
    assert pool.chance(60) < 0.3 and pool.chance(160) > 0.9


def test_what_is_known_of_a_source_counts_each_question_by_the_inverse_of_its_probability():
    """Questions of both kinds, the one asked four times as rarely: the source has the shares of all."""
    every, some = SourceFigures(), SourceFigures()
    for _ in range(40):
        for _ in range(4):
            every.add(group(8))
        every.add(group(4))
    for _ in range(40):
        some.add(group(8, weight=4.0))
        some.add(group(4))
    assert some.share / some.groups == pytest.approx(every.share / every.groups, rel=2e-3)
    assert some.prior(8) == pytest.approx(every.prior(8), rel=0.02)


@pytest.mark.parametrize("rights", [[0] * 20, [8] * 20, [4] * 20, [0, 8] * 10])
def test_extreme_sources(rights):
    pool = PooledQuestions(QuestionPool(least=0.01), seed=1)
    for row, right in enumerate(rights):
        pool.judged(row, group(right))
    assert 0 <= pool.chance(99) <= 1 and 0 <= pool.chance(0) <= 1
    pool.judged(0, group(1, size=1))
    assert 0 <= pool.chance(0) <= 1


def costs(pooled, seed, dead=0.7, passes=4, questions=400, wanted=24):
    """Groups generated for each used one after the first pass over a data set of which this share of the questions is
    never or always answered, the others more or less often."""
    random = np.random.default_rng(seed)
    rates = np.where(random.random(questions) < dead, random.integers(0, 2, questions), random.beta(2, 2, questions))
    pool = PooledQuestions(QuestionPool(), seed=1)
    uid, generated, used = 0, 0, 0
    while uid < passes * questions:
        weights, expected = {}, 0.0
        while expected < wanted and uid < passes * questions:
            row = uid % questions
            weight = pool.weight(row, uid) if pooled else 1.0
            uid += 1
            if weight is not None:
                weights[row] = weight
                expected += pool.expected(row, 0.4) if pooled else 0.4
        for row, weight in weights.items():
            judged = group(int(random.binomial(8, rates[row])), weight=weight)
            pool.judged(row, judged)
            if uid > questions + wanted:
                generated += 1
                used += judged.useful
    return generated / used


def test_it_generates_little_that_it_does_not_use():
    """The goal: at most 1.5 groups for a used one where it is 3 and more without a pool."""
    without = [costs(pooled=False, seed=seed) for seed in range(4)]
    with_pool = [costs(pooled=True, seed=seed) for seed in range(4)]
    assert min(without) > 3 and max(with_pool) < 1.6
    assert np.mean(with_pool) < 1.5


def test_a_question_that_is_useful_more_often_than_not_is_always_asked():
    pool = known_pool(PooledQuestions)
    for row, useful in ((1, 3), (2, 0)):
        for _ in range(3):
            pool.judged(row, USEFUL if useful else USELESS)
    assert pool.chance(1) > 0.5 and pool.probability(1) == 1
    assert pool.probability(2) == max(POOL.least, (2 * pool.chance(2)) ** 2) < 1


def test_a_draw_is_asked_as_often_as_it_should_and_weighs_the_inverse():
    pool = known_pool(PooledQuestions)
    for _ in range(9):
        pool.judged(0, Judgement(useful=False))
    chance = pool.probability(0)
    weights = [pool.weight(0, uid) for uid in range(4000)]
    asked = [weight for weight in weights if weight is not None]
    assert set(asked) == {1 / chance} and chance < 0.6
    assert abs(len(asked) - 4000 * chance) < 4 * 32  # four standard deviations
    assert weights == [pool.weight(0, uid) for uid in range(4000)]  # of seed and uid alone
    other = known_pool(PooledQuestions, seed=2)
    assert weights != [other.weight(0, uid) for uid in range(4000)]


def test_a_state_is_restored_to_the_bit():
    sources = np.arange(30) // 20
    pool = PooledQuestions(QuestionPool(forget=0.3), seed=1, sources=sources)
    for i in range(40):
        row = (7 * i) % 30
        pool.weight(row, uid=row)
        pool.judged(row, group(i % 9, weight=1 + i / 7))
    restored = PooledQuestions(QuestionPool(forget=0.3), seed=1, sources=sources)
    restored.load(json.loads(json.dumps(pool.state())))
    assert [restored.probability(row) for row in range(30)] == [pool.probability(row) for row in range(30)]
    taken = pool.taken()
    assert restored.taken() == taken and 0 < taken["pool/rows_below_one"] <= 30
    for each in (pool, restored):
        each.judged(3, group(2))
    assert pool.state() == restored.state()
    restored.load({})  # of a checkpoint from before the pool
    assert restored.probability(0) == 1


@pytest.mark.parametrize(("name", "value"), [("least", 0), ("least", 1.5), ("forget", 0), ("forget", float("nan"))])
def test_bounds(name, value):
    with pytest.raises(FieldError, match=name):
        QuestionPool(**{name: value})


def test_a_source_passes_over_draws_and_counts_them():
    rows = [Row(messages=({"role": "user", "content": str(i)},)) for i in range(3)]
    pool = PooledQuestions(POOL, seed=1)
    source = PromptSource(rows, tiny_tokenizer(), context=100, cursor=Cursor(3, seed=1, shuffle=False), pool=pool)
    prompts = source.next(3)
    assert [prompt.uid for prompt in prompts] == [0, 1, 2] and {prompt.weight for prompt in prompts} == {1}
    for _ in range(9):
        source.judged({0: USELESS, 1: USEFUL, 2: USEFUL})
    later = source.next(60)
    weights = [{prompt.weight for prompt in later if prompt.uid % 3 == row} for row in range(3)]
    assert weights[0] == {4} and weights[1] == weights[2] == {1 / pool.probability(1)}
    assert max(weights[1]) < 1.3
    of_first = [prompt for prompt in later if prompt.uid % 3 == 0]
    assert len(of_first) < 15
    assert source.skipped == 0 and source.cursor.drawn > 63
    assert pool.taken()["pool/asked_fraction"] == 63 / source.cursor.drawn
    few = source.next_useful(4, rate=0.01, most=100)
    expected = [pool.chance(prompt.uid % 3) for prompt in few]
    assert sum(expected) >= 4 > sum(expected[:-1])
    assert len(source.next_useful(4, rate=0.01, most=3)) == 3

    again = PromptSource(
        rows, tiny_tokenizer(), context=100, cursor=Cursor(3, seed=1, shuffle=False), pool=PooledQuestions(POOL, seed=1)
    )
    again.load(source.state())
    assert [(p.uid, p.weight) for p in again.next(9)] == [(p.uid, p.weight) for p in source.next(9)]


class Enumerated(PooledQuestions):
    """A pool whose draws a test decides."""

    asked = True

    def weight(self, row, uid):
        return 1 / self.probability(row) if self.asked else None


def test_each_draw_adds_what_it_adds_without_a_pool():
    """Two questions that are useful in 1/2 and 1/8 of their groups, four draws of them by turns, every outcome: the
    rates change on the way, and the expected sum of weight times usefulness is that of all draws."""
    useful = (Fraction(1, 2), Fraction(1, 8))
    known = known_pool(PooledQuestions).state()
    draws = [0, 1, 0, 1, 1]
    weighted = unweighted = Fraction(0)
    for outcome in product((None, False, True), repeat=len(draws)):  # passed over, uniform, useful
        pool = Enumerated(POOL, seed=0)
        pool.load(known)
        likelihood, total, count = Fraction(1), Fraction(0), 0
        for row, result in zip(draws, outcome, strict=True):
            asked = Fraction(pool.probability(row))
            pool.asked = result is not None
            weight = pool.weight(row, uid=0)
            if result is None:
                likelihood *= 1 - asked
                continue
            likelihood *= asked * (useful[row] if result else 1 - useful[row])
            total += Fraction(weight) * result
            count += result
            pool.judged(row, USEFUL if result else USELESS)
        weighted += likelihood * total
        unweighted += likelihood * count
    assert float(weighted) == pytest.approx(float(sum(useful[row] for row in draws)), rel=1e-14)
    assert unweighted < 0.9 * weighted


@pytest.mark.parametrize("weighs", [True, False])
def test_the_gradient_of_a_batch_of_useful_groups_has_the_direction_of_all(weighs):
    """Three questions with rewards of 0 and 1 and one policy: the expected gradient of a batch of one useful group of
    two, each asked with its own probability. Weighted, it is parallel to the gradient of the mean reward, and its
    length is that over the probability that a draw is asked and useful; unweighted, it is not parallel."""
    pool = known_pool(Enumerated)
    for _ in range(2):
        pool.judged(1, USELESS)
    pool.judged(2, USELESS)
    worlds = [World(vocabulary=3, horizon=2, seed=seed) for seed in range(3)]
    policy = worlds[0].policy(0)
    surrogate, aggregate = SURROGATES["reinforce"](), AGGREGATES["sequence_mean_token_sum"]()

    def loss(batch):
        return policy_loss(batch, surrogate=surrogate, aggregate=aggregate).value

    expected, chance = torch.zeros_like(policy), 0.0
    for row, world in enumerate(worlds):
        moments = world.moments(
            policy, world.log_prob(policy), loss, advantage=ADVANTAGES["rloo"](), group_size=2
        )  # 0 of uniform groups, whose advantages are 0
        probability = pool.probability(row)
        right = float((world.probability(world.log_prob(policy)) * world.reward).sum())
        chance += probability * 2 * right * (1 - right) / len(worlds)
        expected += probability * (pool.weight(row, uid=0) if weighs else 1) * moments.mean / len(worlds)
    expected /= chance
    gradient = sum(world.gradient(policy) for world in worlds) / len(worlds)
    cosine = float((expected * gradient).sum() / expected.norm() / gradient.norm())
    if weighs:
        assert cosine == pytest.approx(1, abs=1e-12)
        assert float(expected.norm()) == pytest.approx(float(gradient.norm()) / chance)
    else:
        assert cosine < 0.99


class World(EnumerableWorld):
    """A world whose completions are right or wrong."""

    @property
    def reward(self):
        return (torch.rand(len(self.completions), generator=self._generator(0), dtype=torch.float64) < 0.5).double()
