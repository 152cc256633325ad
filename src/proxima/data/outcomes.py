"""One entry per completion, or per player of an episode with roles: the input of advantages and selections."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, count
from typing import Annotated, Any

import torch
from torch import Tensor

from proxima.data.field_checks import check_fields
from proxima.data.flow import Group, Score
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
        taken: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                taken[each.name] = value[rows]
        return replace(self, **taken)

    def metric(self, name: str) -> Tensor:
        """[S] float64: `reward` (or `score`), `accuracy` (or `acc`), `length`, `truncated`, or a part by its name; NaN
        where unknown.

        An unknown name gives NaN everywhere, because a failed scorer leaves its part out. A recipe's names are checked
        against its rewards before the run.
        """
        values: dict[str, Tensor | None] = {}
        if self.parts is not None:
            values |= dict(zip(self.part_names, self.parts.unbind(1), strict=False))
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
        truncated = torch.zeros_like(ones, dtype=torch.bool)
        if valid is None:
            valid = ones.bool()
        return cls(reward=reward, group=group, valid=valid, length=ones, truncated=truncated)

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
        rows: list[Contribution] = []
        numbers: list[int] = []
        baselines: list[float | None] = []
        number_of_role = defaultdict[Hashable, int](count(len(groups)).__next__)
        for position, group in enumerate(groups):
            for each in contributions_of([group]):
                rows.append(each)
                number = number_of_role[each.group] if each.role else position
                numbers.append(number)
                baselines.append(group.baseline)
        scores = [each.score for each in rows]
        names = list(rewards) or _part_names(scores)
        floats = partial(torch.tensor, dtype=torch.float64)

        parts = None
        if names and rows:
            parts = floats([[score.parts.get(name, math.nan) for name in names] for score in scores])
        baseline = None
        if rows and None not in baselines:
            baseline = floats(baselines)
        role = None
        roles = list(dict.fromkeys(each.role for each in rows))
        if any(roles):
            role = torch.tensor([roles.index(each.role) for each in rows])
        stopped = None
        if any(score.stopped for score in scores):
            stopped = torch.tensor([score.stopped for score in scores])
        return cls(
            reward=floats([score.value for score in scores]),
            valid=torch.tensor([score.valid for score in scores], dtype=torch.bool),
            group=torch.tensor(numbers, dtype=torch.long),
            length=torch.tensor([each.generated for each in rows], dtype=torch.long),
            truncated=torch.tensor([each.truncated for each in rows], dtype=torch.bool),
            parts=parts,
            part_names=tuple(names),
            baseline=baseline,
            identity=torch.tensor([_identity(each) for each in rows], dtype=torch.long),
            role=role,
            stopped=stopped,
            correct=floats([_correct(score) for score in scores]),
        )


def _part_names(scores: Iterable[Score]) -> list[str]:
    """The names of the rewards that occur in the scores; those of the fullest come first, because they are most likely
    in the recipe's order."""
    fullest = sorted((score.parts for score in scores), key=len, reverse=True)
    return [name for name in dict.fromkeys(chain.from_iterable(fullest)) if "/" not in name]


def _correct(score: Score) -> float:
    """1 or 0; NaN where no reward decides, or the score is not valid."""
    if not score.valid or score.correct is None:
        return math.nan
    return float(score.correct)


def _identity(contribution: Contribution) -> int:
    """A number for the completion; its players get different ones."""
    completion = contribution.completion
    first_turn = 0
    if contribution.role and contribution.paths:
        first_turn = contribution.paths[0].turn
    return (completion.prompt_uid << 20) + completion.sample ^ (first_turn % 2048 << 52)
