"""Host objects: what a completion, a trajectory, a group and outcomes refuse, and how one becomes the other."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data import UserError
from proxima.data.episode import Episode
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import finite_log_prob
from proxima.data.trajectory import LabeledCompletion, PreferencePair, Trajectory


def completion(tokens=(5, 6), **changes):
    n = len(tokens)
    facts = {"sampled_log_prob": (-0.5,) * n, "untruncated_log_prob": (-1.0,) * n, "policy_version": (4,) * n}
    return replace(Completion.of_text(3, 0, "x", [0] * n), **{"tokens": tokens, "temperature": 0.7} | facts | changes)


ASKED = tuple({"role": "user", "content": text} for text in "ab")
PROMPT = Prompt(uid=3, messages=ASKED, tokens=(1, 2), answer="4")


def test_a_completion_needs_a_value_for_each_token():
    for name in ("sampled_log_prob", "untruncated_log_prob", "policy_version"):
        with pytest.raises(ValueError, match=f"Completion.{name}: 1 values for 2 tokens."):
            completion(**{name: (1,)})
    assert completion(finish_reason="length").truncated and not completion(finish_reason="abort").truncated


def test_the_question_is_the_last_user_message():
    assert PROMPT.question == "b"
    assert Prompt(uid=0, messages=({"role": "system", "content": "s"},), tokens=(1,)).question == ""


def test_a_trajectory_takes_the_requested_behavior_and_its_temperature():
    made = completion(sample=2, turn=1)
    row = Trajectory.of(PROMPT, made, group=9, advantage=-2.0)
    assert row.behavior_log_prob.tolist() == [-1.0, -1.0] and row.policy_version.tolist() == [4, 4]
    assert (row.group, row.temperature, len(row)) == (9, 0.7, 4) and row.advantage.tolist() == [-2.0, -2.0]
    assert (row.uid, row.sample, row.turn) == (3, 2, 1)
    assert row.prompt_tokens is PROMPT.tokens and row.tokens is made.tokens  # shared, not copied
    sampled = Trajectory.of(PROMPT, made, group=9, advantage=[0.5, -0.5], behavior="sampled")
    assert sampled.behavior_log_prob is made.sampled_log_prob and sampled.advantage.tolist() == [0.5, -0.5]


def test_columns_are_arrays_whatever_they_are_made_from():
    made = completion(tokens=[5, 6], sampled_log_prob=torch.tensor([-0.5, -0.25]), top_k=[[1, 2, 3]] * 2)
    dtypes = {"tokens": "int32", "sampled_log_prob": "float32", "policy_version": "int32", "top_k": "int32"}
    assert {name: getattr(made, name).dtype.name for name in dtypes} == dtypes
    assert made.top_k.shape == (2, 3) and made.top_k_log_prob is None
    assert made == replace(made) and replace(made, tokens=(5, 6)) == made
    assert made != replace(made, tokens=(5, 7)) and made != replace(made, turn=1) and made != replace(made, top_k=None)
    unknown = replace(made, sampled_log_prob=(float("nan"), -1.0))
    assert unknown == replace(unknown, sampled_log_prob=np.array([np.nan, -1.0]))
    shared = np.array([-1.0, -2.0], np.float32)
    assert completion(untruncated_log_prob=shared).untruncated_log_prob is shared
    scalar = completion(policy_version=7)
    assert scalar.policy_version.tolist() == [7, 7] and scalar.policy_version.base.size == 1
    with pytest.raises(ValueError, match=r"Completion.tokens: dtype float64, expected int32"):
        completion(tokens=(1.5, 2.0))
    with pytest.raises(ValueError, match=r"Trajectory.loss_mask: dtype int64, expected bool"):
        Trajectory(prompt_tokens=(1,), tokens=(1,), group=0, loss_mask=(1,))
    assert json.dumps(PROMPT.to_json()) and made.to_json()["tokens"] == [5, 6]


def test_a_greedy_completion_is_not_for_training():
    with pytest.raises(ValueError, match="Trajectory.temperature=0.* must be > 0"):
        Trajectory.of(PROMPT, completion(temperature=0.0), group=0, advantage=1.0)


def test_a_trajectory_needs_a_prompt_and_a_value_for_each_token():
    with pytest.raises(ValueError, match="Trajectory.prompt_tokens: empty"):
        Trajectory(prompt_tokens=(), tokens=(1,), group=0)
    with pytest.raises(ValueError, match="Trajectory.loss_mask: 1 values for 2 tokens"):
        Trajectory(prompt_tokens=(1,), tokens=(1, 2), group=0, loss_mask=(True,))


def test_outcomes_from_groups():
    scores = (Score(value=1.0), Score.failed("x"))
    group = Group(prompt=PROMPT, completions=(completion(), completion((), finish_reason="length")), scores=scores)
    outcomes = Outcomes.from_groups([group, group])
    assert outcomes.group.tolist() == [0, 0, 1, 1] and outcomes.valid.tolist() == [True, False] * 2
    assert outcomes.length.tolist() == [2, 0] * 2 and outcomes.truncated.tolist() == [False, True] * 2
    assert outcomes.reward[0] == 1 and torch.isnan(outcomes.reward[1]) and outcomes.reward.dtype == torch.float64
    assert outcomes.take(torch.tensor([2, 0])).group.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"Group.scores: 1 scores for 2 completions of prompt 3"):
        Group(prompt=PROMPT, completions=group.completions, scores=scores[:1])


def test_a_column_is_equal_to_no_absent_one():
    row = Trajectory(group=0, prompt_tokens=[1], tokens=[2, 3])
    known = replace(row, behavior_log_prob=[-1.0, np.nan])
    assert known != row and row != known and known == replace(row, behavior_log_prob=[-1.0, np.nan])


def test_an_episode_has_one_start_and_one_path_by_default():
    assert (Episode().attempts, Episode().forks, Episode().cut, Episode().failure) == (1, 0, "", "")
    assert Episode().turns == () and Episode.from_json(Episode().to_json()) == Episode()


def test_what_a_reference_scores_comes_back_where_it_was():
    chosen, rejected, other = (Trajectory(group=i, prompt_tokens=[1], tokens=[2]) for i in range(3))
    pair = PreferencePair(row=0, chosen=chosen, rejected=rejected)
    assert pair.with_sides([rejected, chosen]) == PreferencePair(row=0, chosen=rejected, rejected=chosen)
    alone = LabeledCompletion(row=0, completion=chosen, good=True)
    assert alone.sides == (chosen,) and alone.with_sides([other]) == replace(alone, completion=other)
    both = replace(alone, mismatched=rejected)
    assert both.sides == (chosen, rejected)
    assert both.with_sides([other, chosen]) == replace(alone, completion=other, mismatched=chosen)


def test_a_log_prob_of_minus_infinity_is_a_large_number_without_a_gradient():
    value = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    finite = finite_log_prob(value)
    finite.sum().backward()
    assert finite.tolist() == [-1.0, pytest.approx(-1e15, rel=1e-6)] and value.grad.tolist() == [1.0, 0.0]


def test_the_experts_of_a_completion_are_of_its_tokens():
    experts = np.zeros((2, 3, 2), np.int8)
    assert (
        completion(routed_experts=experts, prompt_routed_experts=np.zeros((9, 3, 2), np.int8)).routed_experts
        is not None
    )
    with pytest.raises(UserError, match=r"prompt 3, sample 0, turn 0: .*routed_experts: int8 of shape \[1, 3, 2\]"):
        completion(routed_experts=experts[:1])


def test_a_prompt_is_no_chat_unless_it_says_so():
    assert (Prompt(uid=0, messages=(), tokens=(1,)).chat, Prompt(uid=0, messages=(), tokens=(1,)).shared_prefix) == (
        False,
        0,
    )
