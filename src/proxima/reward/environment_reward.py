"""The reward that an environment gives for an episode."""

from dataclasses import dataclass, replace

from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward


@dataclass(frozen=True, kw_only=True)
class EnvironmentReward(WeightedReward):
    """The reward that the environment gave for the episode: the sum over its turns, plus the reward at its end.

    An agent may give each role its own reward.

    Args:
        correct_from: the least reward of an episode that counts as correct; null: accuracy is not measured.
    Returns: Score of any value; sets `correct` if `correct_from` is set. `parts` are the named values from which the
        environment computed the reward, if it reports any.
    Raises: ValueError for an episode without a reward, or a completion that is not an episode.
    """

    correct_from: float | None = None

    kind = "environment"
    where = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.episode is None or completion.episode.reward is None:
            if completion.episode is None:
                what = "is not an episode"
            else:
                what = "got no reward from its environment"
            why = completion.episode.unrewarded if completion.episode is not None else ""
            raise ValueError(f"the completion {what}: {why}" if why else f"the completion {what}")
        rewards = completion.episode.rewards
        players = {player: self._score(reward) for player, reward in rewards.items()}
        return replace(self._score(completion.episode.reward), players=players, parts=completion.episode.parts)

    def _score(self, reward: float) -> Score:
        return Score(value=reward, correct=None if self.correct_from is None else reward >= self.correct_from)
