"""How a reward is called. Its own failures become failed scores."""

from collections.abc import Sequence
from functools import partial

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.model.compute_thread import ComputeThread
from proxima.reward.base import WeightedReward, attempted, validated


class RewardCalls:
    """Calls a reward in the event loop or the compute thread; `ThreadCalls` and `WorkerCalls` are the other ways.

    Args:
        compute: the thread that makes the calls; None: they are made at once, one for each completion.
    """

    def __init__(self, reward: WeightedReward, compute: ComputeThread | None = None) -> None:
        self.reward, self.compute = reward, compute

    def unreadable(self, answers: Sequence[object]) -> list[str | None]:
        """For each answer, the reason why the reward can't score a row with it, or None; blocks."""
        return [self.reward.unreadable(answer) for answer in answers]

    async def group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        """The scores of the completions of a prompt."""
        if self.compute is not None:
            return await self.compute.run(own_scores, self.reward, prompt, completions)
        return [score for completion in completions for score in own_scores(self.reward, prompt, [completion])]

    async def batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of a whole batch; a failure of the call is a failure of every completion."""
        raise NotImplementedError


def own_scores(reward: WeightedReward, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
    """The reward's own scores, with failures as failed scores."""
    scores = attempted(lambda: list(reward.score(prompt, completions)))
    if not isinstance(scores, Score) and len(scores) != len(completions):
        scores = Score.failed(f"ValueError: returned {len(scores)} scores for {len(completions)} completions")
    return [checked_score(score) for score in of_each(scores, completions)]


def of_each(scores: list[Score] | Score, completions: Sequence[object]) -> list[Score]:
    """A failed call as a failed score for each of its completions."""
    return [scores] * len(completions) if isinstance(scores, Score) else scores


def checked_score(score: object) -> Score:
    """The score, or a failed one if it is not valid."""
    if isinstance(score, Score) and not score.valid and score.error:
        return score  # it has its own reason
    return attempted(partial(validated, score))


def of_groups(scores: list[list[Score]] | Score, groups: Sequence[Group]) -> list[list[Score]]:
    """A failed call as a failed score for each completion of its groups."""
    return [[scores] * len(group.scores) for group in groups] if isinstance(scores, Score) else scores
