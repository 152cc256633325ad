"""The `preference` section, and the config of its recipes: learning from preferences in a fixed data set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from proxima.config.resolved import Findings
from proxima.config.sections.model import ModelConfig, has_score
from proxima.config.sections.offline import PairConfig
from proxima.core.preference.kto import Kto
from proxima.data import require
from proxima.data.columns import LARGEST
from proxima.data.kinds import Slot
from proxima.data.trajectory import LabeledCompletion, PreferencePair, Trajectory
from proxima.task.example_rows import LabelColumns, PairColumns
from proxima.task.protocol import Row
from proxima.training.objectives.preference_objective import PreferenceObjective

_LOSSES = Slot("proxima.core.preference:PREFERENCE_LOSSES", many=True)


@dataclass(frozen=True, kw_only=True)
class PreferenceSection:
    """The loss, the reference, and the columns with the completions."""

    loss: Annotated[Any, _LOSSES, "of the two completions of a pair; several are added up; kto: of single completions"]
    weights: Annotated[tuple[float, ...], "of the losses, if there are several; none: all 1"] = ()
    reduce: Annotated[Literal["sum", "mean"], "log-prob of a completion: summed over its tokens, or their mean"] = "sum"
    ld_alpha: Annotated[float, "weight of the tokens beyond the shorter completion of a pair, in [0, 1]; 1: off"] = 1.0
    on_policy_weights: Annotated[bool, "weight pairs by how likely the policy would generate them (WPO)"] = False
    reference: Annotated[Literal["start", "none"], "start: the model that the run starts from; none: no reference"] = (
        "start"
    )
    cache: Annotated[str | None, "folder for the reference's log-probs, which later runs reuse; null: no cache"] = (
        "runs/.reference_log_probs"
    )
    chosen: Annotated[str, "column of the better completion: text, or a list of {role, content}"] = "chosen"
    rejected: Annotated[str, "column of the worse completion"] = "rejected"
    completion: Annotated[str, "column of the completion, for kto"] = "completion"
    label: Annotated[str, "column that says whether it is good, for kto: true, false, 1 or 0"] = "label"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights))
        idle: tuple[str, ...] = ("completion", "label")
        why = "without kto: only its rows have this column"
        if self.kto is None:
            require(len(self.loss) > 0, "loss", self.loss, "must name a loss")
            self.pair_objective()
        else:
            idle = ("weights", "reduce", "ld_alpha", "on_policy_weights", "chosen", "rejected")
            why = "with kto, which ignores it"
        for name in idle:
            value = getattr(self, name)
            off = getattr(PreferenceSection, name)
            require(value == off, name, value, f"must be {off} {why}")

    @property
    def kto(self) -> Kto | None:
        """The loss of single completions; None if the losses are of pairs."""
        kto = next((loss for loss in self.loss if isinstance(loss, Kto)), None)
        kinds = [type(loss).__name__ for loss in self.loss]
        require(kto is None or len(kinds) == 1, "loss", kinds, "must be kto alone: it trains on single completions")
        return kto

    def pair_objective(self) -> PreferenceObjective:
        """The objective that is minimised over pairs; FieldError for settings that contradict one another."""
        return PreferenceObjective(
            terms=self.loss,
            weights=self.weights,
            reduce=self.reduce,
            ld_alpha=self.ld_alpha,
            on_policy_weights=self.on_policy_weights,
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(PairConfig):
    """A run of DPO or one of its relatives."""

    preference: Annotated[PreferenceSection, "loss, reference and columns"]

    def item(self, number: int, row: Row, tokenizer: Any, context: int) -> PreferencePair | LabeledCompletion:
        """Read the item of a row; raises as `PreferenceReader`."""
        section = self.preference
        reader = self.reader(tokenizer, context)
        if section.kto is not None:
            return reader.labeled(number, row, LabelColumns(completion=section.completion, label=section.label))
        return reader.pair(number, row, PairColumns(chosen=section.chosen, rejected=section.rejected))

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        return self.item(number, row, tokenizer, context).sides


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
        return self.pair(number, row, tokenizer, context).sides


def reward_head_is_new(model: ModelConfig, reward_model: Any) -> Findings:
    """Refuse `head_std` for a reward model that is trained further and keeps its head."""
    if reward_model.head_std != type(reward_model).head_std and has_score(model.path):
        message = f"is for a new head, and {model.path} has one, which is trained further; leave it out"
        yield "reward_model.head_std", message
