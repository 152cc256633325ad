"""From scored groups to updates: order, invalid scores, what is dropped and why, and the split."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core import ADVANTAGES, SELECTIONS
from proxima.core.advantage.group import Gdpo, Grpo
from proxima.core.advantage.token import Gae
from proxima.core.selection.dropping import DropUniformGroups, Prune
from proxima.runtime.loop.step_review import rollout_metrics
from proxima.training.batch_builder import BatchBuilder, split_into_updates
from proxima.training.learner import drop_mismatched
from proxima.training.objectives.protocol import TokenStatistics
from tests.training.episodes import group_of, model, path


def group(uid, rewards):
    """Of completions of one turn, every other one of which a limit cut; `rewards`: None is a failed score."""
    plain = replace(path(model(range(3))), sampled=None, episode=None)
    return group_of(
        uid, [replace(plain, finish_reason=("stop", "length")[i % 2]) for i in range(len(rewards))], rewards
    )


def algorithm(*selection, advantage="grpo", **settings):
    return BatchBuilder(
        advantage=ADVANTAGES[advantage](), selection=[SELECTIONS[name]() for name in selection], **settings
    )


def advantage_of(batch):
    """Of the completions with a score."""
    return {key: record.advantage for key, record in batch.records({}).items() if record.advantage is not None}


def groups_of(batch, update):
    """The group of each completion of an update."""
    group = {item.key: item.group for item in batch.trajectories}
    return [group[key] for key in update]


def test_groups_are_rejected_before_an_advantage_of_tokens_is_known():
    spec = algorithm("drop_uniform_groups", "prune", advantage="reinforce_pp")
    assert spec.reject([group(0, [1, 1]), group(1, [0, 1])]) == {0: "uniform_group"}


def test_rewards_have_their_weights_though_a_batch_lacks_them():
    gdpo = Gdpo(finish="none", weights=(3.0, 1.0))  # refuses another number of rewards
    spec = BatchBuilder(advantage=gdpo, selection=[SELECTIONS["drop_uniform_groups"]()], rewards=("p", "a"))
    assert spec.reject([group(0, [1.0, 0.0])]) == {}
    assert advantage_of(spec.step_batch([group(0, [1.0, 0.0])], 1)) == {(0, 0, 0): 0.0, (0, 1, 0): 0.0}


def test_the_order_of_arrival_is_forgotten():
    groups = [group(5, [1, 0]), group(2, [0, 1]), group(9, [3, 1])]
    chosen = [algorithm().step_batch(order, 1) for order in (groups, groups[::-1], [groups[1], groups[2], groups[0]])]
    assert chosen[0] == chosen[1] == chosen[2]
    assert [g.prompt.uid for g in chosen[0].groups] == [2, 5, 9]
    advantages = {(2, 0): -0.5, (2, 1): 0.5, (5, 0): 0.5, (5, 1): -0.5, (9, 0): 1.0, (9, 1): -1.0}
    assert advantage_of(chosen[0]) == {(*key, 0): value for key, value in advantages.items()}
    assert [t.group for t in chosen[0].trajectories] == [0, 0, 1, 1, 2, 2]
    assert chosen[0].updates == (tuple(t.key for t in chosen[0].trajectories),)


def test_an_invalid_score_enters_nothing():
    chosen = algorithm().step_batch(
        [group(0, [1.0, None, 0.0]), group(1, [None, None, None]), group(2, [1.0, 1.0, None])], 1
    )
    kept = [(0, 0, 0), (0, 2, 0), (2, 0, 0), (2, 1, 0)]
    assert advantage_of(chosen) == dict(zip(kept, (0.5, -0.5, 0.0, 0.0), strict=True))
    assert chosen.reasons == {(uid, i, 0): "invalid" for uid in range(3) for i in range(3) if (uid, i, 0) not in kept}
    assert [t.key for t in chosen.trajectories] == kept and [t.advantage.tolist() for t in chosen.trajectories] == [
        [a] * 3 for a in (0.5, -0.5, 0.0, 0.0)
    ]
    assert chosen.kept == [0, 2] and chosen.dropped == {1: "invalid"} and chosen.drop_counts == {"invalid": 5}
    metrics = rollout_metrics(chosen.groups, chosen)
    assert metrics["reward/mean"] == 0.75 and metrics["reward/invalid"] == 5 == metrics["dropped/invalid"]
    assert metrics["reward/std"] == pytest.approx(0.5) and metrics["completions"] == 9 and "accuracy" not in metrics
    assert metrics["truncated_fraction"] == pytest.approx(1 / 3) and metrics["tokens/generated"] == 27


def test_uniform_groups_are_dropped_by_maximum_and_minimum():
    third = 0.1 + 0.2
    groups = [group(0, [third] * 4), group(1, [0.3, third, 0.3, 0.3]), group(2, [1, 1, None, 1])]
    chosen = algorithm("drop_uniform_groups").step_batch(groups, 1)
    assert chosen.kept == [1] and chosen.dropped == {0: "uniform_group", 2: "uniform_group"}
    assert chosen.drop_counts == {"uniform_group": 7, "invalid": 1}


@pytest.mark.parametrize(
    ("metric", "rewards", "right", "wrong"),
    [
        ("reward", [1.0, 0.0, 1.0, 1.0], 3, 1),
        ("reward", [1.0, 1.0, 1.0, 1.0], 4, 0),
        ("reward", [0.5, 0.0, 1.0, 1.0], None, None),  # a shaped reward says nothing of a share of right answers
        ("accuracy", [1.0, 0.0, 0.0, 0.0], 1, 3),  # no reward tells what is right: the rewards are compared
        ("length", [1.0, 0.0, 0.0, 0.0], None, None),
    ],
)
def test_what_a_group_says_of_its_question(metric, rewards, right, wrong):
    made = BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=[DropUniformGroups(metric=metric)])
    batch = made.step_batch([group(3, rewards)], 1)
    (judgement,) = batch.judgements.values()
    assert (judgement.right, judgement.wrong, judgement.weight) == (right, wrong, 1.0)
    assert {3: judgement.useful} == batch.useful


def test_what_has_no_valid_score_says_nothing_of_its_question():
    (judgement,) = algorithm("drop_uniform_groups").step_batch([group(3, [1, 0, None])], 1).judgements.values()
    assert (judgement.useful, judgement.right, judgement.wrong) == (True, 1, 1)


def test_nothing_left():
    chosen = algorithm("drop_uniform_groups").step_batch([group(0, [1, 1]), group(1, [None, None])], 1)
    assert chosen.trajectories == chosen.updates == () and chosen.kept == []
    assert chosen.dropped == {0: "uniform_group", 1: "invalid"}
    assert [f.outcome for f in chosen.records({}).values()] == ["dropped_uniform_group"] * 2 + ["invalid"] * 2
    empty = algorithm().step_batch([], 1)
    assert empty.groups == empty.updates == () and rollout_metrics(empty.groups, empty)["reward/mean"] is None


def test_the_deal_is_of_the_original_groups():
    """A dropped group shortens its own update, not the others; an update with nothing left is not made."""
    groups = [group(uid, [1, 1] if uid in (0, 1, 2) else [uid, 0]) for uid in range(6)]
    chosen = algorithm("drop_uniform_groups", updates=3).step_batch(groups, 1)
    assert [groups_of(chosen, update) for update in chosen.updates] == [[3, 3], [4, 4, 5, 5]]


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    updates=st.integers(1, 5),
    epochs=st.integers(1, 3),
    step=st.integers(0, 3),
)
@settings(max_examples=60)
def test_every_epoch_has_each_completion_once_in_updates_of_equally_many_groups(counts, updates, epochs, step):
    """Of the original groups, whatever was dropped from them; a group is not divided."""
    uids = [10 + 3 * number for number in range(len(counts))]
    items = [SimpleNamespace(uid=uid, key=(uid, i, 0)) for uid, n in zip(uids, counts, strict=True) for i in range(n)]
    parts = split_into_updates(items, uids, 1, step, updates=updates, epochs=epochs)
    keys = [item.key for item in items]
    assert all(parts)
    assert sorted(key for part in parts for key in part) == sorted(epochs * keys)
    shares = [math.floor(len(uids) * Fraction(i, updates)) for i in range(updates + 1)]
    first = [[key for uid in uids[a:b] for key in keys if key[0] == uid] for a, b in pairwise(shares)]
    assert [list(part) for part in parts[: sum(map(bool, first))]] == [part for part in first if part]
    for part in parts:
        owners = [uid for uid, _ in groupby(key[0] for key in part)]
        assert len(owners) == len(set(owners)) <= -(-len(uids) // updates)
        assert all(sum(key[0] == uid for key in part) == counts[uids.index(uid)] for uid in owners)


def test_later_epochs_have_an_order_of_their_own_and_keep_groups_together():
    groups = [group(uid, [uid, 0, 1]) for uid in range(8)]
    chosen = algorithm(updates=2, epochs=3, seed=1).step_batch(groups, step=4)
    assert len(chosen.updates) == 6
    owners = [groups_of(chosen, update) for update in chosen.updates]
    assert owners[0] == [g for g in range(4) for _ in range(3)]
    for epoch in range(3):
        together = owners[2 * epoch] + owners[2 * epoch + 1]
        assert sorted(together) == sorted(g for g in range(8) for _ in range(3))
        for update in owners[2 * epoch : 2 * epoch + 2]:
            assert all(len(set(update[i : i + 3])) == 1 for i in range(0, 12, 3))
    assert owners[2:4] != owners[0:2] and owners[2:4] != owners[4:6]
    again = algorithm(updates=2, epochs=3, seed=1)
    assert again.step_batch(groups, step=4) == chosen
    assert again.step_batch(groups, step=5).updates != chosen.updates
    assert algorithm(updates=2, epochs=3, seed=2).step_batch(groups, step=4).updates != chosen.updates
    unseeded, zero = (algorithm(updates=2, epochs=3, **seed).step_batch(groups, 4) for seed in ({}, {"seed": 0}))
    assert unseeded.updates == zero.updates != chosen.updates


def test_records_of_all_completions():
    chosen = algorithm("drop_uniform_groups").step_batch(
        [group(0, [1, 0, 0.5]), group(1, [1, 1, 1]), group(2, [None, 2, 4])], 1
    )
    assert [t.key for t in chosen.trajectories] == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (2, 1, 0), (2, 2, 0)]
    facts = {
        (0, 0, 0): TokenStatistics(log_prob=[-1.0] * 3, keep=[True] * 3),
        (2, 2, 0): TokenStatistics(log_prob=[-2.0] * 3, keep=[False] * 3, entropy=[0.1] * 3),
    }
    records = list(chosen.records(facts).values())
    assert list(chosen.records(facts)) == [(uid, sample, 0) for uid in range(3) for sample in range(3)]
    skipped, dropped = "skipped_zero_advantage", "dropped_uniform_group"
    outcomes = [("trained", skipped, skipped), (dropped, dropped, dropped), ("invalid", skipped, "trained")]
    assert [record.outcome for record in records] == [outcome for group in outcomes for outcome in group]
    assert records[8].statistics is facts[2, 2, 0] and records[7].statistics is None
    assert [f.advantage for f in records] == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, None, -1.0, 1.0]


def test_what_is_rejected_after_its_first_forward_leaves_the_updates():
    groups = [group(uid, [uid, 0]) for uid in range(1, 4)]
    whole = algorithm(updates=3).step_batch(groups, 1)
    measured = {
        key: TokenStatistics(log_prob=[-1.0] * 3, keep=[False] * 3) for key in ((1, 0, 0), (2, 0, 0), (2, 1, 0))
    }
    batch = drop_mismatched(whole, measured)
    assert batch.updates == (((1, 1, 0),), ((3, 0, 0), (3, 1, 0)))
    assert [item.key for item in batch.trajectories] == [(1, 1, 0), (3, 0, 0), (3, 1, 0)]
    records = batch.records({})
    assert {key: record.statistics for key, record in records.items() if record.statistics} == measured
    assert {records[key].outcome for key in measured} == {"dropped_mismatch"} and batch.dropped == {2: "mismatch"}
    assert all(records[key].trajectory is not None and records[key].advantage for key in measured)


def test_columns_are_filled_by_key_and_the_others_stay():
    batch = algorithm("drop_uniform_groups").step_batch([group(0, [1, 1]), group(1, [1, 0])], 1)
    filled = batch.filled(replace(item, next_log_prob=-item.sample - 1.0) for item in batch.trajectories[::-1])
    assert [item.next_log_prob.tolist() for item in filled.trajectories] == [[-1.0] * 3, [-2.0] * 3]
    assert filled.updates == batch.updates and filled.completions[:2] == batch.completions[:2]


def test_a_critic_learns_from_what_a_selection_drops_too():
    def fill(items, columns):
        return [replace(item, value=0.0) for item in items]

    spec = BatchBuilder(advantage=Gae(whiten=False), selection=[Prune(rate=0.5)], fill=fill, value_warmup=2)
    batch = spec.step_batch([group(0, [1.0, 0.0, None, 3.0]), group(1, [2.0, 0.5, 1.0, 0.0])], 2)
    assert len(batch.trajectories) == 3 and len(batch.valued) == 7
    assert batch.critic_only and not spec.step_batch([group(0, [1.0, 0.0])], 3).critic_only
    assert {r.outcome for r in batch.records({}).values()} == {"critic_only", "dropped_pruned", "invalid"}


def test_groups_that_learn_from_the_teacher_are_trained_whole_and_are_in_no_statistics():
    """Whatever their rewards are: uniform, missing, or large enough to change the mean of the batch."""
    groups = [group(0, [1, 0]), group(1, [90, 90]), group(2, [3, 1]), group(3, [None, 70])]
    spec = BatchBuilder(advantage=Grpo(scale="batch"), selection=[SELECTIONS["drop_uniform_groups"]()])
    alone = spec.step_batch([groups[0], groups[2]], 1)
    mixed_spec = replace(spec, taught=lambda prompt: prompt.uid % 2 == 1)
    mixed = mixed_spec.step_batch(groups, 1)
    by_rewards = {item.key: item.advantage.tolist() for item in mixed.trajectories if not item.taught.any()}
    assert by_rewards == {item.key: item.advantage.tolist() for item in alone.trajectories}
    assert [item.key for item in mixed.trajectories if item.taught.all()] == [
        (1, 0, 0),
        (1, 1, 0),
        (3, 0, 0),
        (3, 1, 0),
    ]
    assert mixed.reasons == {} and mixed.kept == [0, 1, 2, 3] and len(mixed.updates[0]) == 8
    assert spec.reject(groups[:2]) == {1: "uniform_group"} and mixed_spec.reject(groups[:2]) == {}
    only_taught = mixed_spec.step_batch([groups[1]], 1)
    assert len(only_taught.trajectories) == 2 and only_taught.reasons == {}
