"""What a completion says that no other of the whole batch says."""

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

    A bonus against a policy that answers everything alike: it looks at all prompts of the batch at once, so it can be
    told only when the batch is complete. That is the step's batch; with dynamic sampling a step may generate several,
    and each is looked at by itself.

    Args:
        n: length of an n-gram, in units; >= 1.
        unit: `words`, between white space and in lower case, or `tokens`, where white space and case count.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `diversity`.
    Returns: Score of value in [0, 1]; says nothing of correctness. A batch of one completion: 1.
    Edge cases: an empty completion, and any with fewer than n units, has no n-gram and gets 0: silence is no diversity.
    Source: the novelty reward of curiosity-driven red-teaming (Hong et al., arXiv 2402.19464), one minus a self-BLEU.
    Differs: theirs averages BLEU over n = 2 to 5 against all texts of the past; here one n and the batch at hand, so
        that a resumed run gives the same rewards, and every n-gram counts once, so that repetition earns nothing.
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
        held = [
            [set(ngrams(units(completion, self.unit), self.n)) for completion in group.completions] for group in groups
        ]
        holders: Counter[tuple[Hashable, ...]] = Counter(gram for group in held for grams in group for gram in grams)
        return [[Score(value=_share(grams, holders)) for grams in group] for group in held]


def _share(grams: set[tuple[Hashable, ...]], holders: Counter[tuple[Hashable, ...]]) -> float:
    return sum(holders[gram] == 1 for gram in grams) / len(grams) if grams else 0.0
