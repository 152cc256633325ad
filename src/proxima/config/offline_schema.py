"""The configs of the commands that train on a fixed data set: what they share, and the section that each has of its
own.

To add one: its section's class and a subclass of `OfflineConfig` here, and a line in `families.FAMILIES`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from proxima.config.schema import STALL, CheckpointConfig, ModelConfig, OptimizationConfig, RowsConfig
from proxima.config.slots import (
    Slot,
    require_at_least,
    require_evaluations,
    require_plain_folder,
    require_stall_seconds,
)
from proxima.data import PreferencePair, Trajectory, require
from proxima.data.columns import LARGEST
from proxima.evaluate.plateau import Plateau
from proxima.task.chat_rows import ChatReader
from proxima.task.column_mapping import template_fields
from proxima.task.preference_rows import PairColumns, PreferenceReader
from proxima.task.protocol import Row


@dataclass(frozen=True, kw_only=True)
class OfflineDataConfig(RowsConfig):
    over_length: Annotated[
        Literal["skip", "truncate", "refuse"], "a row of more tokens than model.max_length; truncate cuts its end"
    ] = "skip"
    unusable: Annotated[Literal["skip", "refuse"], "a row that can't be trained on, as one without a completion"] = (
        "skip"
    )


@dataclass(frozen=True, kw_only=True)
class OfflineTrainConfig(OptimizationConfig):
    steps: Annotated[int, "steps of the run; 0: as many as the epochs need"] = 0
    epochs: Annotated[int | None, "passes over the rows, in place of steps; null: 1 unless steps is set"] = None
    examples_per_step: Annotated[int, "rows a step, which is one optimizer update"] = 16
    optimizer: Annotated[
        Any,
        Slot("proxima.train:OPTIMIZERS", default="adamw"),
        "optimizer; lr is 2e-5 in sft, 1e-5 in reward and 1e-6 in dpo where it is not set",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "steps", remedy="0 trains whole epochs")
        require_at_least(self, 1, "examples_per_step")
        require(self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "must be >= 1")
        bound = f"must be null beside steps={self.steps}; they say the same thing, set one"
        require(self.epochs is None or self.steps == 0, "epochs", self.epochs, bound)

    def steps_of(self, rows: int) -> int:
        """The steps of a run on so many rows. Without `steps`, the last one of each epoch has the rest of its rows."""
        return self.steps or (self.epochs or 1) * math.ceil(rows / self.examples_per_step)

    @property
    def updates(self) -> int | None:
        return self.steps or None


@dataclass(frozen=True, kw_only=True)
class OfflineEvalConfig:
    task: Annotated[Any, Slot("proxima.task:TASKS"), "held-out rows"] = None
    limit: Annotated[int, "rows at most; 0: all"] = 200
    every: Annotated[int, "steps between evaluations; 0: only before and after"] = 0
    before: Annotated[bool, "evaluate before the first step"] = True
    after: Annotated[bool, "evaluate after the last step"] = True
    stop_after: Annotated[Plateau | None, "end the run on a plateau of a held-out figure; null: never"] = None

    def __post_init__(self) -> None:
        require_at_least(self, 0, "limit", "every")
        require_evaluations(self)

    @property
    def all_sets(self) -> dict[str, "OfflineEvalConfig"]:
        """The held-out set by its dotted path; empty without a task."""
        return {} if self.task is None else {"eval": self}


@dataclass(frozen=True, kw_only=True)
class SampledEvalConfig(OfflineEvalConfig):
    """Of a method whose model generates."""

    samples: Annotated[int, "held-out prompts completed greedily at each evaluation, for inspection; 0: none"] = 3
    sample_tokens: Annotated[int, "tokens of such a completion at most"] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "samples", remedy="0 generates none")
        require_at_least(self, 1, "sample_tokens")


@dataclass(frozen=True, kw_only=True)
class OfflineRuntimeConfig:
    stall_seconds: Annotated[float, STALL] = 600.0
    threads: Annotated[int, "torch threads; 0: all cores"] = 0

    def __post_init__(self) -> None:
        require_stall_seconds(self)
        require_at_least(self, 0, "threads", remedy="0 uses all cores")


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What a run on a fixed data set has, whatever its method.

    command: the command of `proxima` that trains it; own: the section that only its recipes have; learning_rate: of
        its optimizer where a recipe says nothing.
    """

    command: ClassVar[str]
    own: ClassVar[str]
    learning_rate: ClassVar[float]

    model: Annotated[ModelConfig, "the model that is trained"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "training rows"]
    seed: Annotated[int, "seeds data order and initialisation"] = 1
    folder: Annotated[str | None, "run folder; null: runs/<recipe>-<time>"] = None
    data: Annotated[OfflineDataConfig, "how rows become examples"] = field(default_factory=OfflineDataConfig)
    train: Annotated[OfflineTrainConfig, "batch, optimizer, schedule"] = field(default_factory=OfflineTrainConfig)
    eval: Annotated[OfflineEvalConfig, "held-out evaluation"] = field(default_factory=OfflineEvalConfig)
    checkpoint: Annotated[CheckpointConfig, "what is kept"] = field(default_factory=CheckpointConfig)
    runtime: Annotated[OfflineRuntimeConfig, "the machine"] = field(default_factory=OfflineRuntimeConfig)
    monitor: Annotated[Any, Slot("proxima.view.trackers:TRACKERS", many=True), "trackers that also log the run"] = ()

    def __post_init__(self) -> None:
        require_plain_folder(self.folder)

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        """What is trained of a row, whose lengths `explain` reckons with; raises as `OfflineMethod.item`. Nothing: the
        lengths are not known before the run."""
        return ()


@dataclass(frozen=True, kw_only=True)
class SftSection:
    """What is trained of a row, and from which of its columns it is made."""

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
            bound, remedy = "names no column: every row would have this text", "put one in braces, as {solution}"
            require(named, "completion", self.completion, bound, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class SftConfig(OfflineConfig):
    """A run of supervised fine-tuning."""

    command: ClassVar[str] = "sft"
    own: ClassVar[str] = "sft"
    learning_rate: ClassVar[float] = 2e-5  # as TRL

    sft: Annotated[SftSection, "what the loss is about"] = field(default_factory=SftSection)
    eval: Annotated[SampledEvalConfig, "held-out evaluation"] = field(default_factory=SampledEvalConfig)

    def reader(self, tokenizer: Any, context: int) -> ChatReader:
        """What makes examples of rows."""
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
        return (self.reader(tokenizer, context).example(number, row),)


@dataclass(frozen=True, kw_only=True)
class PairConfig(OfflineConfig):
    """What a run on compared completions has, whatever its method."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cut = self.data.over_length == "truncate"
        require(not cut, "data.over_length", "truncate", "would change which side is better; set skip or refuse")

    def reader(self, tokenizer: Any, context: int) -> PreferenceReader:
        """What makes pairs of rows."""
        system, arguments = self.data.system, self.data.template_arguments
        return PreferenceReader(tokenizer=tokenizer, context=context, system=system, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """Which columns hold the pairs, and the loss between the scores of the two sides."""

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
        require(not double, "margin", self.margin, f"must be 0 beside margin_column={self.margin_column}")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(PairConfig):
    """A run that trains a reward model on pairs."""

    command: ClassVar[str] = "reward"
    own: ClassVar[str] = "reward_model"
    learning_rate: ClassVar[float] = 1e-5  # TRL's 1e-4 suits an adapter; InstructGPT trains whole models with 9e-6

    reward_model: Annotated[RewardModelSection, "pairs and loss"] = field(default_factory=RewardModelSection)

    def pair(self, number: int, row: Row, tokenizer: Any, context: int) -> PreferencePair:
        """The pair of a row; raises as `PreferenceReader.pair`."""
        section = self.reward_model
        columns = PairColumns(chosen=section.chosen, rejected=section.rejected, margin=section.margin_column)
        return self.reader(tokenizer, context).pair(number, row, columns)

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        pair = self.pair(number, row, tokenizer, context)
        return pair.chosen, pair.rejected
