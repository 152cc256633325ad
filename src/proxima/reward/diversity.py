"""Rewards n-grams that no other completion of the batch has."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxima.data import Group, Score, require
from proxima.reward.base import WeightedReward
from proxima.reward.repetition import Unit, ngrams, units


@dataclass(frozen=True, kw_only=True)
class Diversity(WeightedReward):
    """The share of a completion's n-grams that occur in no other completion of the generated batch.

        value = (number of different n-grams in this completion alone) / (number of different n-grams in it)

    A bonus against a policy that answers everything alike. It compares all prompts of the batch, so it is computed when
    the batch is complete; with dynamic sampling a step may generate several batches, each compared by itself.

    Args:
        n: length of an n-gram, in units; >= 1.
        unit: `words`, lower-case and split at whitespace, or `tokens`.
    Returns: Score of value in [0, 1]; does not set `correct`. A batch of one completion: 1.
    Edge cases: a completion with fewer than n units has no n-gram and gets 0.
    Source: the novelty reward of curiosity-driven red-teaming (Hong et al., arXiv 2402.19464), one minus a self-BLEU.
    Differs: theirs averages BLEU over n = 2 to 5 against all earlier texts; here one n and one batch, so that a resumed
        run gives the same rewards, and every n-gram counts once, so that repetition earns nothing.
    """

    n: int = 3
    unit: Unit = "words"

    kind: ClassVar[str] = "diversity"
    whole_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n >= 1, "n", self.n, "must be >= 1")
        require(self.unit in ("words", "tokens"), "unit", self.unit, "must be 'words' or 'tokens'")

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        sets = [[set(ngrams(units(c, self.unit), self.n)) for c in group.completions] for group in groups]
        counts: Counter[tuple[Hashable, ...]] = Counter(gram for group in sets for grams in group for gram in grams)
        return [[Score(value=_unique_share(grams, counts)) for grams in group] for group in sets]


def _unique_share(grams: set[tuple[Hashable, ...]], counts: Counter[tuple[Hashable, ...]]) -> float:
    return sum(counts[gram] == 1 for gram in grams) / len(grams) if grams else 0.0
