"""How many tokens `prune` with `stop` saves on groups with long tails, and what it changes; needs no model.

Lengths are lognormal with the plan's spread, independent within a group or twice as long where the answer is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish, parser, table
from proxima.core.advantage.group import Grpo, Remax
from proxima.core.selection.dropping import Prune
from proxima.core.selection.protocol import select
from proxima.core.selection.stopping import StopRule, stops_in_time
from proxima.data.outcomes import Outcomes

SPREAD = 0.7  # of log lengths
MEDIAN = 1000  # tokens
LONGEST = 8000
RULES = (("baseline", 0.0), ("baseline", 0.1), ("mean", 0.0), ("mean", 0.05), ("mean", 0.1), ("mean", 0.2))


@dataclass(frozen=True)
class Replayed:
    """One group.

    Args:
        saved: share of its tokens that are not generated, if the engine stops at once.
        same: the kept completions are those of waiting.
        moved: the largest difference of a kept completion's advantage from that of waiting; NaN where they differ.
    """

    saved: float
    same: bool
    moved: float


def main() -> None:
    p = parser(__doc__, repeats=400)
    p.add_argument("--group", type=int, default=16, help="completions of a group")
    p.add_argument("--rate", type=float, default=0.875, help="of prune")
    o = p.parse_args()
    rows = []
    for centre, chance in RULES:
        rule = StopRule(Prune(rate=o.rate), centre, 0.0, 1.0, chance)
        for longer_if_wrong in (1.0, 2.0):
            for right in (0.2, 0.5, 0.8):
                groups = [replay(rule, o.group, right, longer_if_wrong, seed) for seed in range(o.repeats)]
                facts = {"centre": centre, "chance": chance, "right": right, "longer_if_wrong": longer_if_wrong}
                rows.append(facts | summary(groups))
    print(
        table(["advantage", "chance", "wrong ones", "right", "saved", "same kept", "moved"], [cells(r) for r in rows])
    )
    best = max(row["saved"] for row in rows if row["chance"] == 0)
    finish({"claim": "early_stop", "group": o.group, "rate": o.rate, "rows": rows, "best": best}, o.json_out)


def replay(rule: StopRule, size: int, right: float, longer_if_wrong: float, seed: int) -> Replayed:
    """Draw a group, and stop it."""
    rng = np.random.default_rng(seed)
    rewards = (rng.random(size) < right).astype(float)
    lengths = MEDIAN * np.exp(SPREAD * rng.standard_normal(size)) * np.where(rewards > 0, 1.0, longer_if_wrong)
    tokens = np.minimum(lengths, LONGEST).astype(int)
    by_sample = dict(enumerate(tokens.tolist()))
    values: dict[int, float | None] = dict(enumerate(rewards.tolist()))
    greedy = None
    baseline = None
    if rule.centre == "baseline":
        greedy = size
        baseline = float(rng.random() < right)
        by_sample[size] = MEDIAN
        values[size] = baseline
    stopped = stops_in_time(rule, by_sample, values, size, greedy)
    whole, kept = trained(rule, rewards, [], baseline)
    part, also_kept = trained(rule, rewards, list(stopped), baseline)
    same = torch.equal(kept, also_kept)
    saved = sum(by_sample[sample] - length for sample, length in stopped.items())
    moved = float((whole - part)[kept].abs().max()) if same else float("nan")
    return Replayed(saved / sum(by_sample.values()), same, moved)


def trained(
    rule: StopRule, rewards: np.ndarray, stopped: Sequence[int], baseline: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S] advantages and [S] bool, the kept ones, where some completions are stopped."""
    mask = torch.zeros(len(rewards), dtype=torch.bool)
    mask[list(stopped)] = True
    reward = torch.from_numpy(rewards)
    outcomes = replace(Outcomes.of(reward, torch.zeros(len(rewards), dtype=torch.long), ~mask), stopped=mask)
    if baseline is None:
        advantage = Grpo()(outcomes)
    else:
        outcomes = replace(outcomes, baseline=torch.full_like(reward, baseline))
        advantage = Remax()(outcomes)
    return advantage, select([rule.prune], outcomes, advantage)[0]


def summary(groups: Sequence[Replayed]) -> dict[str, Any]:
    """Means over the groups; `moved` over those that keep the same."""
    moved = [group.moved for group in groups if group.same]
    return {
        "saved": float(np.mean([group.saved for group in groups])),
        "same": float(np.mean([group.same for group in groups])),
        "moved": float(np.mean(moved)) if moved else None,
        "most_moved": float(max(moved)) if moved else None,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    kind = {"baseline": "remax", "mean": "grpo"}[row["centre"]]
    wrong = "as long" if row["longer_if_wrong"] == 1 else "twice as long"
    figures = [f"{row['saved']:.2f}", f"{row['same']:.2f}", "–" if row["moved"] is None else f"{row['moved']:.3f}"]
    return [kind, f"{row['chance']:g}", wrong, f"{row['right']:g}", *figures]
