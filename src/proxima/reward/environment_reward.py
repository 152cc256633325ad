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
        episode = completion.episode
        if episode is None:
            raise ValueError("the completion is not an episode")
        if episode.reward is None:
            problem = "the completion got no reward from its environment"
            if episode.unrewarded:
                problem += f": {episode.unrewarded}"
            raise ValueError(problem)
        players = {player: self._score(reward) for player, reward in episode.rewards.items()}
        return replace(self._score(episode.reward), players=players, parts=episode.parts)

    def _score(self, reward: float) -> Score:
        correct = None if self.correct_from is None else reward >= self.correct_from
        return Score(value=reward, correct=correct)
