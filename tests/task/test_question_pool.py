"""The pool of questions: its rule by hand, its draws, and that no gradient is biased by it, by enumeration."""

from fractions import Fraction
from itertools import product

import pytest
import torch

from proxima.core import AGGREGATES, SURROGATES
from proxima.core.advantage import ADVANTAGES
from proxima.core.loss import policy_loss
from proxima.data.errors import FieldError
from proxima.task.prompts import Cursor, PromptSource
from proxima.task.protocol import Row
from proxima.task.question_pool import PooledQuestions, QuestionPool
from scripts.enumerable_world import EnumerableWorld
from tests.tiny import tiny_tokenizer

POOL = QuestionPool(least=0.25, forget=0.5)


def test_the_rule_by_hand():
    """1, then 1/2, 1/4 and, at most, 1/4 again (u = 1/8); a useful group: (1/8 + 1) / 2."""
    pool = PooledQuestions(POOL, seed=1)
    seen = []
    for useful in (False, False, False, True):
        seen.append(pool.probability(7))
        pool.judged(7, useful)
    assert seen == [1, 0.5, 0.25, 0.25] and pool.probability(7) == 0.5625
    assert pool.probability(8) == 1 and pool.weight(8, uid=3) == 1


def test_a_draw_is_asked_as_often_as_it_should_and_weighs_the_inverse():
    pool = PooledQuestions(POOL, seed=1)
    pool.judged(0, useful=False)
    weights = [pool.weight(0, uid) for uid in range(4000)]
    asked = [weight for weight in weights if weight is not None]
    assert set(asked) == {2.0} and abs(len(asked) - 2000) < 4 * 32  # four standard deviations
    assert weights == [pool.weight(0, uid) for uid in range(4000)]  # of seed and uid alone
    assert weights != [PooledQuestions(POOL, seed=2).weight(0, uid) for uid in range(4000)]


def test_a_state_is_restored_to_the_bit():
    pool = PooledQuestions(QuestionPool(forget=0.3), seed=1)
    for row, useful in ((0, False), (3, False), (3, True), (3, False), (5, True)):
        pool.judged(row, useful)
        pool.weight(row, uid=row)
    restored = PooledQuestions(QuestionPool(forget=0.3), seed=1)
    restored.load(pool.state())
    assert [restored.probability(row) for row in range(6)] == [pool.probability(row) for row in range(6)]
    assert restored.taken() == pool.taken() == {"pool/asked_fraction": 0.8, "pool/rows_below_one": 2}
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
    source.judged({0: False, 1: True})
    source.judged({0: False})
    later = source.next(60)
    assert {prompt.weight for prompt in later if prompt.uid % 3} == {1}
    of_first = [prompt for prompt in later if prompt.uid % 3 == 0]
    assert {prompt.weight for prompt in of_first} == {4} and len(of_first) < 15
    assert source.skipped == 0 and source.cursor.drawn > 63
    assert pool.taken()["pool/asked_fraction"] == 63 / source.cursor.drawn

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
    draws = [0, 1, 0, 1, 1]
    weighted = unweighted = Fraction(0)
    for outcome in product((None, False, True), repeat=len(draws)):  # passed over, uniform, useful
        pool = Enumerated(POOL, seed=0)
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
            pool.judged(row, result)
        weighted += likelihood * total
        unweighted += likelihood * count
    assert float(weighted) == pytest.approx(float(sum(useful[row] for row in draws)), rel=1e-14)
    assert unweighted < 0.9 * weighted


@pytest.mark.parametrize("weighs", [True, False])
def test_the_gradient_of_a_batch_of_useful_groups_has_the_direction_of_all(weighs):
    """Three questions with rewards of 0 and 1 and one policy: the expected gradient of a batch of one useful group of
    two, each asked with its own probability. Weighted, it is parallel to the gradient of the mean reward, and its
    length is that over the probability that a draw is asked and useful; unweighted, it is not parallel."""
    pool = Enumerated(POOL, seed=0)
    for _ in range(2):
        pool.judged(1, useful=False)
    pool.judged(2, useful=False)
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
