"""The `sft` section, and the config of its recipes: supervised fine-tuning."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from proxima.config.sections.offline import OfflineConfig, SampledEvalConfig
from proxima.data import require
from proxima.data.trajectory import Trajectory
from proxima.task.example_rows import ChatReader
from proxima.task.protocol import Row
from proxima.task.template import template_fields


@dataclass(frozen=True, kw_only=True)
class SftSection:
    """The part of a row that is trained on, and the columns that it comes from."""

    loss_on: Annotated[
        Literal["completion", "all_turns"],
        "completion: the last turn, the assistant's; all_turns: every turn of the assistant",
    ] = "completion"
    completion: Annotated[
        str | None, "template of the completion over the row's columns, as {solution}; null: the answer"
    ] = None

    def __post_init__(self) -> None:
        if self.completion is not None:
            named = bool(template_fields(self.completion, "completion"))
            bound = "names no column: every row would have this text"
            remedy = "put one in braces, as {solution}"
            require(named, "completion", self.completion, bound, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class SftConfig(OfflineConfig):
    """A run of supervised fine-tuning."""

    sft: Annotated[SftSection, "what the loss is about"] = field(default_factory=SftSection)
    eval: Annotated[SampledEvalConfig, "held-out evaluation"] = field(default_factory=SampledEvalConfig)

    def reader(self, tokenizer: Any, context: int) -> ChatReader:
        """The reader that turns rows into examples."""
        return ChatReader(
            tokenizer=tokenizer,
            context=context,
            loss_on=self.sft.loss_on,
            completion=self.sft.completion,
            truncate=self.data.over_length == "truncate",
            system=self.data.system,
            arguments=self.data.template_arguments,
        )

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        return self.reader(tokenizer, context).paths(number, row)
