"""One entry per completion, or per player of an episode with roles: the input of advantages and selections."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, count
from typing import Annotated, Any

import torch
from torch import Tensor

from proxima.data.field_checks import check_fields
from proxima.data.flow import Group
from proxima.data.players import Contribution, contributions_of

METRICS = ("reward", "accuracy", "length", "truncated")  # in addition to the parts
METRIC_ALIASES = {"score": "reward", "acc": "accuracy"}


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What is known about S completions besides their tokens.

    Args:
        reward: [S] float32 or float64, in reward units; any value, such as NaN, where `valid` is False.
        valid: [S] bool; False where a scorer failed.
        group: [S] int, the same number for completions of the same prompt; any order, any numbers.
        length: [S] int, the number of tokens that the model wrote; for an episode, over all turns and paths, without
            observations.
        loss_tokens: [S] int, how many of them are in the loss; omitted: all. Advantages that count tokens weight a
            completion by it.
        truncated: [S] bool, ended by the length limit.
        parts: [S, R] float, the rewards that `reward` was summed from, one column each, unweighted; for advantages that
            normalise each one.
        part_names: names of the columns of `parts`.
        correct: [S] float, 1 or 0, NaN where no reward says whether the answer is right.
        baseline: [S] float, the reward of the prompt's greedy completion; for `remax`.
        identity: [S] int, unique per completion of a run: the key of random choices among completions.
        stopped: [S] bool, generation was stopped since `prune` keeps others, see `StopRule`; such a completion is not
            valid, but counts in its group's size when that is pruned. None: none was.
        role: [S] int, the same number for players of the same role; None: no episode has roles. With roles, an entry is
            a player, see `data.players`, and a group contains the players that are compared with each other.

    Raises: ValueError naming the field, its shape or dtype, and what was expected.
    """

    reward: Annotated[Tensor, "float S"]
    valid: Annotated[Tensor, "bool S"]
    group: Annotated[Tensor, "int S"]
    length: Annotated[Tensor, "int S"]
    truncated: Annotated[Tensor, "bool S"]
    loss_tokens: Annotated[Tensor | None, "int S"] = None
    parts: Annotated[Tensor | None, "float S R"] = None
    part_names: tuple[str, ...] = ()
    correct: Annotated[Tensor | None, "float S"] = None
    baseline: Annotated[Tensor | None, "float S"] = None
    identity: Annotated[Tensor | None, "int S"] = None
    stopped: Annotated[Tensor | None, "bool S"] = None
    role: Annotated[Tensor | None, "int S"] = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __len__(self) -> int:
        return len(self.reward)

    def take(self, rows: Tensor) -> "Outcomes":
        """The completions `rows` [S'] int64, in that order."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        taken: dict[str, Any] = {name: value[rows] for name, value in values if isinstance(value, Tensor)}
        return replace(self, **taken)

    def metric(self, name: str) -> Tensor:
        """[S] float64: `reward` (or `score`), `accuracy` (or `acc`), `length`, `truncated`, or a part by its name; NaN
        where unknown.

        An unknown name gives NaN everywhere, because a failed scorer leaves its part out. A recipe's names are checked
        against its rewards before the run.
        """
        parts = [] if self.parts is None else self.parts.unbind(1)
        values: dict[str, Tensor | None] = dict(zip(self.part_names, parts, strict=False))
        values |= dict(zip(METRICS, (self.reward, self.correct, self.length, self.truncated), strict=True))
        value = values.get(METRIC_ALIASES.get(name, name))
        if value is None:
            return torch.full_like(self.reward, float("nan"), dtype=torch.float64)
        return value.double()

    @classmethod
    def of(cls, reward: Tensor, group: Tensor, valid: Tensor | None = None) -> "Outcomes":
        """Outcomes with these rewards [S] and groups [S]: all valid unless `valid` is given, none truncated, length
        1."""
        ones = torch.ones_like(group, dtype=torch.long)
        return cls(
            reward=reward,
            group=group,
            valid=ones.bool() if valid is None else valid,
            length=ones,
            truncated=torch.zeros_like(ones, dtype=torch.bool),
        )

    @classmethod
    def from_groups(cls, groups: Sequence[Group], rewards: Sequence[str] = ()) -> "Outcomes":
        """The outcomes of the groups' completions, in order; `group` is the position in `groups`, or for players of a
        role a number from `len(groups)` on.

        Args:
            groups: the scored groups.
            rewards: the names of the recipe's rewards, in its order; empty: all names that occur in a score.

        `parts` has a column for each reward, NaN where its scorer failed or it does not apply to the row. Details of a
        reward (`name/detail`) get no column.
        """
        rows = [(i, g, c, c.score) for i, g in enumerate(groups) for c in contributions_of([g])]
        roles = list(dict.fromkeys(c.role for _, _, c, _ in rows))
        fullest = sorted((s.parts for *_, s in rows), key=len, reverse=True)  # most likely in the recipe's order
        names = list(rewards) or [name for name in dict.fromkeys(chain.from_iterable(fullest)) if "/" not in name]
        nan = float("nan")
        floats = partial(torch.tensor, dtype=torch.float64)
        baseline = [g.baseline for _, g, _, _ in rows]
        stopped = [s.stopped for *_, s in rows]
        others = defaultdict[Hashable, int](count(len(groups)).__next__)
        return cls(
            reward=floats([s.value for *_, s in rows]),
            valid=torch.tensor([s.valid for *_, s in rows], dtype=torch.bool),
            group=torch.tensor([others[c.group] if c.role else i for i, _, c, _ in rows], dtype=torch.long),
            length=torch.tensor([c.generated for _, _, c, _ in rows], dtype=torch.long),
            truncated=torch.tensor([c.truncated for _, _, c, _ in rows], dtype=torch.bool),
            parts=floats([s.parts.get(name, nan) for *_, s in rows for name in names]).view(len(rows), -1)
            if names and rows
            else None,
            part_names=tuple(names),
            baseline=floats(baseline) if baseline and None not in baseline else None,
            identity=torch.tensor([_identity(c) for _, _, c, _ in rows], dtype=torch.long),
            stopped=torch.tensor(stopped) if any(stopped) else None,
            role=torch.tensor([roles.index(c.role) for _, _, c, _ in rows]) if any(roles) else None,
            correct=floats([s.correct if s.valid and s.correct is not None else nan for *_, s in rows]),
        )


def _identity(contribution: Contribution) -> int:
    """A number for the completion; its players get different ones."""
    completion = contribution.completion
    if contribution.role and contribution.paths:
        first = contribution.paths[0].turn
    else:
        first = 0
    return (completion.prompt_uid << 20) + completion.sample ^ (first % 2048 << 52)
