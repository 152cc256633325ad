"""The `reward_model` section, and the config of its recipes: a reward model from pairs of completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from proxima.config.resolved import Findings
from proxima.config.sections.model_section import ModelConfig, has_score
from proxima.config.sections.offline_section import PairConfig
from proxima.data import require
from proxima.data.columns import LARGEST
from proxima.data.trajectory import PreferencePair, Trajectory
from proxima.task.example_rows import PairColumns
from proxima.task.protocol import Row


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """The columns that hold the pairs, and the loss between the scores of the two sides."""

    chosen: Annotated[str, "column of the better completion: text, or a list of {role, content}"] = "chosen"
    rejected: Annotated[str, "column of the worse completion"] = "rejected"
    margin: Annotated[float, "by how much the chosen side should lead, reward units, where the data doesn't say"] = 0.0
    margin_column: Annotated[str | None, "column with each pair's own margin, a number; null: none"] = None
    center: Annotated[float, "coefficient of (sum of both scores)², which keeps scores near 0; 0: off"] = 0.0
    head_std: Annotated[float, "standard deviation of a new head's weights; 0: zeros"] = 0.02

    def __post_init__(self) -> None:
        require(abs(self.margin) <= LARGEST, "margin", self.margin, "must be finite in float32")
        require(0 <= self.center < math.inf, "center", self.center, "must be >= 0 and finite")
        require(0 <= self.head_std < math.inf, "head_std", self.head_std, "must be >= 0 and finite")
        double = self.margin_column is not None and self.margin != 0
        require(not double, "margin", self.margin, f"must be 0 if margin_column is set (here {self.margin_column})")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(PairConfig):
    """A run that trains a reward model on pairs."""

    reward_model: Annotated[RewardModelSection, "pairs and loss"] = field(default_factory=RewardModelSection)

    def pair(self, number: int, row: Row, tokenizer: Any, context: int) -> PreferencePair:
        """The pair of a row; raises as `PreferenceReader.pair`."""
        section = self.reward_model
        columns = PairColumns(chosen=section.chosen, rejected=section.rejected, margin=section.margin_column)
        return self.reader(tokenizer, context).pair(number, row, columns)

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        pair = self.pair(number, row, tokenizer, context)
        return pair.chosen, pair.rejected


def reward_head_is_new(model: ModelConfig, reward_model: Any) -> Findings:
    """Refuse `head_std` for a reward model that is trained further and keeps its head."""
    if reward_model.head_std != type(reward_model).head_std and has_score(model.path):
        message = f"is for a new head, and {model.path} has one, which is trained further; leave it out"
        yield "reward_model.head_std", message
