"""The `preference` section, and the config of its recipes: learning from preferences in a fixed data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.config.sections.offline_section import PairConfig
from proxima.core.preference.kto import Kto
from proxima.data import require
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
            value, off = getattr(self, name), getattr(PreferenceSection, name)
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
        section, reader = self.preference, self.reader(tokenizer, context)
        if section.kto is not None:
            return reader.labeled(number, row, LabelColumns(completion=section.completion, label=section.label))
        return reader.pair(number, row, PairColumns(chosen=section.chosen, rejected=section.rejected))

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        item = self.item(number, row, tokenizer, context)
        return (item.chosen, item.rejected) if isinstance(item, PreferencePair) else (item.completion,)
