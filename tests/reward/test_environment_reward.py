"""The reward of an episode by its environment."""

from dataclasses import replace

import pytest

from proxima.data import Episode
from proxima.reward.environment_reward import EnvironmentReward
from tests.reward.make import completion, prompt


@pytest.mark.parametrize(("reward", "correct"), [(1.0, True), (0.5, True), (0.25, False), (-3.0, False), (0.0, False)])
def test_it_is_that_of_the_episode(reward, correct):
    played = replace(completion("x"), episode=Episode(reward=reward))
    assert EnvironmentReward().score_one(prompt(), played).value == reward
    assert EnvironmentReward().score_one(prompt(), played).correct is None
    assert EnvironmentReward(correct_from=0.5).score_one(prompt(), played).correct is correct


def test_what_has_none_fails():
    with pytest.raises(ValueError, match="is not an episode"):
        EnvironmentReward().score_one(prompt(), completion("x"))
    with pytest.raises(ValueError, match="got no reward from its environment"):
        EnvironmentReward().score_one(prompt(), replace(completion("x"), episode=Episode()))
    assert EnvironmentReward().unreadable(None) is None
