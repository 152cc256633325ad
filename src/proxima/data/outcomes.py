"""One row a completion: what advantages and selections look at."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import torch
from torch import Tensor

from proxima.data.check import check_fields
from proxima.data.flow import Group


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What is known of S completions before any token is looked at.

    Args:
        reward: [S] float32 or float64, in reward units; anything (NaN) where `valid` is False.
        valid: [S] bool; False where a scorer failed.
        group: [S] int, the same number for completions of the same prompt; any order, any numbers.
        length: [S] int, response tokens.
        truncated: [S] bool, ended by the length limit.
        parts: [S, R] float, the rewards that `reward` was summed from, one column each, unweighted; for advantages that normalise each.
        baseline: [S] float, the reward of the prompt's greedy completion; for `remax`.
    """

    reward: Annotated[Tensor, "float S"]
    valid: Annotated[Tensor, "bool S"]
    group: Annotated[Tensor, "int S"]
    length: Annotated[Tensor, "int S"]
    truncated: Annotated[Tensor, "bool S"]
    parts: Annotated[Tensor | None, "float S R"] = None
    baseline: Annotated[Tensor | None, "float S"] = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __len__(self) -> int:
        return len(self.reward)

    def take(self, rows: Tensor) -> "Outcomes":
        """The completions `rows` [S'] int64, in that order."""
        return replace(self, **{f.name: value[rows] for f in fields(self) if (value := getattr(self, f.name)) is not None})

    @classmethod
    def of(cls, reward: Tensor, group: Tensor, valid: Tensor | None = None) -> "Outcomes":
        """The short form: everything valid, nothing truncated, length 1, unless said otherwise."""
        ones = torch.ones_like(group, dtype=torch.long)
        return cls(
            reward=reward,
            group=group,
            valid=ones.bool() if valid is None else valid,
            length=ones,
            truncated=torch.zeros_like(ones, dtype=torch.bool),
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> "Outcomes":
        """Rows in the order of the groups and of their completions; `group` is the position in `groups`.

        `parts` has a column for each reward, in the order of the recipe; NaN where a scorer failed. What a reward says beside its value
        (`name/detail`) is no reward.
        """
        rows = [(i, c, s) for i, g in enumerate(groups) for c, s in zip(g.completions, g.scores, strict=True)]
        names = [name for name in max((s.parts for _, _, s in rows), key=len, default={}) if "/" not in name]
        parts = torch.tensor([[s.parts.get(name, float("nan")) for name in names] for _, _, s in rows], dtype=torch.float64)
        return cls(
            reward=torch.tensor([s.value for _, _, s in rows], dtype=torch.float64),
            valid=torch.tensor([s.valid for _, _, s in rows], dtype=torch.bool),
            group=torch.tensor([i for i, _, _ in rows], dtype=torch.long),
            length=torch.tensor([len(c.tokens) for _, c, _ in rows], dtype=torch.long),
            truncated=torch.tensor([c.truncated for _, c, _ in rows], dtype=torch.bool),
            parts=parts if names else None,
        )
