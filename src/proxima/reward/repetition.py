"""A penalty for saying the same again."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from proxima.data import Completion, Prompt, Score, require
from proxima.reward.base import WeightedReward
from proxima.reward.protocol import Where

Unit = Literal["words", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Repetition(WeightedReward):
    """A penalty by the share of n-grams that the completion has written before.

        value = -max_penalty * (1 - different n-grams / n-grams)

    Args:
        n: length of an n-gram, in units; >= 1.
        unit: `words`, between white space and in lower case, or `tokens`, where white space and case count.
        max_penalty: what a text would cost in which every n-gram is the same one, in reward units; >= 0.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `repetition`.
    Returns: Score of value in (-max_penalty, 0]; says nothing of correctness.
    Edge cases: an empty completion, and any with fewer than n units, has no n-gram and costs nothing.
    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), appendix C.2.
    Differs: there each token of a repeated n-gram is penalised where it stands; here the completion is, by their share,
        as in open-r1. open-r1 writes the penalty as a negative number.
    """

    n: int = 3
    unit: Unit = "words"
    max_penalty: float = 1.0

    kind: ClassVar[str] = "repetition"
    where: ClassVar[Where] = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n >= 1, "n", self.n, "must be >= 1")
        require(self.unit in ("words", "tokens"), "unit", self.unit, "must be 'words' or 'tokens'")
        require(
            0 <= self.max_penalty < float("inf"),
            "max_penalty",
            self.max_penalty,
            "must be >= 0 and finite; it is subtracted",
        )

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        grams = ngrams(units(completion, self.unit), self.n)
        return Score(value=0.0 - self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0)


def units(completion: Completion, unit: Unit) -> Sequence[Hashable]:
    """What n-grams are made of."""
    return completion.text.lower().split() if unit == "words" else completion.tokens.tolist()


def ngrams(of: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """All runs of n neighbours, in order; none where there are fewer than n."""
    return list(zip(*(of[start:] for start in range(n)), strict=False))
