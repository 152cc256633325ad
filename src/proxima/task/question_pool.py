"""Asks questions whose groups are likely to be uniform less often, and weighs those that are asked so that no gradient
is biased."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from proxima.data import require
from proxima.data.pending import Judgement
from proxima.data.random import QUESTION_DRAW, mix

FEWEST = 16.0  # groups of a source, by weight, before anything is said of its questions
SOURCE_FORGETS = 1 / 256  # weight of a source's last group in what is known of it
SPREAD = (0.02, 0.98)  # of the correlation between two completions of a question


@dataclass(frozen=True, kw_only=True)
class QuestionPool:
    """Ask a question with a probability that follows how likely its next group is to be useful.

        chance = 1 - E[p^G + (1 - p)^G]        p ~ Beta(alpha + right, beta + wrong), G completions of a group
        asked with p = max(least, min(1, (2 chance)²))      weight of the question's advantages 1 / p

    A question that the policy always or never answers has uniform groups, which train nothing. One whose next group is
    useful more often than not is always asked. right and wrong count its completions; at each new group, those before
    count 1 - forget times. alpha and beta are those of its source: the moments of the shares of right answers over the
    source's questions, so that a question that was never asked has the chance of its source. It is asked with that
    chance over the one of the best source: always where there is one source, since asking shows what it is. Before 16
    groups of a source everything is asked. Where rewards are not 0 or 1, useful and uniform groups are counted in place
    of completions, and the chance is their mean.

    Whether a draw is passed over depends on the seed, the draw's uid and what was known of the question before the
    draw. So each draw of the data adds in expectation what it adds without a pool:

        E[asked / p · g | the past] = g        g: the sum of the gradients of the group's completions, 0 if uniform

    With a loss whose denominator is fixed (`sequence_mean_token_sum` and its kin) a batch of useful groups has the
    direction of the batch without a pool, exactly; `token_mean` divides by the tokens of the groups that were asked, a
    ratio of sums as without a pool. The price is variance: E[|w g|²] = |g|² / p, at most 1 / least times that of a
    draw without a pool.

    Source: importance weights, Horvitz and Thompson, 1952; the moments of a beta-binomial law. DAPO (arXiv 2503.14476,
        3.2) drops uniform groups after they are generated.
    Differs: prime-rl's buffers sort questions into easy, normal and hard by their last mean reward, draw fixed shares
        of each, and weigh nothing: a hard question counts for less than an easy one, by shares.
    """

    least: Annotated[float, "smallest probability of asking a question; its inverse bounds weights and variance"] = 0.1
    forget: Annotated[float, "by how much less a question's earlier groups count at each new one; 1: not at all"] = 0.5

    def __post_init__(self) -> None:
        require(0 < self.least <= 1, "least", self.least, "must be in (0, 1]: a question that is never asked is lost")
        require(0 < self.forget <= 1, "forget", self.forget, "must be in (0, 1]")


@dataclass
class Counts:
    """What is known of a question, each group after the first with a smaller weight."""

    right: float = 0.0
    wrong: float = 0.0
    useful: float = 0.0
    uniform: float = 0.0

    def add(self, judgement: Judgement, forget: float) -> None:
        """Count a group."""
        kept = 1 - forget
        self.right = kept * self.right + (judgement.right or 0)
        self.wrong = kept * self.wrong + (judgement.wrong or 0)
        self.useful = kept * self.useful + judgement.useful
        self.uniform = kept * self.uniform + (not judgement.useful)


@dataclass
class SourceFigures:
    """Weighted sums over the groups of a source, each question counted by the inverse of its probability.

    `groups` is the sum of the weights; `share` and `square` those of the shares of right answers and their squares,
    `size` that of the completions of a group, `useful` that of the useful groups. `binary`: no group had another reward
    than 0 or 1.
    """

    groups: float = 0.0
    share: float = 0.0
    square: float = 0.0
    size: float = 0.0
    useful: float = 0.0
    binary: bool = True

    def add(self, judgement: Judgement) -> None:
        """Count a group."""
        weight = judgement.weight
        kept = 1 - SOURCE_FORGETS
        if judgement.right is None or judgement.wrong is None:
            self.binary = False
        right = judgement.right or 0
        size = right + (judgement.wrong or 0)
        share = right / size if size else 0.0
        self.groups = kept * self.groups + weight
        self.share = kept * self.share + weight * share
        self.square = kept * self.square + weight * share**2
        self.size = kept * self.size + weight * size
        self.useful = kept * self.useful + weight * judgement.useful

    @property
    def known(self) -> bool:
        """True if enough groups were judged to say something of its questions."""
        return self.groups >= FEWEST

    def chance(self, counts: Counts) -> float:
        """The chance that the next group of a question is useful; 1 while too little is known of the source."""
        if not self.known:
            return 1.0
        if not self.binary:
            mean = self.useful / self.groups
            return (mean + counts.useful) / (1 + counts.useful + counts.uniform)
        size = self.size / self.groups
        alpha, beta = self.prior(size)
        return chance_of_both(alpha + counts.right, beta + counts.wrong, size)

    def prior(self, size: float) -> tuple[float, float]:
        """alpha and beta by the moments of the shares of right answers in groups of a size: their variance is
        m (1 - m) (1 + (size - 1) rho) / size, with rho = 1 / (alpha + beta + 1)."""
        least = 1 / (2 * self.groups)
        mean = min(max(self.share / self.groups, least), 1 - least)
        variance = max(0.0, self.square / self.groups - (self.share / self.groups) ** 2)
        correlation = 0.5
        if size > 1 and variance > 0:
            correlation = (variance / (mean * (1 - mean)) * size - 1) / (size - 1)
        least_spread, most_spread = SPREAD
        correlation = min(max(correlation, least_spread), most_spread)
        total = 1 / correlation - 1
        return mean * total, (1 - mean) * total


def chance_of_both(alpha: float, beta: float, size: float) -> float:
    """The chance that `size` completions are neither all right nor all wrong, where the share of right ones has the law
    Beta(alpha, beta)."""

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    whole = log_beta(alpha, beta)
    all_right = math.exp(log_beta(alpha + size, beta) - whole)
    all_wrong = math.exp(log_beta(alpha, beta + size) - whole)
    return min(max(1 - all_right - all_wrong, 0.0), 1.0)


class PooledQuestions:
    """What a run knows of its questions, and the decision whether a draw is asked.

    Args:
        settings: see `QuestionPool`.
        seed: with the uid of a draw, determines whether it is asked.
        sources: [rows] the number of the source of each row; None: all rows are of one.
    """

    def __init__(self, settings: QuestionPool, seed: int, sources: NDArray[np.int64] | None = None) -> None:
        self.settings = settings
        self.seed = seed
        self._source_of = sources
        self._rows: dict[int, Counts] = {}
        self._sources: dict[str, SourceFigures] = {}
        self._drawn = 0  # since the last `taken`
        self._asked = 0

    def chance(self, row: int) -> float:
        """The chance that the next group of a row is useful, in [0, 1]."""
        return self._of_source(row).chance(self._rows.get(row, Counts()))

    def expected(self, row: int, otherwise: float) -> float:
        """As `chance`; `otherwise` while too little is known of the row's source."""
        if self._of_source(row).known:
            return self.chance(row)
        return otherwise

    def probability(self, row: int) -> float:
        """p of a row, in [least, 1]."""
        chance = self.chance(row)
        if row in self._rows:
            wanted = min(1.0, (2 * chance) ** 2)
        else:
            best = max(figures.chance(Counts()) for figures in self._sources.values())
            wanted = chance / best if best > 0 else 1.0
        return max(self.settings.least, wanted)

    def weight(self, row: int, uid: int) -> float | None:
        """The weight 1 / p of a draw of a row, >= 1; None: it is not asked. Counts the draw."""
        probability = self.probability(row)
        asked = mix(QUESTION_DRAW, self.seed, uid) < probability * 2**64
        self._drawn += 1
        self._asked += asked
        return 1 / probability if asked else None

    def judged(self, row: int, judgement: Judgement) -> None:
        """Record what a group of a row was."""
        self._rows.setdefault(row, Counts()).add(judgement, self.settings.forget)
        self._of_source(row).add(judgement)

    def _of_source(self, row: int) -> SourceFigures:
        name = "0" if self._source_of is None else str(self._source_of[row])
        return self._sources.setdefault(name, SourceFigures())

    def taken(self) -> dict[str, float]:
        """Return metrics since the last call: `pool/asked_fraction`, of the draws, 1 without any; and
        `pool/rows_below_one`, the rows that were judged and are asked with a probability below 1."""
        fraction = self._asked / self._drawn if self._drawn else 1.0
        self._drawn = 0
        self._asked = 0
        below = sum(self.probability(row) < 1 for row in self._rows)
        return {"pool/asked_fraction": fraction, "pool/rows_below_one": below}

    def state(self) -> dict[str, Any]:
        """Return JSON values that `load` restores to the bit."""
        return {
            "rows": list(self._rows),
            "counts": [list(asdict(counts).values()) for counts in self._rows.values()],
            "sources": {name: asdict(figures) for name, figures in self._sources.items()},
            "drawn": self._drawn,
            "asked": self._asked,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; empty: that of a run which had no pool so far."""
        self._rows = {}
        if "counts" in state:
            counts = [Counts(*values) for values in state["counts"]]
            self._rows = dict(zip(state.get("rows", ()), counts, strict=True))
        self._sources = {name: SourceFigures(**figures) for name, figures in state.get("sources", {}).items()}
        self._drawn = state.get("drawn", 0)
        self._asked = state.get("asked", 0)
