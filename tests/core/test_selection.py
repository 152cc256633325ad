"""Selection: pruning by both counting rules, balance, truncation, and their composition."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from proxima.core import SELECTIONS, PpoClip, SequenceMeanTokenMean, policy_loss, select
from proxima.core.penalty import K3
from proxima.core.selection.dropping import BestAndWorst, DropTruncated, DropUniformGroups, Prune
from proxima.data.outcomes import Outcomes
from tests.core.batches import packed


def outcomes(groups: list[int], truncated: list[int] | None = None) -> Outcomes:
    o = Outcomes.of(torch.arange(len(groups)).double(), torch.tensor(groups))
    return o if truncated is None else replace(o, truncated=torch.tensor(truncated).bool())


A = torch.tensor([0.1, -0.9, 0.5, -0.3, 2.0, -2.0, 0.0, 0.0], dtype=torch.float64)
TWO = outcomes([3, 3, 3, 3, 1, 1, 1, 1])


def test_a_random_choice_is_the_same_each_time() -> None:
    random = Prune(0.5, keep="random")(TWO, A)
    assert random.sum() == 4 and random[:4].sum() == 2 and torch.equal(random, Prune(0.5, keep="random")(TWO, A))


def test_prune_breaks_ties_by_index_and_keeps_at_least_one() -> None:
    assert Prune(0.5)(outcomes([0] * 4), torch.ones(4)).int().tolist() == [1, 1, 0, 0]
    assert Prune(0.99)(outcomes([0, 0, 1]), torch.ones(3)).int().tolist() == [1, 0, 1]


def test_a_pair_is_the_best_and_the_worst_of_a_group() -> None:
    tied = torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0, 2.0])
    assert BestAndWorst()(outcomes([0, 0, 0, 0, 1, 1]), tied).int().tolist() == [1, 0, 1, 0, 0, 0]
    assert BestAndWorst()(outcomes([0]), torch.ones(1)).tolist() == [False]
    assert select([DropUniformGroups(), BestAndWorst()], TWO, A)[1].count("not_in_a_pair") == 4


def test_selections_compose_in_order_and_give_reasons() -> None:
    o = Outcomes(
        reward=torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 7.0]),
        valid=torch.tensor([1, 1, 1, 1, 1, 0]).bool(),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        length=torch.ones(6, dtype=torch.long),
        truncated=torch.tensor([0, 0, 1, 0, 0, 0]).bool(),
    )
    keep, reasons = select(
        [DropUniformGroups(), DropTruncated(), Prune(0.5)], o, torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    )
    assert keep.int().tolist() == [1, 0, 0, 0, 0, 0]
    assert reasons == [None, "pruned", "truncated", "uniform_group", "uniform_group", "invalid"]
    assert Counter(reasons)["uniform_group"] == 2


def test_reasons_are_distinct() -> None:
    assert len({make.reason for make in SELECTIONS.values()}) == len(SELECTIONS)


@pytest.mark.slow
def test_a_random_choice_is_independent_of_rewards_and_positions():
    """Over 400 fresh batches, right and wrong answers and all positions in a group are kept equally often."""
    kept_right, kept_wrong, places = [], [], torch.zeros(8)
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        reward = (torch.rand(32, generator=generator) < 0.5).double()
        identity = ((torch.arange(32) // 8 + 4 * step) << 20) + torch.arange(32) % 8  # prompt uid and sample
        outcomes = replace(Outcomes.of(reward, torch.arange(32) // 8), identity=identity)
        keep = Prune(0.5, keep="random")(outcomes, torch.zeros(32))
        assert keep.view(4, 8).sum(1).tolist() == [4] * 4
        kept_right.append(keep[reward == 1].double())
        kept_wrong.append(keep[reward == 0].double())
        places += keep.view(4, 8).sum(0)
    right, wrong = torch.cat(kept_right).mean().item(), torch.cat(kept_wrong).mean().item()
    assert abs(right - 0.5) < 0.02 and abs(wrong - 0.5) < 0.02  # 4 standard errors are 0.025
    assert ((places / 1600 - 0.5).abs() < 0.06).all()


@pytest.mark.parametrize(
    ("size", "rate", "prompts", "factor"),
    [(8, 0.9375, 4, 16), (16, 0.95, 2, 20), (8, 0.875, 4, 8), (4, 0.8, 4, 5), (6, 0.75, 2, 4)],
)
@pytest.mark.parametrize("count", ["keep", "drop"])
def test_allocation_over_the_batch_keeps_the_size_of_an_update(size, rate, prompts, factor, count):
    spec = Prune(rate, scope="batch", count=count, allocate=True)
    assert spec.prompts_factor(size) == factor and spec.keeps_size(size)
    assert spec.kept(prompts * factor * size) == prompts * size


def test_allocation_that_can_not_keep_the_size_is_known():
    assert not Prune(0.7, scope="batch", allocate=True).keeps_size(8)
    assert [Prune(0.5, allocate=True).keeps_size(size) for size in (16, 7)] == [True, False]


def test_the_gradient_of_grpo_splits_as_the_pruning_paper_does():
    """1/G 1/T (r A + beta (pi_ref/pi - 1)) at each token: docs/algorithms/prune.md."""
    leaf = torch.tensor([-1.0, -0.5, -0.7], dtype=torch.float64, requires_grad=True)
    centre = torch.tensor([-1.1, -0.45, -0.7], dtype=torch.float64)
    reference = torch.tensor([-1.3, -0.4, -0.7], dtype=torch.float64)
    advantage = torch.tensor([0.5, 0.5, -2.0], dtype=torch.float64)
    b = packed([2, 1], log_prob=leaf, proximal_log_prob=centre, reference_log_prob=reference, advantage=advantage)
    loss = policy_loss(b, surrogate=PpoClip(), penalty=K3(0.04), aggregate=SequenceMeanTokenMean())
    loss.value.backward()
    ratio, towards = (leaf.detach() - centre).exp(), (reference - leaf.detach()).exp()
    share = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    torch.testing.assert_close(-leaf.grad, share * (ratio * advantage + 0.04 * (towards - 1)))
