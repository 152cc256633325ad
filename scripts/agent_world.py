"""Worlds whose turns an agent plays in several conversations, small enough to enumerate: see docs/bias.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from enumerable_world import STOP, EnumerableWorld
from torch import Tensor

from proxima.data.episode import Episode, Span
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.outcomes import Outcomes
from proxima.data.players import contributions_of, mean_of_roles
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
        scores = [self.score(i) for i in chosen.tolist()]
        group = Group(prompt=PROMPT, completions=tuple(episodes), scores=tuple(scores))

        def values(items: Sequence[Trajectory], needs: Any) -> list[Trajectory]:
            return [replace(item, value=self._values_of(item, turns[item.sample])) for item in items]

        builder = BatchBuilder(advantage=advantage, selection=(), fill=values)  # type: ignore[arg-type]
        of_turn: dict[tuple[int, int], float] = {}
        paths = [path for episode in episodes for path in episode.paths]
        for path, item in zip(paths, builder.step_batch([group], 1).completions, strict=True):
            if path.episode:
                sampled = [span.turn for span in path.episode.turns]
            else:
                sampled = []
            of_turn |= {(item.sample, turn): a for turn, a in zip(sampled, item.advantage[item.loss_mask], strict=True)}
        places = [(sample, turn) for sample, tokens in enumerate(turns) for turn in range(len(tokens))]
        return torch.tensor([float(of_turn[place]) for place in places], dtype=torch.float64)

    def _values_of(self, item: Trajectory, turns: tuple[int, ...]) -> np.ndarray:
        """[T] the critic's value before each sampled token of a path."""
        out = np.full(len(item.tokens), 1e30, np.float32)
        first = item.turn
        for k, place in enumerate(np.flatnonzero(item.loss_mask)):
            out[place] = self.critic[self.row_after(turns[: first + 2 * k])]  # another's turn is between two of a path
        return out

    def row_after(self, turns: tuple[int, ...]) -> int:
        """The row of the policy that acts after `turns`."""
        return self.prefixes[turns]

    def score(self, index: int) -> Score:
        """The score of the episode with this index."""
        return Score(value=float(self.reward[index]))

    def episode(self, turns: tuple[int, ...], sample: int = 0) -> Completion:
        """The episode in which the policy says `turns`."""
        if self.agent == "rewrites":
            paths = [self._path(turns, [k], sample) for k in range(len(turns))]
        else:
            main = [k for k in range(len(turns)) if k != 1]
            paths = [self._path(turns, main, sample), *([self._path(turns, [1], sample)] if len(turns) > 1 else [])]
        *earlier, last = sorted(paths, key=lambda path: path.episode.turns[-1].turn if path.episode else 0)
        return replace(last, earlier=tuple(earlier))

    def _path(self, turns: tuple[int, ...], sampled: Sequence[int], sample: int, player: str = "") -> Completion:
        """A conversation with these turns; an observation of what another said is before all but the first."""
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
            episode=Episode(spans=tuple(spans), player=player),
        )


@dataclass(frozen=True)
class RoleWorld(AgentWorld):
    """Each token is a turn of one of several roles, which share the policy's parameters and have their own rewards.

        J_p(θ_1, θ_2, …) = Σ_y π(y) R_p(y), player p acting by θ_p        g* = Σ_p ∂J_p / ∂θ_p at θ_1 = θ_2 = … = θ

    If all rewards are equal, g* is ∇J of the shared parameters. Otherwise it is the gradient of no function: each
    player ascends its own return, the others being what they are. In a game of sum zero ∇ Σ_p J_p would be 0.

    Args:
        game: `talk`: turns 0 and 2 are of `a`, turn 1 of `b`; each sees the last turn alone, and token 0 ends the
            episode, so the policy chooses how often each acts. `zero_sum`: `talk` with rewards that add up to 0.
            `common`: `talk` with one reward. `proposals`: turn 0 is of the `proposer`, turns 1 and 2 are two attempts
            of the `solver`, which see only the proposal; token 0 is a proposal that cannot be attempted.
        absent: a role has a reward where it did not act.
        pooled: one baseline for the players of all roles, for comparison.
    """

    game: Literal["talk", "zero_sum", "common", "proposals"] = "talk"
    absent: bool = True
    pooled: bool = False

    def token_advantage(self, advantage: Callable[[Any], Tensor], chosen: Tensor, own: PolicyBatch) -> Tensor:
        if not self.pooled:
            return super().token_advantage(advantage, chosen, own)
        turns = [self.completions[i] for i in chosen.tolist()]
        episodes = tuple(self.episode(tokens, sample) for sample, tokens in enumerate(turns))
        group = Group(prompt=PROMPT, completions=episodes, scores=tuple(map(self.score, chosen.tolist())))
        outcomes = Outcomes.from_groups([group])
        values = advantage(replace(outcomes, group=torch.zeros_like(outcomes.group))).tolist()
        pairs = zip(contributions_of([group]), values, strict=True)
        of_turn = {path.key[1:]: value for each, value in pairs for path in each.paths}
        first = {player: self.players.index(player) for player in self.players}
        places = [(sample, first[self.players[t]]) for sample, tokens in enumerate(turns) for t in range(len(tokens))]
        return torch.tensor([of_turn[place] for place in places], dtype=torch.float64)

    @cached_property
    def completions(self) -> list[tuple[int, ...]]:
        if self.game != "proposals":
            words, rest = range(1, self.vocabulary), range(self.vocabulary)
            longer = [(a, b, c) for a in words for b in words for c in rest]
            return [(STOP,), *((a, STOP) for a in words), *longer]
        each = range(self.vocabulary)
        return [(STOP,), *((p, x, y) for p in each if p != STOP for x in each for y in each)]

    @cached_property
    def prefixes(self) -> dict[tuple[int, ...], int]:
        """What a player sees, with the row of the policy that acts then: rows are of several turns and roles."""
        return {seen: i for i, seen in enumerate([(), *((token,) for token in range(1, self.vocabulary))])}

    @cached_property
    def row(self) -> Tensor:
        return torch.tensor([self.row_after(y[:t]) for y in self.completions for t in range(len(y))])

    def row_after(self, turns: tuple[int, ...]) -> int:
        return self.prefixes[turns[:1] if self.game == "proposals" else turns[-1:]]

    @property
    def players(self) -> list[str]:
        """The player of each turn."""
        if self.game == "proposals":
            return ["proposer", "solver/0", "solver/1"]
        return ["a", "b", "a"]

    @cached_property
    def rewards(self) -> dict[str, Tensor]:
        """[S] float64 of each player, multiples of 1/64; of an attempt, by the proposal and its answer alone."""
        first, second = (self._table(stream) for stream in (0, -2))
        if self.game != "proposals":
            return {"a": first, "b": {"talk": second, "zero_sum": -first, "common": first}[self.game]}
        index = [(y * 3)[0] * self.vocabulary + torch.tensor((y * 3)[1:3]) for y in self.completions]
        solved = torch.stack([second[: self.vocabulary**2].abs()[i] for i in index])
        spoilt = torch.tensor([len(y) == 1 for y in self.completions])
        proposer = torch.where(spoilt, -1.0, (solved[:, 0] - solved[:, 1]).abs())
        return {"proposer": proposer, "solver/0": solved[:, 0], "solver/1": solved[:, 1]}

    def _table(self, stream: int) -> Tensor:
        """[S] or more, float64 in [-1, 1]."""
        size = max(len(self.completions), self.vocabulary**2)
        values = 2 * torch.rand(size, generator=self._generator(stream), dtype=torch.float64) - 1
        values = (64 * values).round() / 64
        if self.game == "proposals":
            return values
        return values[: len(self.completions)]

    def gradient(self, policy: Tensor) -> Tensor:
        """g*, [P, V]."""
        leaves = {player: policy.detach().requires_grad_() for player in self.rewards}
        own = {player: self.log_prob(leaf) for player, leaf in leaves.items()}
        acting = [self.players[t] for y in self.completions for t in range(len(y))]
        log_prob = torch.stack([own[player][n] for n, player in enumerate(acting)])
        likelihood = self.probability(log_prob)
        pairs = [((likelihood * reward).sum(), leaves[player]) for player, reward in self.rewards.items()]
        return sum(torch.autograd.grad(value, leaf, retain_graph=True)[0] for value, leaf in pairs)

    def shared_gradient(self, policy: Tensor, player: str) -> Tensor:
        """∇J_p of the shared parameters, [P, V]: as if all roles acted for this one."""
        leaf = policy.detach().requires_grad_()
        return torch.autograd.grad((self.probability(self.log_prob(leaf)) * self.rewards[player]).sum(), leaf)[0]

    def score(self, index: int) -> Score:
        acted = self.players[: len(self.completions[index])]
        own = {player: float(reward[index]) for player, reward in self.rewards.items()}
        own = {player: reward for player, reward in own.items() if player in acted or self._is_kept(player)}
        return Score(value=mean_of_roles(own), players={name: Score(value=reward) for name, reward in own.items()})

    def _is_kept(self, player: str) -> bool:
        """An attempt that was not made has no reward; a role that did not act has one, if `absent`."""
        return self.absent and "/" not in player

    def episode(self, turns: tuple[int, ...], sample: int = 0) -> Completion:
        acting = self.players[: len(turns)]
        of_player = {player: [k for k, acts in enumerate(acting) if acts == player] for player in acting}
        paths = [self._path(turns, sampled, sample, player) for player, sampled in of_player.items()]
        *earlier, last = sorted(paths, key=lambda path: path.episode.turns[-1].turn if path.episode else 0)
        return replace(last, earlier=tuple(earlier))
