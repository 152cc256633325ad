"""Which unfinished completions of a group `prune` would drop, whatever they are worth: generation can stop them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, lgamma
from typing import Literal

from proxima.core.selection.dropping import Prune

Centre = Literal["mean", "baseline"]
MARGIN = 1e-9  # of the rewards' range: distances that differ by less may be ordered by their rounding


@dataclass(frozen=True)
class StopRule:
    """Decides from the rewards that a group already has which of its unfinished completions are not worth finishing.

    `prune` keeps the k completions with the largest |r - c|, ties by sample; c is the mean of the group's rewards, or
    the reward of the greedy completion.

        mean, exact       all unfinished ones stop once the same k finished completions are kept for every reward that
                          the unfinished ones may get
        baseline, exact   one stops once k finished completions precede it whatever it gets
        chance > 0        one stops once the probability that it is among the k is at most `chance`: each unfinished
                          completion gets the highest reward with the group's own rate, the lowest otherwise
                          (Beta-binomial, uniform prior)

    Exactness. Let R be unfinished and n the group's size. For fixed rewards of the others, |r_j - c| grows at least as
    fast as any |r_i - c| when r_j moves away from c, so the unfinished j is best placed at `low` or at `high`. Given
    r_j, "i precedes j" is a half-line in c, so it holds everywhere if it holds for the extreme c: all others at `high`
    where r_j = low, all at `low` where r_j = high. Between two finished ones it is a half-line too, and is checked at
    both ends of c. Distances that differ by less than the rounding of an advantage do not count.

    Args:
        prune: the selection; `keep: largest`, `scope: group`.
        centre: c of the advantage, see `GroupAdvantage.centre`.
        low, high: the range of a completion's reward; see `in_range`.
        chance: in [0, 1); 0 is exact.

    Edge cases: a stopped completion counts in the group's size, so k is that of the whole group. Exact holds if no
        unfinished completion would have lost its score, and up to the order of completions whose rewards or |A| differ
        by rounding alone: `rloo` with `normalise` rounds by the whole batch, so that a tie in a group of which nothing
        is stopped may fall otherwise. By the mean, a group whose finished ones are all equal is never stopped if
        `chance` is 0, since any other reward is farther from the mean. By a baseline, or with a chance, it can be: such
        a group then counts as uniform, whatever those that were stopped would have got.
    Differs: CPPO (arXiv 2503.22342) prunes finished completions only.
    """

    prune: Prune
    centre: Centre
    low: float
    high: float
    chance: float = 0.0

    def in_range(self, reward: float) -> float | None:
        """The reward, and an end of the range for one that is beyond it by no more than rounding, as a sum of weighted
        rewards is; None: it is outside."""
        rounding = MARGIN * (self.high - self.low)
        if not self.low - rounding <= reward <= self.high + rounding:
            return None
        return min(max(reward, self.low), self.high)

    def stopped(self, rewards: Mapping[int, float], running: Sequence[int], baseline: float | None = None) -> set[int]:
        """Return the samples of `running` that can be stopped.

        Args:
            rewards: sample -> reward of those that have ended and have a valid score.
            running: samples of the others, including those that are stopped already.
            baseline: the greedy completion's reward; None: not known yet.
        """
        size = len(rewards) + len(running)
        kept = self.prune.kept(size)
        if not running or kept >= size or len(rewards) < kept:
            return set()
        if self.centre == "baseline":
            if baseline is None:
                return set()
            return {j for j in running if self._chance_by_baseline(j, rewards, kept, baseline) <= self.chance}
        if self.chance > 0:
            chances = self._chances_by_mean(rewards, running, kept)
            return {j for j, chance in chances.items() if chance <= self.chance}
        if self._is_decided(rewards, running, kept):
            return set(running)
        return set()

    # ---- the mean of the group ---------------------------------------------------------------------------------------

    def _is_decided(self, rewards: Mapping[int, float], running: Sequence[int], kept: int) -> bool:
        """True if the kept completions are the same for all rewards of `running`."""
        size = len(rewards) + len(running)
        total = sum(rewards.values())
        lowest = (total + self.low * len(running)) / size
        highest = (total + self.high * len(running)) / size
        order = sorted(rewards, key=lambda i: (-abs(rewards[i] - lowest), i))
        chosen = order[:kept]
        for i in chosen:
            for other in order[kept:]:
                for mean in (lowest, highest):
                    if not self._precedes(i, rewards[i], other, rewards[other], mean):
                        return False
        others = len(running) - 1
        low_mean = (total + self.low + self.high * others) / size
        high_mean = (total + self.high + self.low * others) / size
        for i in chosen:
            for j in running:
                if not self._precedes(i, rewards[i], j, self.low, low_mean):
                    return False
                if not self._precedes(i, rewards[i], j, self.high, high_mean):
                    return False
        return True

    def _chances_by_mean(self, rewards: Mapping[int, float], running: Sequence[int], kept: int) -> dict[int, float]:
        """For each running sample, the probability that fewer than `kept` finished ones precede it."""
        size = len(rewards) + len(running)
        total = sum(rewards.values())
        chances = dict.fromkeys(running, 0.0)
        for high, probability in enumerate(self._highs(rewards, len(running))):
            mean = (total + self.high * high + self.low * (len(running) - high)) / size
            share = high / len(running)
            for j in running:
                for reward, weight in ((self.high, share), (self.low, 1 - share)):
                    if self._before(j, reward, rewards, mean) < kept:
                        chances[j] += probability * weight
        return chances

    # ---- the greedy completion's reward ------------------------------------------------------------------------------

    def _chance_by_baseline(self, j: int, rewards: Mapping[int, float], kept: int, baseline: float) -> float:
        """The probability that fewer than `kept` finished ones precede j: 0 only if that is impossible, since either
        reward has a probability above 0."""
        rate = self._rate(rewards)
        chance = 0.0
        for probability, reward in ((rate, self.high), (1 - rate, self.low)):
            if self._before(j, reward, rewards, baseline) < kept:
                chance += probability
        return chance

    # ---- both --------------------------------------------------------------------------------------------------------

    def _before(self, j: int, reward: float, rewards: Mapping[int, float], centre: float) -> int:
        """Count the finished completions that precede j, if it gets this reward."""
        return sum(self._precedes(i, own, j, reward, centre) for i, own in rewards.items())

    def _precedes(self, i: int, reward: float, j: int, other: float, centre: float) -> bool:
        """True if i is kept before j, whatever the rounding of their advantages."""
        if reward == other:
            return i < j
        return abs(reward - centre) > abs(other - centre) + MARGIN * (self.high - self.low)

    def _rate(self, rewards: Mapping[int, float]) -> float:
        """The mean of the Beta law of the rate of high rewards, after the finished ones."""
        return (self._successes(rewards) + 1) / (len(rewards) + 2)

    def _successes(self, rewards: Mapping[int, float]) -> float:
        """The finished rewards in units of the range; one in between counts as a part of a high one."""
        width = self.high - self.low
        return sum((reward - self.low) / width for reward in rewards.values())

    def _highs(self, rewards: Mapping[int, float], running: int) -> list[float]:
        """The probability of each number of high rewards, 0 to `running`, among the unfinished ones."""
        successes = self._successes(rewards)
        a = successes + 1
        b = len(rewards) - successes + 1
        return [comb(running, t) * exp(_log_beta(a + t, b + running - t) - _log_beta(a, b)) for t in range(running + 1)]


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def stops_in_time(
    rule: StopRule,
    lengths: Mapping[int, int],
    rewards: Mapping[int, float | None],
    size: int,
    greedy: int | None = None,
) -> dict[int, int]:
    """Replay a group in the time of its tokens: completions of the same length end together, then the rule is asked.

    What is stopped is so a function of lengths and rewards, not of the speed of engine and rewards: a run that is
    repeated or resumed stops the same ones.

    Args:
        lengths: sample -> tokens of those that have ended and whose score is final; the others are taken to be longer.
        rewards: sample -> reward, None without a valid score; those of `lengths`.
        size: samples of the group, without the greedy one.
        greedy: the sample number of the greedy completion; None: there is none.
    Returns: sample -> the length at which it is stopped; an entry of `lengths` that is longer counts as unfinished.
    """
    stopped: dict[int, int] = {}
    ended: dict[int, float | None] = {}
    baseline: float | None = None
    for length in sorted(set(lengths.values())):
        # in the order of the samples, not of their arrival, which would round their sum otherwise
        now = [sample for sample in sorted(lengths) if lengths[sample] == length and sample not in stopped]
        for sample in now:
            if sample == greedy:
                baseline = rewards[sample]
            else:
                ended[sample] = rewards[sample]
        scored = {sample: reward for sample, reward in ended.items() if reward is not None}
        unfinished = [sample for sample in range(size) if sample not in ended]
        for sample in rule.stopped(scored, unfinished, baseline):
            stopped.setdefault(sample, length)
    return stopped
