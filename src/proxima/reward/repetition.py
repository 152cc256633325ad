"""Rewards that count n-grams: those that a completion repeats, or that no other completion has."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from proxima.data import require
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.base import WeightedReward


@dataclass(frozen=True, kw_only=True)
class NgramReward(WeightedReward):
    """Base of the rewards that count n-grams.

    Args:
        n: length of an n-gram, in units; >= 1.
        unit: `words`, lower-case and split at whitespace, or `tokens`.
    """

    n: int = 3
    unit: Literal["words", "tokens"] = "words"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n >= 1, "n", self.n, "must be >= 1")
        require(self.unit in ("words", "tokens"), "unit", self.unit, "must be 'words' or 'tokens'")

    def ngrams(self, completion: Completion) -> list[tuple[Hashable, ...]]:
        """All n-grams, in order; for an episode, of the words of the model's last message, or of the tokens that the
        model wrote in the last path."""
        of: Sequence[Hashable] = completion.text.lower().split()
        if self.unit == "tokens":
            tokens = completion.tokens
            if completion.sampled is not None:
                tokens = tokens[completion.sampled]
            of = tokens.tolist()
        return list(zip(*(of[start:] for start in range(self.n)), strict=False))


@dataclass(frozen=True, kw_only=True)
class Repetition(NgramReward):
    """A penalty on the share of n-grams that repeat earlier ones of the completion.

        value = -max_penalty * (1 - different n-grams / n-grams)

    Args:
        max_penalty: upper bound of the penalty, in reward units, which is approached if all n-grams are the same; >= 0.
    Returns: Score of value in (-max_penalty, 0]; does not set `correct`.
    Edge cases: a completion with fewer than n units has no n-gram and no penalty.
    Source: Yeo et al., Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), appendix C.2.
    Differs: they penalize each token of a repeated n-gram; here, as in open-r1, the completion is penalized by the
        share of repeated n-grams. open-r1 takes the penalty as a negative number.
    """

    max_penalty: float = 1.0

    kind = "repetition"
    where = "inline"

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = 0 <= self.max_penalty < float("inf")
        require(finite, "max_penalty", self.max_penalty, "must be >= 0 and finite; it is subtracted")

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        grams = self.ngrams(completion)
        if not grams:
            return Score(value=0.0)
        repeated = 1 - len(set(grams)) / len(grams)
        return Score(value=0.0 - self.max_penalty * repeated)


@dataclass(frozen=True, kw_only=True)
class Diversity(NgramReward):
    """The share of a completion's n-grams that occur in no other completion of the generated batch.

        value = (number of different n-grams in this completion alone) / (number of different n-grams in it)

    A bonus that counteracts similar answers to all prompts. It compares all prompts of the batch, so it is computed
    when the batch is complete; with dynamic sampling a step may generate several batches, each compared separately.

    Returns: Score of value in [0, 1]; does not set `correct`. A batch of one completion: 1.
    Edge cases: a completion with fewer than n units has no n-gram and gets 0.
    Source: the novelty reward of curiosity-driven red-teaming (Hong et al., arXiv 2402.19464), one minus a self-BLEU.
    Differs: theirs averages BLEU over n = 2 to 5 against all earlier texts. Here it is one n and one batch, so a
        resumed run gives the same rewards, and every n-gram counts once, so repetition earns nothing.
    """

    kind = "diversity"
    whole_batch = True

    def score_batch(self, groups: Sequence[Group]) -> list[list[Score]]:
        sets = [[set(self.ngrams(c)) for c in group.completions] for group in groups]
        seen: Counter[tuple[Hashable, ...]] = Counter()
        for group in sets:
            for grams in group:
                seen.update(grams)

        def score(grams: set[tuple[Hashable, ...]]) -> Score:
            alone = sum(seen[gram] == 1 for gram in grams)
            return Score(value=alone / max(1, len(grams)))

        return [[score(grams) for grams in group] for group in sets]
