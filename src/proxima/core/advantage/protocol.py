"""The protocol of advantages: what must be computed first, and whether the result is per completion or per token."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from proxima.core.spec import Spec
from proxima.data import NoFieldError
from proxima.data.field_checks import check_fields
from proxima.data.outcomes import Outcomes

ADVANTAGE_NEEDS: dict[str, str] = {
    "baseline": "generating and scoring the greedy completion of each prompt supplies it",
    "group": "the data supplies it",
    "turn": "the data supplies it",
    "state": "the data supplies it",
    "value": "a forward pass of the critic supplies it",
    "score_variance": "a forward pass of the policy supplies it, with the sum of squared probabilities on request",
}


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """The input of a token advantage, on the packed axis of a `PolicyBatch`. A sequence is a completion, or a whole
    episode: the paths that it was forked into, one after the other.

    Args:
        reward: [N] float, reward units; the score of the completion is on its last loss token, see `place_scores`,
            except for the rewards of turns, each on the last token of its turn. Values outside the loss are ignored.
        loss_mask: [N] bool; other tokens (observations) are skipped and do not count as time steps.
        cu_seqlens: [S+1] int.
        value: [N] float, the critic's estimate before the token; for `gae`.
        bootstrap: [S] float, the critic's estimate after the last token of a truncated completion; 0, or omitted, for
            one that ended by itself.
        group: [S] int, the same number for the completions of a prompt.
        score_variance: [N] float, 1 − 2 π_t + Σ_v π_v², the squared norm of the softmax score; for
            `optimal_token_baseline`.
        turn: [N] int, the number of the model's turn to which the token belongs, from 0 and ascending in a sequence; 0
            if there is one turn. Any value outside the loss, as for `state`.
        state: [N] int, the same number for turns of a group that began in the same state, see `Span.state`.
        idle: [S] float, the score of a player that did not act and so has no token; NaN for the others. It counts in
            the baseline of the player's role. None: all have acted.
    """

    reward: Annotated[Tensor, "float N"]
    loss_mask: Annotated[Tensor, "bool N"]
    cu_seqlens: Annotated[Tensor, "int S+1"]
    value: Annotated[Tensor | None, "float N"] = None
    bootstrap: Annotated[Tensor | None, "float S"] = None
    group: Annotated[Tensor | None, "int S"] = None
    score_variance: Annotated[Tensor | None, "float N"] = None
    turn: Annotated[Tensor | None, "int N"] = None
    state: Annotated[Tensor | None, "int N"] = None
    idle: Annotated[Tensor | None, "float S"] = None

    def __post_init__(self) -> None:
        check_fields(self)

    def take(self, sequences: Tensor) -> tuple["TokenRewards", Tensor]:
        """Select the sequences where [S] bool is True. Also returns [N] bool, their tokens."""
        lengths = self.cu_seqlens.diff()
        tokens = sequences.repeat_interleave(lengths)
        of_sequences = ("bootstrap", "group", "idle")
        taken: dict[str, Any] = {"cu_seqlens": pad(lengths[sequences].cumsum(0), (1, 0))}
        for each in fields(self):
            column = getattr(self, each.name)
            if column is not None and each.name != "cu_seqlens":
                chosen = sequences if each.name in of_sequences else tokens
                taken[each.name] = column[chosen]
        return TokenRewards(**taken), tokens


class Advantage(Spec, Protocol):
    """Subclass `GroupAdvantage` or `TokenAdvantage`.

    needs: what must be computed before the call, names of `ADVANTAGE_NEEDS`: fields of `Outcomes` or `TokenRewards`.
    per_token: it takes `TokenRewards` and returns [N]; otherwise it takes `Outcomes` and returns [S].
    """

    per_token: ClassVar[bool]


class GroupAdvantage(Advantage, Protocol):
    """Returns [S] advantages, 0 where `valid` is False.

    centre: "mean" or "baseline" if |A| orders the completions of a group as their distance from the group's mean
        reward, or from the greedy completion's reward; "" otherwise. `prune` with `stop` needs it.
    """

    per_token: ClassVar[bool] = False
    centre: ClassVar[str] = ""

    def __call__(self, outcomes: Outcomes) -> Tensor: ...


class TokenAdvantage(Advantage, Protocol):
    """Returns [N] advantages, 0 outside the loss.

    One that needs `value` also has `returns(rewards)`, [N], the critic's targets.
    """

    per_token: ClassVar[bool] = True

    def __call__(self, rewards: TokenRewards) -> Tensor: ...


def per_role(advantage: Advantage, given: Outcomes | TokenRewards, role: Tensor | None) -> Tensor:
    """The advantages of each role by itself: a baseline or a standard deviation is never over two roles.

    Args:
        role: [S] int, the role of each entry or sequence; None: there are no roles.
    """
    compute = cast(Callable[[Outcomes | TokenRewards], Tensor], advantage)  # each takes one of the two
    if role is None:
        return compute(given)
    out = torch.zeros_like(given.reward)
    for number in role.unique():
        of_role = role == number
        if isinstance(given, Outcomes):
            out[of_role] = compute(given.take(of_role.nonzero().flatten()))
        else:
            own, tokens = given.take(of_role)
            out[tokens] = compute(own)
    return out


def required(spec: Advantage, name: str, value: Tensor | None) -> Tensor:
    """Return `value`; raise NoFieldError naming what would supply it if it is None."""
    if value is None:
        raise NoFieldError(f"{type(spec).__name__} needs `{name}`: {ADVANTAGE_NEEDS[name]}.")
    return value


def needs_baseline(advantage: Advantage) -> bool:
    """True if the advantage reads the reward of each prompt's greedy completion."""
    return "baseline" in advantage.needs
