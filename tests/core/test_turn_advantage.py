"""Advantages of turns: worked examples, the limits in which they are those of completions, and what they ignore."""

from dataclasses import replace

import pytest
import torch

from proxima.core import TokenRewards
from proxima.core.advantage.group import Grpo, Rloo
from proxima.core.advantage.turn import Gigpo, TurnReturns
from proxima.data.outcomes import Outcomes

NAN = float("nan")


def episodes(*turns, group=None, states=None, tokens=2, holes=1):
    """Episodes by the rewards of their turns: each turn of `tokens` tokens, then `holes` that nobody sampled. The state
    of a turn is what `states` says, or its own; garbage stands where nothing was sampled."""
    columns = {"reward": [], "turn": [], "state": [], "mask": []}
    ends = [0]
    for i, own in enumerate(turns):
        for k, reward in enumerate(own):
            state = 100 * i + k if states is None else states[i][k]
            columns["reward"] += [0.0] * (tokens - 1) + [reward] + [NAN] * holes
            columns["turn"] += [k] * tokens + [-1] * holes
            columns["state"] += [state] * tokens + [-1] * holes
            columns["mask"] += [True] * tokens + [False] * holes
        ends.append(len(columns["mask"]))
    return TokenRewards(
        reward=torch.tensor(columns["reward"], dtype=torch.float64),
        loss_mask=torch.tensor(columns["mask"], dtype=torch.bool),
        cu_seqlens=torch.tensor(ends),
        group=torch.tensor(group or [0] * len(turns)),
        turn=torch.tensor(columns["turn"], dtype=torch.long),
        state=torch.tensor(columns["state"], dtype=torch.long),
    )


def by_turn(spec, rewards):
    """The advantage of each turn of each episode, after a look at the tokens."""
    value = spec(rewards)
    assert bool((value[~rewards.loss_mask] == 0).all())
    out = []
    for start, end in zip(rewards.cu_seqlens[:-1].tolist(), rewards.cu_seqlens[1:].tolist(), strict=True):
        turn, own = rewards.turn[start:end], value[start:end]
        assert all(len(own[turn == k].unique()) == 1 for k in turn[turn >= 0])
        out.append([float(own[turn == k][0]) for k in turn[turn >= 0].unique()])
    return out


def test_returns_from_a_turn_on_by_hand():
    """γ = ½. Returns 1 + ½·2 + ¼·4 = 3, 4, 4; 2, 2; 1. The third ended first: its 1 stands for its later turns."""
    rewards = episodes([1, 2, 4], [1, 2], [1])
    assert by_turn(TurnReturns(gamma=0.5), rewards) == [
        pytest.approx([3 - (2 + 1) / 2, 4 - (2 + 1) / 2, 4 - (2 + 1) / 2]),
        pytest.approx([2 - (3 + 1) / 2, 2 - (4 + 1) / 2]),
        pytest.approx([1 - (3 + 2) / 2]),
    ]


def test_the_biased_form_by_hand():
    """Second turns: 2, and 6 for the other. The third turn has nobody to be compared with."""
    rewards = episodes([1, 2, 4], [3, 6], [2])
    second, first = 2 - 6, 1 - 2.5
    spec = TurnReturns(gamma=0.5, baseline="biased_per_turn")
    assert by_turn(spec, rewards) == [
        pytest.approx([first + 0.5 * second, second, 0.0]),
        pytest.approx([3 - 1.5 + 0.5 * 4, 4]),
        pytest.approx([2 - 2]),
    ]


def test_gigpo_by_hand():
    """γ = ½. State 7 is seen by the first turns and again by the second turn of the first episode."""
    rewards = episodes([0, 1], [0, 3], states=[[7, 7], [7, 8]])
    returns = [0.5, 1.0, 1.5]  # of the turns in state 7: both of the first episode, the first of the second
    mean = sum(returns) / 3
    assert by_turn(Gigpo(gamma=0.5, weight=2.0), rewards) == [
        pytest.approx([-1 + 2 * (0.5 - mean), -1 + 2 * (1.0 - mean)]),
        pytest.approx([1 + 2 * (1.5 - mean), 1.0]),  # alone in state 8
    ]
    std = torch.tensor(returns).std().item()
    scaled = by_turn(Gigpo(gamma=0.5, scale="group", epsilon=1e-4), rewards)
    assert scaled[0][0] == pytest.approx(-1 / (2**0.5 + 1e-4) + (0.5 - mean) / (std + 1e-4))


def test_a_state_is_compared_within_its_group():
    rewards = episodes([1], [2], [5], [9], group=[0, 0, 1, 1], states=[[7]] * 4)
    assert by_turn(Gigpo(weight=1.0), rewards) == [[-1.0], [1.0], [-4.0], [4.0]]


SCORES = [0.1, 0.7, 0.2, 0.1 + 0.2, 0.3, 0.3, 5.0]
LABELS = [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("spec", "single"),
    [
        (TurnReturns(), Rloo()),
        (TurnReturns(gamma=0.3), Rloo()),
        (TurnReturns(baseline="biased_per_turn"), Rloo()),
        (Gigpo(weight=0), Grpo()),
        (Gigpo(weight=0, scale="group"), Grpo("group")),
    ],
)
def test_of_one_turn_it_is_the_method_of_completions_to_the_bit(spec, single):
    rewards = episodes(*([score] for score in SCORES), group=LABELS)
    outcomes = Outcomes.of(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(LABELS))
    assert [own for (own,) in by_turn(spec, rewards)] == single(outcomes).tolist()


def test_a_reward_at_the_end_alone_is_rloo_to_the_bit():
    turns = [[0.0] * count + [score] for count, score in enumerate(SCORES)]
    outcomes = Outcomes.of(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(LABELS))
    expected = [[value] * len(own) for own, value in zip(turns, Rloo()(outcomes).tolist(), strict=True)]
    assert by_turn(TurnReturns(), episodes(*turns, group=LABELS)) == expected


@pytest.mark.parametrize("spec", [TurnReturns(), TurnReturns(baseline="biased_per_turn"), Gigpo()])
def test_neither_order_nor_other_groups_nor_holes_matter(spec):
    turns, states = [[1, 2, 4], [3, 6], [2], [0, 1]], [[0, 1, 2], [0, 1], [0], [0, 2]]
    advantages = by_turn(spec, episodes(*turns, states=states))
    order = [2, 0, 3, 1]
    shuffled = episodes(*(turns[i] for i in order), states=[states[i] for i in order])
    assert by_turn(spec, shuffled) == [pytest.approx(advantages[i]) for i in order]
    more = episodes(*turns, [8, 8], [1], states=[*states, [0, 1], [0]], group=[0, 0, 0, 0, 1, 1])
    assert by_turn(spec, more)[:4] == [pytest.approx(own) for own in advantages]
    assert by_turn(spec, episodes(*turns, states=states, holes=0, tokens=5)) == advantages
    empty = episodes(*turns, [], states=[*states, []])  # without a loss token
    assert by_turn(spec, empty) == [*advantages, []]


def test_turns_without_tokens_leave_their_place():
    """Number 1 was cut before its first token: it pays nothing, but time passes."""
    rewards = episodes([0, 1.0], [0.0])
    rewards = replace(rewards, turn=torch.where(rewards.turn == 1, 2, rewards.turn))
    assert by_turn(TurnReturns(gamma=0.5), rewards) == [[0.25, 1.0], [-0.25]]
