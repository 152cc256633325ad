"""Episodes on their way to the trainer: a trajectory a path, one outcome an episode, and what each turn is paid."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import ADVANTAGES, SELECTIONS
from proxima.core.advantage.token import Gae
from proxima.core.reward_kl import AdaptiveCoefficient, RewardKl
from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.data.flow import Prompt
from proxima.data.outcomes import Outcomes
from proxima.data.packed_batch import pack
from proxima.data.players import contributions_of
from proxima.rollout.episodes.played import with_group_prompt
from proxima.runtime.loop.step_review import rollout_metrics
from proxima.training.batch_builder import BatchBuilder
from proxima.training.episode_tokens import EpisodeTokens, turns_of
from proxima.training.learner import drop_mismatched
from proxima.training.objectives.preference_objective import best_against_worst
from proxima.training.objectives.protocol import TokenStatistics
from tests.training.episodes import NAN, forked, group_of, model, path, seen

CALL, ANSWER = model([4, 5], reward=0.25), model([6, 7, 8], reward=0.5, turn=1)
TOOL = seen([20, 21, 22])


def two_turns(**more):
    """Two tokens, an observation of three, three tokens."""
    return path(CALL, TOOL, ANSWER, **more)


def rewritten():
    """The template rewrote the first turn: it is trained on the first path alone."""
    again = model([9], turn=0, sampled=False)
    return forked(path(CALL), path(again, TOOL, ANSWER))


def builder(advantage, *selection, **settings):
    return BatchBuilder(advantage=advantage, selection=selection, **settings)


def test_an_episode_is_one_completion_and_a_trajectory_for_each_path():
    groups = [group_of(3, [rewritten(), two_turns(), two_turns()], [1.0, 0.0, None])]
    batch = builder(ADVANTAGES["rloo"]()).step_batch(groups, 1)
    keys = [(3, 0, 0), (3, 0, 1), (3, 1, 0)]
    assert [item.key for item in batch.trajectories] == keys and batch.updates == (tuple(keys),)
    assert [item.advantage.tolist() for item in batch.trajectories] == [[1.0] * 2, [1.0] * 7, [-1.0] * 8]
    assert [item.loss_mask.tolist() for item in batch.trajectories] == [
        [True] * 2,
        [False] * 4 + [True] * 3,
        [True] * 2 + [False] * 3 + [True] * 3,
    ]
    assert all(item.sampled is item.loss_mask for item in batch.trajectories)
    assert pack(batch.trajectories).in_loss_of == (2, 3, 5)
    assert batch.reasons == {(3, 2, 0): "invalid"} and batch.drop_counts == {"invalid": 1}
    assert {key: record.outcome for key, record in batch.records({}).items()} == {
        **dict.fromkeys(keys, "skipped_zero_advantage"),
        (3, 2, 0): "invalid",
    }


def test_a_path_with_an_opening_of_its_own():
    """As of a template whose generation prompt is not in the history: the first path alone has the group's prompt."""
    own, other = (Prompt(uid=0, messages=(), tokens=tokens) for tokens in ([7], [8]))
    again = path(model([9], turn=0, sampled=False), TOOL, ANSWER, initial_prompt=own)
    moved = path(model([9], turn=0, sampled=False), TOOL, ANSWER, initial_prompt=other)
    groups = [group_of(u, [forked(path(CALL), again), forked(path(CALL), again, moved)], [1.0, 0.0]) for u in (3, 4)]
    items = builder(ADVANTAGES["rloo"]()).step_batch(groups, 1).trajectories
    assert [(item.uid, item.turn, item.group, item.prompt_tokens.tolist()) for item in items] == [
        *[(3, 0, 0, [1, 4]), (3, 1, 2, [7]), (3, 0, 0, [1, 4]), (3, 1, 2, [7]), (3, 2, 4, [8])],
        *[(4, 0, 1, [1, 5]), (4, 1, 3, [7]), (4, 0, 1, [1, 5]), (4, 1, 3, [7]), (4, 2, 5, [8])],
    ]
    tokens = EpisodeTokens(pack(items), contributions_of(groups))
    rewards = tokens.rewards(torch.zeros(len(tokens.batch.loss_mask)), {"group", "turn", "state"})
    assert rewards.group.tolist() == [0, 0, 1, 1] and len(rewards.state.unique()) == 5  # -1 and two of each group
    with pytest.raises(UserError, match="episode of prompt 3 has several paths"):
        best_against_worst(items)


def test_episodes_that_begin_in_their_own_words_begin_in_one_state():
    """As of an agent with a clock in its system prompt: an opening is shared only by those that have it."""
    asked, own, other = (Prompt(uid=0, messages=(), tokens=tokens) for tokens in ([6], [7], [8]))
    begun = [two_turns(initial_prompt=opening) for opening in (own, None, other, own)]
    played = group_of(0, begun, [1.0, 0.0, 1.0, 0.0]).completions
    prompt, completions = with_group_prompt(asked, played)
    openings = [None if c.initial_prompt is None else c.initial_prompt.tokens.tolist() for c in completions]
    assert prompt is own and openings == [None, [6], [8], None]
    group = replace(group_of(0, completions, [1.0, 0.0, 1.0, 0.0]), prompt=prompt)
    items = builder(ADVANTAGES["rloo"]()).step_batch([group], 1).trajectories
    assert [(item.group, item.prompt_tokens.tolist()) for item in items] == [(0, [7]), (1, [6]), (2, [8]), (0, [7])]
    states = [[turn.state for turn in turns_of(completion)] for completion in completions]
    assert states == [[b"", np.array(TOOL[0], np.int32).tobytes()]] * 4


def test_an_episode_counts_once_and_only_what_the_model_wrote_is_generated():
    groups = [group_of(0, [rewritten(), two_turns(finish_reason="length")], [1.0, 3.0])]
    outcomes = Outcomes.from_groups(groups)
    assert outcomes.length.tolist() == [5, 5] and outcomes.truncated.tolist() == [False, True]
    assert groups[0].completions[0].generated == 5 and len(groups[0].paths) == 3
    metrics = rollout_metrics(groups, builder(ADVANTAGES["grpo"]()).step_batch(groups, 1))
    assert (metrics["tokens/generated"], metrics["completions"], metrics["length/mean"]) == (10, 2, 5.0)


def test_a_selection_drops_whole_episodes():
    groups = [group_of(0, [rewritten(), two_turns(), rewritten()], [0.0, 3.0, 1.0])]
    batch = builder(ADVANTAGES["grpo"](), SELECTIONS["prune"](rate=0.5)).step_batch(groups, 1)
    assert [item.key for item in batch.trajectories] == [(0, 1, 0)]
    assert set(batch.reasons) == {(0, 0, 0), (0, 0, 1), (0, 2, 0), (0, 2, 1)} and batch.drop_counts == {"pruned": 2}
    unused = builder(ADVANTAGES["grpo"]()).step_batch([], 1, [(groups[0], "uniform_group")])
    assert len(unused.records({})) == 5 and unused.drop_counts == {"uniform_group": 3}
    rejected = TokenStatistics(log_prob=[-1.0] * 2, keep=[False] * 2)
    left = drop_mismatched(builder(ADVANTAGES["grpo"]()).step_batch(groups, 1), {(0, 0, 0): rejected})
    assert left.updates == (((0, 0, 1), (0, 1, 0), (0, 2, 0), (0, 2, 1)),)


def test_what_the_model_did_not_write_needs_no_log_prob():
    groups = [group_of(0, [two_turns(garbage=NAN), rewritten()], [1.0, 0.0])]
    batch = builder(ADVANTAGES["grpo"]()).step_batch(groups, 1)
    assert all(item.behavior_log_prob is not None for item in batch.trajectories)
    column = groups[0].completions[0].untruncated_log_prob.copy()
    column[6] = np.nan  # of a token that it wrote
    (whole,) = groups
    lacking = replace(
        whole, completions=(replace(whole.completions[0], untruncated_log_prob=column),), scores=whole.scores[:1]
    )
    with pytest.raises(UserError, match="token 6 is absent"):
        builder(ADVANTAGES["grpo"]()).step_batch([lacking], 1)
    one_lacks = replace(whole, completions=(lacking.completions[0], *whole.completions[1:]))
    unread = builder(ADVANTAGES["grpo"](), reads_behavior=False).step_batch([one_lacks], 1).trajectories
    assert len(unread) == 3 and all(item.behavior_log_prob is None for item in unread)


def test_a_sampling_mask_has_empty_sets_for_observations():
    sets = SamplingMask.of_sets([[4, 9], [5], [], [], [], [6], [7], [8, 9]])
    item = builder(ADVANTAGES["grpo"](), behavior="sampled", needs_sampling_mask=True).step_batch(
        [group_of(0, [replace(two_turns(), sampling_mask=sets)], [1.0])], 1
    )
    assert item.trajectories[0].sampling_mask is sets
    with pytest.raises(UserError, match="token 5, id 6, has an empty set"):
        replace(two_turns(), sampling_mask=SamplingMask.of_sets([[4], [5], [], [], [], [], [7], [8]]))


def test_turns_and_the_states_before_them():
    first, second = turns_of(two_turns())
    assert (first.number, first.reward, first.places.tolist(), first.state) == (0, 0.25, [0, 1], b"")
    assert (second.number, second.reward, second.places.tolist()) == (1, 0.5, [5, 6, 7])
    assert second.state == np.array([20, 21, 22], np.int32).tobytes()
    ((number, _, places, state),) = turns_of(rewritten())
    assert (number, places.tolist(), state) == (1, [4, 5, 6], second.state)
    named = path(CALL, TOOL, model([6], turn=1, state="room 3"))
    assert [turn.state for turn in turns_of(named)] == [b"", "room 3"]
    (alone,) = turns_of(replace(two_turns(), episode=None, sampled=None))
    assert (alone.number, alone.reward, len(alone.places)) == (0, 0.0, 8)
    with pytest.raises(ValueError, match="its spans have 2 tokens, its path 8"):
        list(turns_of(replace(two_turns(), episode=path(CALL).episode)))


def placed(completion, score, weight):
    """The rewards of the tokens of one episode, path by path."""
    seen_by: list[np.ndarray] = []

    class Spy(type(ADVANTAGES["reinforce_pp"]())):
        def __call__(self, rewards):
            seen_by.append(rewards.reward.tolist())
            return rewards.reward

    builder(Spy(), turn_weight=lambda prompt: weight).step_batch([group_of(0, [completion], [score])], 1)
    return seen_by[0]


@pytest.mark.parametrize("make", [two_turns, rewritten])
def test_a_turn_is_paid_at_its_last_token_and_the_rest_at_the_end(make):
    """The score 2 has the turns' .25 + .5 twice, for the environment's weight is 2; the end has what they leave."""
    first, second = (1, 7) if make is two_turns else (1, 8)
    length = 8 if make is two_turns else 9
    expected = [0.0] * length
    expected[first], expected[second] = 0.5, 1.5
    assert placed(make(), 2.0, 2.0) == expected
    expected[first], expected[second] = 0.0, 2.0
    assert placed(make(), 2.0, 0.0) == expected  # no environment's reward in the recipe: the score alone counts


def test_a_turn_without_a_token_is_paid_at_the_end():
    cut = path(CALL, TOOL, model([], reward=0.5, turn=1))
    assert placed(cut, 1.0, 1.0) == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert sum(placed(path(CALL, TOOL, model([], turn=1), model([6], turn=2, reward=-1.0)), 1.0, 1.0)) == 1.0


def values(column):
    def fill(items, columns):
        """The column in the order of the sampled tokens, garbage elsewhere; the last path ends the episode."""
        left, out = iter(column), []
        for item in items:
            value = [next(left) if own else 1e30 for own in item.loss_mask]
            out.append(replace(item, value=value, bootstrap=0.6 if item is items[-1] else 99.0))
        return out

    return fill


@pytest.mark.parametrize("make", [two_turns, rewritten])
def test_gae_goes_over_the_whole_episode_and_skips_observations(make):
    """Five steps, in one path or two: rewards 0, .25, 0, 0, 1.75; the last state is not terminal."""
    value = [0.5, 0.4, 0.3, 0.2, 0.1]
    gae = builder(Gae(gamma=0.9, lam=0.5, whiten=False), fill=values(value), turn_weight=lambda prompt: 1.0)
    batch = gae.step_batch([group_of(0, [make()], [2.0])], 1)
    reward, after, expected, carry = [0, 0.25, 0, 0, 1.75], [0.4, 0.3, 0.2, 0.1, 0.6], [0.0] * 5, 0.0
    for t in reversed(range(5)):
        carry = expected[t] = reward[t] + 0.9 * after[t] - value[t] + 0.45 * carry
    advantages = np.concatenate([item.advantage[item.loss_mask] for item in batch.trajectories])
    assert advantages == pytest.approx(expected, rel=1e-6)
    assert all((item.advantage[~item.loss_mask] == 0).all() for item in batch.trajectories)
    returns = np.concatenate([item.returns[item.loss_mask] for item in batch.trajectories])
    assert returns == pytest.approx(np.add(expected, value), rel=1e-6)
    paid = np.concatenate([item.reward[item.loss_mask] for item in batch.trajectories])
    assert paid.tolist() == reward
    for item in batch.trajectories:
        said = item.advantage[item.loss_mask].mean()
        assert batch.records({})[item.key].advantage == pytest.approx(said, rel=1e-6)


def test_the_divergence_of_all_paths_is_paid_by_the_episode():
    def fill(items, columns):
        return [replace(item, reference_log_prob=np.where(item.loss_mask, -1.5, NAN)) for item in items]

    spec = builder(ADVANTAGES["grpo"](), fill=fill, reward_kl=RewardKl(coefficient=0.1))
    batch = spec.step_batch([group_of(0, [rewritten(), two_turns(), two_turns()], [1.0, 0.0, None])], 1)
    assert batch.metrics["reward_kl/mean"] == pytest.approx(0.5)
    assert batch.metrics["reward_kl/paid"] == pytest.approx(0.25)  # five tokens of .5 nats
    assert [item.advantage[0] for item in batch.trajectories] == pytest.approx([0.5, 0.5, -0.5])
    assert spec.after(batch).reward_kl == spec.reward_kl
    # half the target: .2 less, times 2 samples of a horizon of 10; the three paths are of two completions
    adaptive = replace(spec, reward_kl=RewardKl(coefficient=0.1, adaptive=AdaptiveCoefficient(target=1.0, horizon=10)))
    assert adaptive.after(batch).reward_kl.coefficient == pytest.approx(0.096)


def test_columns_of_turns():
    other = path(model([4, 5]), seen([20, 21, 22]), model([1, 2], turn=1), seen([30], turn=1), model([3], turn=2))
    groups = [group_of(7, [two_turns(), other], [1.0, 0.0])]
    batch = builder(ADVANTAGES["grpo"]()).step_batch(groups, 1)
    tokens = EpisodeTokens(pack(batch.trajectories), contributions_of(groups[:1]))
    rewards = tokens.rewards(tokens.batch.advantage, {"turn", "state"})
    assert rewards.turn.tolist() == [0, 0, -1, -1, -1, 1, 1, 1, 0, 0, -1, -1, -1, 1, 1, -1, 2]
    assert rewards.state.tolist() == [0, 0, -1, -1, -1, 1, 1, 1, 0, 0, -1, -1, -1, 1, 1, -1, 2]
    assert rewards.group.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["turn_returns", "gigpo"])
def test_an_invalid_episode_is_in_no_mean_of_a_turn(kind):
    def advantages(*scored):
        own, rewards = zip(*scored, strict=True)
        batch = builder(ADVANTAGES[kind](), turn_weight=lambda prompt: 1.0).step_batch([group_of(0, own, rewards)], 1)
        return [item.advantage.tolist() for item in batch.trajectories]

    valid = (two_turns(), 1.0), (rewritten(), 0.5), (path(CALL), 0.25)
    with_invalid = advantages(valid[0], (two_turns(), None), valid[1], (path(), None), valid[2])
    assert with_invalid == advantages(*valid) and len({max(own) for own in with_invalid}) > 2
