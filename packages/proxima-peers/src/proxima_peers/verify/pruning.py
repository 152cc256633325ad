"""Completion pruning (CPPO, lzhxmu): the advantages, and the completions that are kept."""

from collections.abc import Iterator
from typing import Literal

import torch

from proxima.core.advantage.group import Grpo
from proxima.core.metrics import Spread
from proxima.core.selection.dropping import Prune
from proxima.data.outcomes import Outcomes
from proxima.laws.by_hand import as_tensor
from proxima_peers.verify.record import Attempt, Check, Record

KEPT: dict[str, Literal["largest", "smallest"]] = {"smallest": "largest", "largest": "smallest"}  # by what is removed
COUNTED: dict[str, Literal["keep", "drop"]] = {"kept_indices": "drop", "kept_indices_verl_recipe": "keep"}


def pruning_advantages(record: Record) -> Iterator[Attempt]:
    """The advantage block: (r − mean) / (std + 1e-4) over the group (C1)."""
    p = record.params
    weights = torch.tensor(p["reward_weights"], dtype=torch.float64)
    reward = (as_tensor(record.inputs["rewards_per_func"]) * weights).sum(1)
    group = torch.arange(len(reward)) // p["num_generations"]
    rows = reward.view(-1, p["num_generations"])
    every = torch.ones(p["num_generations"], dtype=torch.bool)
    spreads = [Spread.over(row, every, "sample_std") for row in rows]
    numbers = {
        "advantages": Grpo("group", 1e-4)(Outcomes.of(reward, group)),
        "mean": torch.stack([spread.mean for spread in spreads]).repeat_interleave(p["num_generations"]),
        "std": as_tensor([spread.value for spread in spreads]).repeat_interleave(p["num_generations"]),
    }
    yield None, [record.expect(name, ours) for name, ours in numbers.items() if name in record.expected]


def pruned_selection(record: Record) -> Iterator[Attempt]:
    """The pruning block of the trainer (which counts dropped completions) and of the verl recipe (which counts kept
    ones), over the batch (C2)."""
    p = record.params
    values = as_tensor(record.inputs["advantages"])
    o = Outcomes.of(values, torch.zeros(len(values), dtype=torch.long))
    keep = KEPT[p["metric"]]
    theirs = record.expected
    checks = []
    for name, count in COUNTED.items():
        if name in theirs:
            kept = Prune(p["pruning"], keep, "batch", count)(o, values).nonzero().flatten()
            checks.append(Check(name, kept, theirs[name] if count == "drop" else sorted(theirs[name])))  # no order
            if name == "kept_indices" and "kept_advantages" in theirs:
                checks.append(Check("kept_advantages", values[kept], theirs["kept_advantages"]))
    yield None, checks
