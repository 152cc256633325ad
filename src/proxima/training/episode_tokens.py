"""The tokens of episodes as a per-token advantage reads them, one sequence per episode, with turns and their rewards;
and the reward of each token."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxima.core.advantage.protocol import TokenRewards, per_role
from proxima.core.advantage.token import place_scores
from proxima.core.reward_kl import KL, RewardKl
from proxima.core.segment import segment_index
from proxima.core.value import value_metrics
from proxima.data.flow import Completion, prompt_name
from proxima.data.outcomes import Outcomes
from proxima.data.packed_batch import PackedBatch, pack
from proxima.data.players import Contribution
from proxima.data.trajectory import Trajectory


class TrainedTurn(NamedTuple):
    """A turn of the model in a path: its number, its reward from the environment, the indices of its tokens in the
    path, and a key for the state that the model saw."""

    number: int
    reward: float
    places: NDArray[np.intp]
    state: Hashable


def turns_of(path: Completion) -> Iterator[TrainedTurn]:
    """The trained turns of a path; a completion without an episode is one turn.

    The state before a turn is `Span.state`, or else the path's tokens between the model's previous message and the
    turn: the last observation. It is empty before an episode's first turn, whatever its agent wrote there: all episodes
    of a group begin in one state. In a path with its own initial prompt, that prompt is part of the state of other
    turns before which the model has written no message.

    Raises:
        ValueError: the spans do not add up to the tokens of the path.
    """
    count = len(path.tokens)
    sampled = path.sampled
    if sampled is None:
        sampled = np.ones(count, np.bool_)
    if path.episode is None:
        yield TrainedTurn(0, 0.0, sampled.nonzero()[0], b"")
        return
    start = 0  # of the span
    seen = 0  # start of what follows the model's last message
    for span in path.episode.spans:
        end = start + span.tokens
        if span.sampled:
            state: Hashable = span.state
            if state is None:
                state = path.tokens[seen:start].tobytes()
                if seen == 0 and span.turn > 0 and path.initial_prompt is not None:
                    state = path.initial_prompt.tokens.tobytes(), state
            yield TrainedTurn(span.turn, span.reward, start + sampled[start:end].nonzero()[0], state)
        if span.role == "assistant":
            seen = end
        start = end
    if start != count:
        place = f"{prompt_name(path.prompt_uid)}, sample {path.sample}, turn {path.turn}"
        raise ValueError(f"{place}: its spans have {start} tokens, its path {count}")


@dataclass(frozen=True, eq=False)
class EpisodeTokens:
    """The packed paths of S episodes, those of an episode one after the other. The sampled tokens of its paths, in the
    order of the turns, are the time steps of an episode; each is sampled in exactly one path. With roles, the
    contribution of one player counts as an episode.

    The conversations of an agent may overlap in time (a helper answers between two turns of the main one); no order of
    whole paths is then the order of the turns. A column therefore has two orders: that of the paths, in `batch`, and
    that of time, in which rewards, advantages and returns are computed. `in_time` and `in_paths` convert; for all other
    episodes they return the column itself.

    Args:
        batch: the paths.
        episodes: the contributions to which they belong.
        turn_weights: the weight of the turns' rewards in the score of each episode; empty: they have none.
    """

    batch: PackedBatch
    episodes: Sequence[Contribution]
    turn_weights: Sequence[float] = ()

    @cached_property
    def ends(self) -> list[int]:
        """[S+1] the index of the first path of each episode, and the number of all paths."""
        return [0, *accumulate(len(episode.paths) for episode in self.episodes)]

    @property
    def group(self) -> list[int]:
        """[S] the number of the group of each episode."""
        numbers: dict[Hashable, int] = {}
        return [numbers.setdefault(episode.group, len(numbers)) for episode in self.episodes]

    @property
    def role(self) -> Tensor | None:
        """[S] int, the number of the role of each episode; None without roles."""
        roles = list(dict.fromkeys(episode.role for episode in self.episodes))
        if any(roles):
            return torch.tensor([roles.index(episode.role) for episode in self.episodes])
        return None

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[S+1] the edges of the episodes on the axis of the tokens."""
        return self.batch.cu_seqlens[self.ends]

    @cached_property
    def turns(self) -> list[tuple[int, TrainedTurn]]:
        """The turns of all episodes, each with the number of its episode, path by path, so that an episode's last turn
        comes last. Their `places` are indices of a column in time."""
        if self._time_order is None:
            return self._turns_of_paths
        position = self._time_order.argsort().numpy()
        return [(i, turn._replace(places=position[turn.places])) for i, turn in self._turns_of_paths]

    @cached_property
    def _turns_of_paths(self) -> list[tuple[int, TrainedTurn]]:
        """The turns of all paths, each with the number of its episode; their `places` are indices of a column of
        `batch`."""
        edges = self.batch.cu_seqlens.tolist()
        path = 0
        out: list[tuple[int, TrainedTurn]] = []
        for i, episode in enumerate(self.episodes):
            for each in episode.paths:
                out += [(i, turn._replace(places=edges[path] + turn.places)) for turn in turns_of(each)]
                path += 1
        return out

    @cached_property
    def _time_order(self) -> Tensor | None:
        """[N] the index in `batch` of each token in time; None if the paths are already in that order. Tokens that the
        model did not write come first in their episode; nothing reads them."""
        numbers = [(i, turn.number) for i, turn in self._turns_of_paths if len(turn.places)]
        if numbers == sorted(numbers):
            return None
        number = torch.full((len(self.batch.loss_mask),), -1)
        for _, turn in self._turns_of_paths:
            number[turn.places] = turn.number
        episode = segment_index(self.cu_seqlens, len(number))
        return (episode * (int(number.max()) + 2) + number).argsort(stable=True)

    def in_time(self, column: Tensor) -> Tensor:
        """Convert a column [N] of `batch` to the order of time."""
        if self._time_order is None:
            return column
        return column[self._time_order]

    def in_paths(self, column: Tensor) -> Tensor:
        """Convert a column [N] in the order of time to that of `batch`."""
        if self._time_order is None:
            return column
        return torch.empty_like(column).scatter_(0, self._time_order, column)

    @property
    def loss_mask(self) -> Tensor:
        """[N] bool, in time."""
        return self.in_time(self.batch.loss_mask)

    @cached_property
    def paid_by_turn(self) -> Tensor | None:
        """[N] float64 in time, reward units: each turn's weighted reward at its last token, and minus their sum at the
        episode's last loss token, because the score already contains it. The rewards of an episode's tokens thus add up
        to its score. A turn without tokens is paid at the end. None: no turn has a reward."""
        if not self.turn_weights:
            return None
        last = {(i, turn.number): turn for i, turn in self.turns if len(turn.places)}
        rewards = {(i, number): self.turn_weights[i] * turn.reward for (i, number), turn in last.items()}
        if not any(rewards.values()):
            return None
        paid = torch.zeros(len(self.batch.loss_mask), dtype=torch.float64)
        end = {i: turn.places[-1] for (i, _), turn in last.items()}
        for (i, number), turn in last.items():
            reward = rewards[i, number]
            paid[turn.places[-1]] += reward
            paid[end[i]] -= reward
        return paid

    def rewards(self, reward: Tensor, needs: Set[str], bootstrap: Sequence[float] | None = None) -> TokenRewards:
        """The input of a per-token advantage with these `needs`, in time.

        Args:
            reward: [N] reward units, in time.
            needs: of the advantage.
            bootstrap: reward units, for each path; an episode gets that of its last path, which has its last turn.
        """
        columns = {name: self.in_time(getattr(self.batch, name)) for name in needs - {"turn", "state", "group"}}
        columns |= {name: column for name, column in self._turn_columns().items() if name in needs}
        if bootstrap is not None:
            of_last_paths = [bootstrap[end - 1] for end in self.ends[1:]]
            columns["bootstrap"] = torch.tensor(of_last_paths, dtype=reward.dtype)
        if not all(episode.paths for episode in self.episodes):
            idle = torch.full((len(self.episodes),), torch.nan, dtype=reward.dtype)
            for i, episode in enumerate(self.episodes):
                if not episode.paths:
                    idle[i] = episode.score.value
            columns["idle"] = idle
        rewards = TokenRewards(
            reward=reward, loss_mask=self.loss_mask, cu_seqlens=self.cu_seqlens, group=torch.tensor(self.group)
        )
        return replace(rewards, **columns)

    def _turn_columns(self) -> dict[str, Tensor]:
        """`turn` and `state`, [N] int64, in time."""
        group = self.group
        numbers: dict[Hashable, int] = {}
        columns = {name: torch.full((len(self.batch.loss_mask),), -1) for name in ("turn", "state")}
        for i, turn in self.turns:
            columns["turn"][turn.places] = turn.number
            columns["state"][turn.places] = numbers.setdefault((group[i], turn.state), len(numbers))
        return columns


@dataclass(frozen=True, kw_only=True)
class TokenCredit:
    """Pays the scores of completions to their tokens; the fields are as in `BatchBuilder`."""

    advantage: Any
    reward_kl: RewardKl | None
    turn_weights: Sequence[float]  # of the scored contributions
    fill: Callable[[Sequence[Trajectory], Set[str]], list[Trajectory]]

    def pay(
        self, scored: Sequence[Contribution], outcomes: Outcomes, items: Sequence[Trajectory]
    ) -> tuple[Outcomes, list[Trajectory], dict[str, float]]:
        """The outcomes with the KL in their rewards, the trajectories with per-token columns, and metrics.

        Args:
            scored: the contributions with a valid score, at least one.
            outcomes, items: of all contributions, and the trajectory of each path, both in their order.
        """
        needs: set[str] = set()
        if self.advantage.per_token:
            needs |= self.advantage.needs
        if self.reward_kl is not None:
            needs |= {"proximal_log_prob", "reference_log_prob"}
        keys = {path.key for contribution in scored for path in contribution.paths}
        filled = self.fill([item for item in items if item.key in keys], needs)
        tokens = EpisodeTokens(pack(filled), scored, self.turn_weights)
        reward, total, metrics = self._shaped(outcomes.reward[outcomes.valid], tokens)
        columns: dict[str, Tensor] = {}
        if self.reward_kl is not None:
            outcomes = replace(outcomes, reward=outcomes.reward.masked_scatter(outcomes.valid, total))
        if self.reward_kl is not None or tokens.paid_by_turn is not None:
            columns["reward"] = reward
        if self.advantage.per_token:
            of_tokens, of_values = self._token_advantage(reward, filled, tokens)
            columns |= of_tokens
            metrics |= of_values
        by_key = {item.key: item for item in _with_columns(filled, columns, tokens)}
        return outcomes, [by_key.get(item.key, item) for item in items], metrics

    def _shaped(self, score: Tensor, tokens: EpisodeTokens) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The rewards of tokens [N], in time, and of completions [S], and metrics: the score is paid at the last loss
        token, except for the rewards of turns."""
        mask = tokens.loss_mask
        edges = tokens.cu_seqlens
        metrics: dict[str, float] = {}
        if self.reward_kl is None:
            reward = place_scores(score, mask, edges)
            total = score
        else:
            policy = tokens.batch.proximal_log_prob
            if policy is None:
                policy = tokens.batch.behavior_log_prob
            reference = tokens.batch.reference_log_prob
            assert policy is not None and reference is not None
            shaped = self.reward_kl(score, tokens.in_time(policy), tokens.in_time(reference), mask, edges)
            reward = shaped.reward
            total = shaped.total
            metrics[KL] = shaped.mean_kl
            metrics["reward_kl/coefficient"] = self.reward_kl.coefficient
            metrics["reward_kl/paid"] = float(shaped.paid.mean())
        by_turn = tokens.paid_by_turn
        if by_turn is not None:
            reward = reward + by_turn
        return reward, total, metrics

    def _token_advantage(
        self, reward: Tensor, filled: Sequence[Trajectory], tokens: EpisodeTokens
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Columns [N] in time: `advantage`, and `returns` if it reads values; and metrics of the values. A completion
        without a `bootstrap` from a stage ends in a terminal state."""
        needs = self.advantage.needs
        if "value" not in needs:
            rewards = tokens.rewards(reward, needs)
            return {"advantage": per_role(self.advantage, rewards, tokens.role)}, {}

        rewards = tokens.rewards(reward, needs, [item.bootstrap for item in filled])
        returns = self.advantage.returns(rewards)
        metrics = value_metrics(rewards, returns, getattr(self.advantage, "gamma", 1.0))
        return {"advantage": per_role(self.advantage, rewards, tokens.role), "returns": returns}, metrics


def _with_columns(
    items: Sequence[Trajectory], columns: Mapping[str, Tensor], tokens: EpisodeTokens
) -> list[Trajectory]:
    """The trajectories with columns of values [N], which are in time."""
    edges = tokens.batch.cu_seqlens[1:-1].tolist()
    of_paths = {name: np.split(tokens.in_paths(values).numpy(), edges) for name, values in columns.items()}
    out: list[Trajectory] = []
    for i, item in enumerate(items):
        own: dict[str, Any] = {name: parts[i] for name, parts in of_paths.items()}
        out.append(replace(item, **own))
    return out
