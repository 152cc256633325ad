"""Fields common to all runs on a fixed data set. A method's section and the config of its command are in separate
modules: `sft`, `reward_model`, `preference`. To add one: see `families`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from proxima.config.problems import require_at_least, require_plain_folder
from proxima.config.sections.data import RowsConfig
from proxima.config.sections.eval import CheckpointConfig, require_evaluations
from proxima.config.sections.model import ModelConfig
from proxima.config.sections.placement import Placement
from proxima.config.sections.runtime import STALL, Folder, Monitor, View, require_stall_seconds
from proxima.config.sections.train import OptimizationConfig
from proxima.data import require
from proxima.data.kinds import Slot
from proxima.data.trajectory import Trajectory
from proxima.evaluation.plateau import Plateau
from proxima.task.example_rows import PreferenceReader
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
        Slot("proxima.training:OPTIMIZERS", default="adamw"),
        "optimizer; lr is 2e-5 in sft, 1e-5 in reward and 1e-6 in dpo where it is not set",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "steps", remedy="0 trains whole epochs")
        require_at_least(self, 1, "examples_per_step")
        require(self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "must be >= 1")
        bound = f"must be null if steps is set (here {self.steps}): both give the length of the run"
        require(self.epochs is None or self.steps == 0, "epochs", self.epochs, bound)

    def steps_of(self, rows: int) -> int:
        """The steps of a run on `rows` rows. Without `steps`, the last step of each epoch has the rest of its rows."""
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
    """The `eval` section of a method whose model generates."""

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
    """Fields common to all runs on a fixed data set."""

    model: Annotated[ModelConfig, "the model that is trained"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "training rows"]
    seed: Annotated[int, "seeds data order and initialisation"] = 1
    folder: Folder = None
    data: Annotated[OfflineDataConfig, "how rows become examples"] = field(default_factory=OfflineDataConfig)
    train: Annotated[OfflineTrainConfig, "batch, optimizer, schedule"] = field(default_factory=OfflineTrainConfig)
    eval: Annotated[OfflineEvalConfig, "held-out evaluation"] = field(default_factory=OfflineEvalConfig)
    checkpoint: Annotated[CheckpointConfig, "what is kept"] = field(default_factory=CheckpointConfig)
    runtime: Annotated[OfflineRuntimeConfig, "the machine"] = field(default_factory=OfflineRuntimeConfig)
    placement: Placement = None
    monitor: Monitor = ()
    view: View = False

    def __post_init__(self) -> None:
        require_plain_folder(self.folder)

    def sequences_of(self, number: int, row: Row, tokenizer: Any, context: int) -> Sequence[Trajectory]:
        """The sequences of a row that are trained on, whose lengths `explain` uses; empty if unknown before the run.
        Raises as `OfflineMethod.item`."""
        return ()


@dataclass(frozen=True, kw_only=True)
class PairConfig(OfflineConfig):
    """Fields common to all runs on compared completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cut = self.data.over_length == "truncate"
        require(not cut, "data.over_length", "truncate", "would change which side is better; set skip or refuse")

    def reader(self, tokenizer: Any, context: int) -> PreferenceReader:
        """The reader that turns rows into pairs."""
        return PreferenceReader(
            tokenizer=tokenizer, context=context, system=self.data.system, arguments=self.data.template_arguments
        )
