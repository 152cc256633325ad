"""Episodes of several roles on their way to the trainer: one outcome a player, each compared with its own kind."""

import asyncio
from dataclasses import replace
from math import isnan

import numpy as np
import pytest
import torch

from proxima.core import ADVANTAGES, SELECTIONS
from proxima.data.flow import Score
from proxima.data.outcomes import Outcomes
from proxima.data.players import contributions_of, rewards_of_players, role_metrics
from proxima.engine.protocol import Request, Sampling
from proxima.reward.environment_reward import EnvironmentReward
from proxima.reward.length import Length
from proxima.reward.runner import RewardRunner
from proxima.rollout.episodes.played import failed_episode
from proxima.runtime.loop.step_review import exhausted_batch, rollout_metrics
from proxima.runtime.state.pending_files import read_groups, write_groups
from proxima.runtime.state.rollouts import read_rows, write_rollouts
from proxima.runtime.state.stored_completions import stored_groups
from proxima.training.batch_builder import BatchBuilder
from tests.training.episodes import group_of, model, path, seen

PROPOSALS = [{"proposer": 1.0, "solver/0": 1.0, "solver/1": 0.0}, {"proposer": 0.0, "solver/0": 0.0, "solver/1": 0.0}]


def played(rewards, more=0):
    """A proposal, and attempts of which the first has an observation; the last path is the proposer's."""

    def of(player, *parts, turn):
        own = path(*parts, turn=turn)
        return replace(own, episode=replace(own.episode, player=player))

    paths = [
        of("solver/0", model([5] * (2 + more), turn=1), seen([9], turn=1), model([6], turn=3), turn=1),
        of("solver/1", model([7], turn=2), turn=2),
        of("proposer", model([4], turn=0), seen([8], turn=0), model([4, 4], turn=4), turn=0),
    ]
    value = sum(rewards.values()) / 3
    last = replace(paths[-1], episode=replace(paths[-1].episode, reward=value, rewards=rewards), earlier=paths[:-1])
    return last, Score(value=value, players={name: Score(value=own) for name, own in rewards.items()})


def groups(*uids):
    made = []
    for uid in uids:
        episodes = [played(rewards) for rewards in PROPOSALS]
        group = group_of(uid, [completion for completion, _ in episodes], [0.0] * len(episodes))
        made.append(replace(group, scores=tuple(score for _, score in episodes)))
    return made


def advantages(batch):
    """By sample and turn of the path."""
    return {item.key[1:]: item.advantage[item.loss_mask].tolist() for item in batch.completions}


def test_a_role_is_compared_across_the_group_and_attempts_within_their_episode():
    batch = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=()).step_batch(groups(3), 1)
    assert advantages(batch) == {
        (0, 1): [1.0] * 3,
        (0, 2): [-1.0],
        (0, 0): [1.0] * 3,
        (1, 1): [0.0] * 3,
        (1, 2): [0.0],
        (1, 0): [-1.0] * 3,
    }
    assert {key[1:]: record.advantage for key, record in batch.records({}).items()} == {
        key: pytest.approx(values[0]) for key, values in advantages(batch).items()
    }


@pytest.mark.parametrize("kind", ["turn_returns", "gigpo", "grpo", "opo", "gpg", "grpo_passk", "gdpo"])
def test_kinds_that_compare_give_a_role_its_own_baseline(kind):
    """Whatever their scale: the proposers and the first episode's attempts differ, the second's attempts don't."""
    fields = {"finish": "none"} if kind == "gdpo" else {}
    batch = BatchBuilder(advantage=ADVANTAGES[kind](**fields), selection=()).step_batch(groups(3), 1)
    of = {key: values[0] for key, values in advantages(batch).items()}
    best = kind == "grpo_passk"  # only the best has an advantage
    assert of[0, 1] > 0 and of[0, 0] > 0 and of[1, 1] == of[1, 2] == 0.0
    assert (of[0, 2] < 0 or best) and (of[1, 0] < 0 or best)


def test_a_batch_is_normalised_role_by_role():
    """A role with rewards of another scale changes nothing for the others."""

    def scaled(factor):
        (group,) = groups(3)
        scores = [
            replace(s, players=s.players | {"proposer": Score(value=factor * s.players["proposer"].value)})
            for s in group.scores
        ]
        return [replace(group, scores=tuple(scores))]

    for spec in (ADVANTAGES["grpo"](scale="batch", epsilon=1e-12), ADVANTAGES["reinforce_pp"]()):
        builder = BatchBuilder(advantage=spec, selection=())
        small, large = (advantages(builder.step_batch(scaled(factor), 1)) for factor in (1.0, 1000.0))
        for key, values in small.items():
            assert large[key] == pytest.approx(values, rel=1e-4)
    assert abs(small[0, 0][0]) > 0.5


def test_a_selection_judges_each_player():
    """The attempts at the second proposal are alike, and alone dropped."""
    selection = SELECTIONS["drop_uniform_groups"]()
    builder = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=[selection])
    batch = builder.step_batch(groups(3), 1)
    assert batch.reasons == {(3, 1, 1): "uniform_group", (3, 1, 2): "uniform_group"}
    assert {item.key for item in batch.trajectories} == {(3, 0, 1), (3, 0, 2), (3, 0, 0), (3, 1, 0)}
    assert batch.updates == (tuple(item.key for item in batch.trajectories),)
    assert batch.kept == [3] and batch.dropped == {} and builder.reject(groups(3)) == {}
    metrics = rollout_metrics(batch.groups, batch)
    assert (metrics["reward/proposer"], metrics["reward/solver"]) == (0.5, 0.25)
    assert (metrics["tokens/generated"], metrics["tokens/dropped"], metrics["dropped/uniform_group"]) == (14, 4, 1)
    alike = [replace(group, scores=group.scores[1:] * 2) for group in groups(3)]
    assert builder.reject(alike) == {3: "uniform_group"} and builder.step_batch(alike, 1).kept == []


def test_only_if_no_player_differs_is_another_metric_no_remedy():
    (group,) = groups(3)
    builder = BatchBuilder(
        advantage=ADVANTAGES["rloo"](), selection=[SELECTIONS["drop_uniform_groups"](metric="length")]
    )
    batch = builder.step_batch([replace(group, completions=(group.completions[0],) * 2)], 1)
    assert (3, 0, 0) in batch.reasons  # the proposers wrote as much, the attempts of an episode did not
    assert "set algorithm.selection.0.metric=reward" not in exhausted_batch(batch, builder.selection)


def test_a_prune_keeps_the_same_share_of_each_role():
    prune = SELECTIONS["prune"](rate=0.5)
    batch = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=[prune]).step_batch(groups(3, 4), 1)
    kept = [
        contribution
        for contribution in contributions_of(batch.groups)
        if contribution.paths[0].key not in batch.reasons
    ]
    assert [each.role for each in kept] == ["solver", "proposer", "solver"] * 2


def test_an_idle_player_counts_in_its_role_s_baseline():
    (group,) = groups(3)
    idle = replace(group.completions[1], earlier=())
    scores = (
        group.scores[0],
        replace(group.scores[1], players={"proposer": Score(value=0.5), "judge": Score(value=3.0)}),
    )
    judged = replace(group.completions[0].earlier[1])
    judge = replace(judged, episode=replace(judged.episode, player="judge"))
    first = replace(group.completions[0], earlier=(judge,))
    scores = (replace(scores[0], players={"proposer": Score(value=1.0), "judge": Score(value=1.0)}), scores[1])
    both = [replace(group, completions=(first, idle), scores=scores)]
    outcomes = Outcomes.from_groups(both)
    assert outcomes.length.tolist() == [1, 3, 3, 0] and outcomes.group.unique().numel() == 2
    for kind in ("rloo", "turn_returns"):
        batch = BatchBuilder(advantage=ADVANTAGES[kind](), selection=()).step_batch(both, 1)
        assert advantages(batch) == {(0, 2): [-2.0], (0, 0): [0.5] * 3, (1, 0): [-0.5] * 3}


def test_an_invalid_score_is_of_all_players():
    (group,) = groups(3)
    scores = (Score.failed("x"), group.scores[1])
    batch = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=()).step_batch([replace(group, scores=scores)], 1)
    assert batch.reasons == dict.fromkeys([(3, 0, 1), (3, 0, 2), (3, 0, 0)], "invalid")
    assert advantages(batch)[1, 0] == [0.0] * 3  # it has no other to be compared with
    assert {r.advantage for key, r in batch.records({}).items() if key[1] == 0} == {None}
    assert role_metrics([replace(group, scores=(scores[0],) * 2)]) == {}


@pytest.mark.parametrize("kind", ["rloo", "turn_returns"])
def test_one_reward_for_all_roles_is_an_episode_without_roles(kind):
    rewards = [1.0, 0.25, 0.5]
    episodes = [played({"proposer": 0.0})[0] for _ in rewards]
    for completion in episodes:
        solvers = [replace(p, episode=replace(p.episode, player="solver")) for p in completion.earlier]
        object.__setattr__(completion, "earlier", tuple(solvers))
    plain = [
        replace(
            c,
            episode=replace(c.episode, player="", rewards={}),
            earlier=tuple(replace(p, episode=replace(p.episode, player="")) for p in c.earlier),
        )
        for c in episodes
    ]
    builder = BatchBuilder(advantage=ADVANTAGES[kind](), selection=())
    with_roles, without = (advantages(builder.step_batch([group_of(3, own, rewards)], 1)) for own in (episodes, plain))
    assert with_roles == without and len(with_roles) == 9


def scored(rewards, group):
    return asyncio.run(_scored(rewards, group))


async def _scored(rewards, group):
    runner = RewardRunner(rewards)
    runner.start()
    try:
        return await runner.score(group.prompt, group.completions)
    finally:
        runner.close()


def test_other_rewards_count_for_all_players():
    (group,) = groups(3)
    specs = [EnvironmentReward(weight=2.0, correct_from=1.0), Length(tokens=4)]
    first, second = scored(specs, group)
    extra = first.parts[specs[1].label]
    assert extra < 0 and first.value == pytest.approx(2 * 2 / 3 + extra)
    assert {name: score.value for name, score in first.players.items()} == {
        "proposer": 2 + extra,
        "solver/0": 2 + extra,
        "solver/1": 0 + extra,
    }
    assert [first.players[name].correct for name in PROPOSALS[0]] == [True, True, False]
    metrics = role_metrics([replace(group, scores=(first, second))])
    assert metrics["accuracy/proposer"] == 0.5 and metrics["accuracy/solver"] == 0.25


def test_a_reward_of_a_player_that_is_no_number_is_no_score():
    (group,) = groups(3)
    bad = replace(group.completions[0].episode, rewards={"proposer": float("nan"), "solver": 1.0})
    broken = replace(group, completions=(replace(group.completions[0], episode=bad), group.completions[1]))
    first, second = scored([EnvironmentReward()], broken)
    assert not first.valid and isnan(first.value) and second.valid


def test_scores_of_players_are_stored_and_read_back(tmp_path):
    own = groups(3, 4)
    write_groups(tmp_path / "groups.parquet", own)
    restored = read_groups(tmp_path / "groups.parquet")
    assert [group.scores for group in restored] == [group.scores for group in own]
    for before, after in zip(contributions_of(own), contributions_of(restored), strict=True):
        assert (before.role, before.group, before.score) == (after.role, after.group, after.score)
        assert [path.key for path in before.paths] == [path.key for path in after.paths]
    batch = BatchBuilder(advantage=ADVANTAGES["rloo"](), selection=()).step_batch(own, 1)
    write_rollouts(tmp_path / "000001.parquet", 1, batch.groups, batch.records({}))
    (used, dropped) = stored_groups(tmp_path / "000001.parquet")
    assert [group.scores for group in used] == [group.scores for group in own] and not dropped
    rows = read_rows(tmp_path / "000001.parquet")
    assert rows[0]["players"]["solver/0"]["value"] == 1.0 and np.isfinite([row["advantage"] for row in rows]).all()


def test_without_roles_a_file_has_no_column_of_them(tmp_path):
    completion = path(model([1, 2]))
    write_groups(tmp_path / "groups.parquet", [group_of(0, [completion], [1.0])])
    (restored,) = read_groups(tmp_path / "groups.parquet")
    assert restored.scores == (Score(value=1.0),)
    import pyarrow.parquet as pq

    assert "players" not in pq.read_schema(tmp_path / "groups.parquet").names
    assert not {"player", "rewards"} & completion.episode.facts().keys() and "players" not in Score(value=1.0).facts()


def test_a_role_s_reward_counts_for_its_attempts():
    assert rewards_of_players({"a": 1.0, "b": 2.0}, ["a", "b/0", "b/1"]) == {"a": 1.0, "b/0": 2.0, "b/1": 2.0}
    assert rewards_of_players({"a": 1.0, "b/0": 3.0, "c": 4.0}, ["a"]) == {"a": 1.0, "b/0": 3.0, "c": 4.0}
    with pytest.raises(KeyError, match="b/1"):
        rewards_of_players({"a": 1.0, "b/0": 2.0}, ["a", "b/0", "b/1"])
    assert torch.equal(Outcomes.from_groups(groups(3)).role, torch.tensor([0, 0, 1] * 2))


@pytest.mark.parametrize("kind", ["grpo", "gpg", "gdpo", "reinforce_pp_baseline", "reinforce_pp", "turn_returns"])
def test_an_episode_that_failed_before_any_role_spoke_is_in_no_mean(kind):
    (group,) = groups(3)
    request = Request(prompt=group.prompt, sample=2, sampling=Sampling())
    failed = failed_episode(request, "no", 1)
    more = replace(group, completions=(*group.completions, failed), scores=(*group.scores, Score.failed("no")))
    builder = BatchBuilder(advantage=ADVANTAGES[kind](**({"scale": "batch"} if kind == "grpo" else {})), selection=())
    alone, beside = (advantages(builder.step_batch([given], 1)) for given in (group, more))
    assert beside == alone | {(2, 0): []}
