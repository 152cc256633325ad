"""Worlds whose turns an agent plays in several conversations, small enough to enumerate: see docs/bias.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from enumerable_world import EnumerableWorld
from torch import Tensor

from proxima.data.episode import Episode, Span
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.policy_batch import PolicyBatch
from proxima.data.trajectory import Trajectory
from proxima.training.batch_builder import BatchBuilder

PROMPT = Prompt(uid=0, messages=(), tokens=(1, 2))
OBSERVATION, OPENING = 100, 200  # added to the tokens of the policy that they show


@dataclass(frozen=True)
class AgentWorld(EnumerableWorld):
    """Each token is a turn of an agent; at most three turns, whose score comes at the end. The advantages are those of
    `BatchBuilder`, for the paths that `AgentEpisodes` makes.

    Args:
        agent: `rewrites`: before each turn, the agent writes its memory anew, so that each is a conversation of its
            own; `helper`: turn 1 is that of a helper, whose answer the main conversation sees before turn 2.
    """

    horizon: int = 3
    agent: Literal["rewrites", "helper"] = "rewrites"

    @cached_property
    def reward(self) -> Tensor:
        """[S] float64, multiples of 1/64: differences of them are exact in float32, as trajectories hold them."""
        return (64 * super().reward).round() / 64

    @cached_property
    def critic(self) -> Tensor:
        """[P] float64, what an untrained critic says of each prefix; multiples of 1/64 too."""
        return (64 * torch.rand(len(self.prefixes), generator=self._generator(-1), dtype=torch.float64)).round() / 64

    def token_advantage(self, advantage: Callable[[Any], Tensor], chosen: Tensor, own: PolicyBatch) -> Tensor:
        turns = [self.completions[i] for i in chosen.tolist()]
        episodes = [self.episode(tokens, sample) for sample, tokens in enumerate(turns)]
        scores = [Score(value=float(self.reward[i])) for i in chosen.tolist()]
        group = Group(prompt=PROMPT, completions=tuple(episodes), scores=tuple(scores))

        def values(items: Sequence[Trajectory], needs: Any) -> list[Trajectory]:
            return [replace(item, value=self._values_of(item, turns[item.sample])) for item in items]

        builder = BatchBuilder(advantage=advantage, selection=(), fill=values)  # type: ignore[arg-type]
        of_turn: dict[tuple[int, int], float] = {}
        paths = [path for episode in episodes for path in episode.paths]
        for path, item in zip(paths, builder.step_batch([group], 1).completions, strict=True):
            sampled = [span.turn for span in path.episode.turns] if path.episode else []
            of_turn |= {(item.sample, turn): a for turn, a in zip(sampled, item.advantage[item.loss_mask], strict=True)}
        places = [(sample, turn) for sample, tokens in enumerate(turns) for turn in range(len(tokens))]
        return torch.tensor([float(of_turn[place]) for place in places], dtype=torch.float64)

    def _values_of(self, item: Trajectory, turns: tuple[int, ...]) -> np.ndarray:
        """[T] the critic's value before each sampled token of a path."""
        out = np.full(len(item.tokens), 1e30, np.float32)
        first = item.turn
        for k, place in enumerate(np.flatnonzero(item.loss_mask)):
            out[place] = self.critic[self.prefixes[turns[: first + 2 * k]]]  # a helper's turn is between two of a path
        return out

    def episode(self, turns: tuple[int, ...], sample: int = 0) -> Completion:
        """The episode in which the policy says `turns`."""
        if self.agent == "rewrites":
            paths = [self._path(turns, [k], sample) for k in range(len(turns))]
        else:
            main = [k for k in range(len(turns)) if k != 1]
            paths = [self._path(turns, main, sample), *([self._path(turns, [1], sample)] if len(turns) > 1 else [])]
        *earlier, last = sorted(paths, key=lambda path: path.episode.turns[-1].turn if path.episode else 0)
        return replace(last, earlier=tuple(earlier))

    def _path(self, turns: tuple[int, ...], sampled: Sequence[int], sample: int) -> Completion:
        """A conversation with these turns; an observation of what a helper said is before all but the first."""
        tokens, spans = [turns[sampled[0]]], [Span(role="assistant", tokens=1, sampled=True, turn=sampled[0])]
        for before, turn in pairwise(sampled):
            tokens += [OBSERVATION + turns[turn - 1], turns[turn]]
            spans += [
                Span(role="user", tokens=1, turn=before),
                Span(role="assistant", tokens=1, sampled=True, turn=turn),
            ]
        shown = tuple(OPENING + token for token in turns[: sampled[0]])
        path = Completion.of_text(PROMPT.uid, sample, "", tokens)
        return replace(
            path,
            turn=sampled[0],
            sampled=np.array([span.sampled for span in spans]),
            initial_prompt=replace(PROMPT, tokens=shown) if shown else None,
            episode=Episode(spans=tuple(spans)),
        )
