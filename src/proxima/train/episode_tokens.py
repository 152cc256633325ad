"""The tokens of episodes as a token advantage reads them: a sequence per episode, its turns, and their rewards."""

from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxima.core.advantage import TokenRewards
from proxima.data import Completion, PackedBatch


class TrainedTurn(NamedTuple):
    """A turn of the model in a path: its number, its reward from the environment, the places of its tokens in the path,
    and a key for the state that it saw."""

    number: int
    reward: float
    places: NDArray[np.intp]
    state: Hashable


def turns_of(path: Completion) -> Iterator[TrainedTurn]:
    """The trained turns of a path; a completion without an episode is one turn.

    The state before a turn is `Span.state`, or else the path's tokens between the model's previous message and the
    turn: the last observation, which is empty before the first turn.

    Raises:
        ValueError: the spans do not add up to the tokens of the path.
    """
    count = len(path.tokens)
    sampled = np.ones(count, np.bool_) if path.sampled is None else path.sampled
    if path.episode is None:
        yield TrainedTurn(0, 0.0, sampled.nonzero()[0], b"")
        return
    start = seen = 0  # start of the span; start of what follows the model's last message
    for span in path.episode.spans:
        end = start + span.tokens
        if span.sampled:
            state = path.tokens[seen:start].tobytes() if span.state is None else span.state
            yield TrainedTurn(span.turn, span.reward, start + sampled[start:end].nonzero()[0], state)
        if span.role == "assistant":
            seen = end
        start = end
    if start != count:
        place = f"prompt {path.prompt_uid}, sample {path.sample}, turn {path.turn}"
        raise ValueError(f"{place}: its spans have {start} tokens, its path {count}")


@dataclass(frozen=True, eq=False)
class EpisodeTokens:
    """The packed paths of S episodes, those of an episode one after the other. The sampled tokens of its paths are the
    time steps of an episode: each is sampled in exactly one path, and the paths are in chronological order.

    Args:
        batch: the paths.
        episodes: the completions to which they belong.
        turn_weight: the weight of the rewards of turns in the score.
    """

    batch: PackedBatch
    episodes: Sequence[Completion]
    turn_weight: float = 0.0

    @cached_property
    def ends(self) -> list[int]:
        """[S+1] the index of the first path of each episode, and the number of all paths."""
        return [0, *accumulate(len(episode.paths) for episode in self.episodes)]

    @property
    def group(self) -> list[int]:
        """[S] the number of the group of each episode."""
        numbers: dict[int, int] = {}
        return [numbers.setdefault(episode.prompt_uid, len(numbers)) for episode in self.episodes]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S+1] the edges of the episodes on the axis of the tokens."""
        return self.batch.cu_seqlens[self.ends]

    @cached_property
    def turns(self) -> list[tuple[int, TrainedTurn]]:
        """The turns of all paths, each with the number of its episode; their `places` are on the axis of the tokens."""
        edges, path = self.batch.cu_seqlens.tolist(), 0
        out: list[tuple[int, TrainedTurn]] = []
        for i, episode in enumerate(self.episodes):
            for each in episode.paths:
                out += [(i, turn._replace(places=edges[path] + turn.places)) for turn in turns_of(each)]
                path += 1
        return out

    @cached_property
    def paid_by_turn(self) -> Tensor | None:
        """[N] float64, reward units, paid before the end: a turn's weighted reward at its last token, and minus their
        sum at the episode's last loss token, because the score already contains it. So the rewards of an episode's
        tokens add up to its score. A turn without a token is paid at the end. None: no turn has a reward."""
        last = {(i, turn.number): turn for i, turn in self.turns if len(turn.places)}
        if not any(self.turn_weight * turn.reward for turn in last.values()):
            return None
        paid = torch.zeros(len(self.batch.loss_mask), dtype=torch.float64)
        end = {i: turn.places[-1] for (i, _), turn in last.items()}
        for (i, _), turn in last.items():
            paid[turn.places[-1]] += self.turn_weight * turn.reward
            paid[end[i]] -= self.turn_weight * turn.reward
        return paid

    def rewards(self, reward: Tensor, needs: Set[str], bootstrap: Sequence[float] | None = None) -> TokenRewards:
        """The input of a token advantage that has these `needs`.

        Args:
            reward: [N] reward units.
            needs: of the advantage.
            bootstrap: of each path; an episode has that of its last path.
        """
        batch, ends = self.batch, self.ends
        more: dict[str, Any] = {name: getattr(batch, name) for name in needs - {"turn", "state"}}
        more |= {name: column for name, column in self._turn_columns().items() if name in needs}
        if bootstrap is not None:
            more["bootstrap"] = torch.tensor([bootstrap[end - 1] for end in ends[1:]], dtype=reward.dtype)
        facts = {"reward": reward, "loss_mask": batch.loss_mask, "cu_seqlens": self.cu_seqlens}
        return TokenRewards(**facts | more | {"group": torch.tensor(self.group)})

    def _turn_columns(self) -> dict[str, Tensor]:
        """`turn` and `state`, [N] int64."""
        group = self.group
        numbers: dict[Hashable, int] = {}
        columns = {name: torch.full((len(self.batch.loss_mask),), -1) for name in ("turn", "state")}
        for i, turn in self.turns:
            columns["turn"][turn.places] = turn.number
            columns["state"][turn.places] = numbers.setdefault((group[i], turn.state), len(numbers))
        return columns
