"""The settings in a dump: what its user believes the trainer computes, named as in a recipe."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from proxima.config.resolution import resolve
from proxima.config.tree import Source, node_of
from proxima.core.advantage.group import Grpo
from proxima.core.aggregate import TokenMean
from proxima.core.reward_kl import RewardKl
from proxima.core.surrogate.clip import PpoClip
from proxima.data import require
from proxima.data.kinds import Slot

Centre = Literal["old", "rollout", "current"]


@dataclass(frozen=True)
class ShadowSettings:
    """What the trainer is believed to compute; `ours` is the number of exactly this.

    Args:
        peer: name and version of the trainer, for the report.
        surrogate, aggregate, advantage, penalty, correction: as in a recipe's `algorithm`. Omitted: `ppo_clip`, the
            mean over the tokens of the batch, `grpo` divided by the group's deviation, no penalty, no correction.
        reward_kl: the KL in the reward, as in a recipe's `algorithm`. Omitted: none.
        centre: whose log-probs are the denominator of the ratio: `old`, recomputed before the update, `rollout`, the
            engine's, or `current`, the policy's own without gradient. Omitted: the first of them that the dump has.
        entropy_coefficient: of an entropy bonus, reward units a nat.
        max_length: the longest answer allowed, tokens; 0: unknown. The constant of Dr. GRPO.
        tokens, sequences: the counts by which the trainer divides, where it counts more than the dump has, such as
            TRL's `num_items_in_batch`; 0: unknown.
        ranks: data-parallel ranks, where the dump is of one of them.
        metrics: reported numbers by name, such as `clip_fraction`; a prefix before the last `/` does not matter.

    Raises:
        FieldError: a count is negative.
    """

    peer: str = ""
    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES")] = PpoClip()  # noqa: RUF009 — frozen
    aggregate: Annotated[Any, Slot("proxima.core:AGGREGATES")] = TokenMean()  # noqa: RUF009
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES")] = Grpo("group")  # noqa: RUF009
    penalty: Annotated[Any, Slot("proxima.core:PENALTIES")] = None
    correction: Annotated[Any, Slot("proxima.core.correction:CORRECTIONS")] = None
    reward_kl: RewardKl | None = None
    centre: Centre | None = None
    entropy_coefficient: float = 0.0
    max_length: int = 0
    tokens: int = 0
    sequences: int = 0
    ranks: int = 1
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_length", "tokens", "sequences"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be >= 0")
        require(self.ranks >= 1, "ranks", self.ranks, "must be >= 1")


def resolved_settings(values: dict[str, Any], file: str) -> ShadowSettings:
    """The settings from the JSON of a dump.

    Raises:
        ConfigError: a field does not exist, or has a value that is refused; names it, and the file.
    """
    return resolve({}, layer=node_of(values, Source(file)), root=ShadowSettings, import_code=False).config
