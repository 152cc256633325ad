"""Asks questions whose groups are uniform less often, and weighs those that are asked so that no gradient is biased."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from proxima.data import require
from proxima.data.random import QUESTION_DRAW, mix


@dataclass(frozen=True, kw_only=True)
class QuestionPool:
    """Ask a question with a probability that follows how often its groups were useful.

        u ← (1 − forget) u + forget · [the group was not uniform]        u = 1 at first
        p = max(least, u)        weight of the question's advantages 1 / p

    A question that the policy always or never answers has uniform groups, which train nothing. Its draws are passed
    over with probability 1 − p. Whether a draw is passed over depends on the seed, the draw's uid and what was known of
    the question before the draw. So each draw of the data adds in expectation what it adds without a pool:

        E[asked / p · g | the past] = g        g: the sum of the gradients of the group's completions, 0 if uniform

    With a loss whose denominator is fixed (`sequence_mean_token_sum` and its kin) a batch of useful groups has the
    direction of the batch without a pool, exactly; `token_mean` divides by the tokens of the groups that were asked, a
    ratio of sums as without a pool. The price is variance: E[|w g|²] = |g|² / p, at most 1 / least times that of a
    draw without a pool.

    Source: importance weights, Horvitz and Thompson, 1952. DAPO (arXiv 2503.14476, 3.2) drops uniform groups after
        they are generated.
    Differs: prime-rl's buffers sort questions into easy, normal and hard by their last mean reward, draw fixed shares
        of each, and weigh nothing: a hard question counts for less than an easy one, by shares.
    """

    least: Annotated[float, "smallest probability of asking a question; its inverse bounds weights and variance"] = 0.2
    forget: Annotated[float, "weight of a question's last group in its rate of useful groups; 1: only that counts"] = (
        0.5
    )

    def __post_init__(self) -> None:
        require(0 < self.least <= 1, "least", self.least, "must be in (0, 1]: a question that is never asked is lost")
        require(0 < self.forget <= 1, "forget", self.forget, "must be in (0, 1]")


class PooledQuestions:
    """What a run knows of its questions, and the decision whether a draw is asked.

    Args:
        settings: see `QuestionPool`.
        seed: with the uid of a draw, determines whether it is asked.
    """

    def __init__(self, settings: QuestionPool, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self._rates: dict[int, float] = {}  # u by row; 1 for the others
        self._drawn = self._asked = 0  # since the last `taken`

    def probability(self, row: int) -> float:
        """p of a row, in [least, 1]."""
        return max(self.settings.least, self._rates.get(row, 1.0))

    def weight(self, row: int, uid: int) -> float | None:
        """The weight 1 / p of a draw of a row, >= 1; None: it is not asked. Counts the draw."""
        probability = self.probability(row)
        asked = mix(QUESTION_DRAW, self.seed, uid) < probability * 2**64
        self._drawn += 1
        self._asked += asked
        return 1 / probability if asked else None

    def judged(self, row: int, useful: bool) -> None:
        """Record whether a group of a row was useful."""
        forget = self.settings.forget
        rate = (1 - forget) * self._rates.get(row, 1.0) + forget * useful
        self._rates[row] = rate
        if rate == 1:
            del self._rates[row]

    def taken(self) -> dict[str, float]:
        """Return metrics since the last call: `pool/asked_fraction`, of the draws, 1 without any; and
        `pool/rows_below_one`, the rows that are asked with a probability below 1."""
        fraction = self._asked / self._drawn if self._drawn else 1.0
        self._drawn = self._asked = 0
        return {"pool/asked_fraction": fraction, "pool/rows_below_one": len(self._rates)}

    def state(self) -> dict[str, Any]:
        """Return JSON values that `load` restores to the bit."""
        return {
            "rows": list(self._rates),
            "rates": list(self._rates.values()),
            "drawn": self._drawn,
            "asked": self._asked,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`; empty: that of a run which had no pool so far."""
        self._rates = dict(zip(state.get("rows", ()), state.get("rates", ()), strict=True))
        self._drawn, self._asked = state.get("drawn", 0), state.get("asked", 0)
