"""The whole configuration as dataclasses: each field once, with its default, bounds, and meaning and unit as text.

A field marked with `Slot` holds `{kind: NAME, ...fields}` in a recipe, or NAME alone, where NAME is a key of the slot's
table or `package.module:Class`; here it holds the spec made from it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from proxima.config.algorithm_schema import AlgorithmConfig
from proxima.config.slots import (
    Presets,
    Slot,
    require_at_least,
    require_evaluations,
    require_plain_folder,
    require_stall_seconds,
)
from proxima.data import require, require_threads
from proxima.data.kinds import Kinds
from proxima.engine.protocol import Sampling
from proxima.evaluate.plateau import Plateau
from proxima.model.lora import Lora
from proxima.rollout.admission import OverAge


def _require_random_samples(config: Any) -> None:
    require_at_least(config, 1, "samples")
    same = config.samples > 1 and config.sampling is not None and config.sampling.temperature == 0
    bound = "must be 1 at temperature 0: greedy answers are all the same"
    remedy = "set the temperature of its sampling to 1, or samples to 1"
    require(not same, "samples", config.samples, bound, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[str, "Hugging Face name, folder, or .gguf file"]
    revision: Annotated[str | None, "hub revision"] = None
    dtype: Annotated[Literal["float32", "bfloat16"], "dtype of the master weights"] = "float32"
    compute_dtype: Annotated[Literal["float32", "bfloat16"], "autocast dtype of forward and backward"] = "bfloat16"
    device: Annotated[str, "auto, cpu, cuda, cuda:1"] = "auto"
    attention: Annotated[Literal["auto", "packed", "native", "mask", "padded"], "keeps packed sequences apart"] = "auto"
    share_prompt: Annotated[bool, "run a group's prompt once in training"] = True
    gradient_checkpointing: Annotated[bool, "trade compute for activation memory"] = False
    log_prob_chunk: Annotated[int, "tokens, rows of the [chunk, vocabulary] logits alive at once"] = 512
    max_length: Annotated[int | None, "tokens, prompt + completion; null: the model's own limit"] = None
    lora: Annotated[Lora | None, "train adapters in place of the weights; null: off"] = None

    def __post_init__(self) -> None:
        require(self.log_prob_chunk >= 1, "log_prob_chunk", self.log_prob_chunk, "must be >= 1")
        require(self.max_length is None or self.max_length >= 2, "max_length", self.max_length, "must be >= 2")


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """A set of held-out questions beside `eval.task`: its metrics are `NAME/accuracy` and so on."""

    name: Annotated[str, "begins the names of its metrics, and of its files in evals/"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "held-out questions"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "what scores the answers; none: the run's"] = ()
    limit: Annotated[int, "questions at most; 0: all"] = 200
    samples: Annotated[int, "completions a question; several give mean@n and pass@k"] = 1
    sampling: Annotated[Sampling | None, "null: the training sampling, and greedy where samples is 1"] = None

    def __post_init__(self) -> None:
        named = re.fullmatch(r"[A-Za-z0-9_.+-]*", self.name) is not None and self.name not in RECORD_WORDS
        bound = f"must be letters, digits and _ . + -, and none of {', '.join(RECORD_WORDS)}"
        require(named, "name", self.name, bound)
        require_at_least(self, 0, "limit")
        _require_random_samples(self)


RECORD_WORDS = ("accuracy", "length", "main", "reward", "time", "tokens")  # first words of an evaluation's own metrics
EVAL_SETS = Kinds({"set": "proxima.config.schema:EvalSetConfig"})


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    task: Annotated[Any, Slot("proxima.task:TASKS"), "held-out questions"] = None
    limit: Annotated[int, "questions at most; 0: all"] = 200
    every: Annotated[int, "steps between evaluations; 0: only before and after"] = 0
    before: Annotated[bool, "evaluate before the first step"] = True
    after: Annotated[bool, "evaluate after the last step"] = True
    samples: Annotated[int, "completions a question; several give mean@n and pass@k"] = 1
    sampling: Annotated[Sampling | None, "null: the training sampling, and greedy where samples is 1"] = None
    metric: Annotated[str | None, "what is reported and kept as best; null: accuracy, or else the mean reward"] = None
    stop_after: Annotated[Plateau | None, "end the run on a plateau of a held-out figure; null: never"] = None
    sets: Annotated[Any, Slot("proxima.config.schema:EVAL_SETS", many=True, default="set"), "further, named sets"] = ()

    def __post_init__(self) -> None:
        require_at_least(self, 0, "limit", "every")
        require_evaluations(self)
        _require_random_samples(self)
        names = [one.name for one in self.sets]
        require(len({*names, ""}) > len(names), "sets", names, "must be names, each once")
        missing, remedy = bool(names) and self.task is None, "move the first of the sets to eval.task"
        require(not missing, "task", None, "must be set beside eval.sets", remedy=remedy)

    @property
    def all_sets(self) -> dict[str, EvalSetConfig]:
        """Every set by its dotted path: `eval.task` with an empty name, then those of `sets`; empty without a task."""
        if self.task is None:
            return {}
        main = EvalSetConfig(name="", task=self.task, limit=self.limit, samples=self.samples, sampling=self.sampling)
        return {"eval": main} | {f"eval.sets.{i}": one for i, one in enumerate(self.sets)}


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """What every training has, with or without groups."""

    steps: Annotated[int, "steps of the run"] = 100
    tokens_per_micro_batch: Annotated[int, "tokens forwarded at once"] = 4096
    optimizer: Annotated[Any, Slot("proxima.train:OPTIMIZERS", default="adamw"), "optimizer"] = None
    schedule: Annotated[Literal["constant", "linear", "cosine"], "learning rate after the warm-up"] = "constant"
    warmup_steps: Annotated[int, "updates of linear warm-up; the first of w has 1 / w of the rate"] = 0
    warmup_ratio: Annotated[float, "the same as a share of the run's updates, rounded up; in place of warmup_steps"] = (
        0.0
    )
    final_lr_ratio: Annotated[float, "share of the learning rate that linear and cosine fall towards"] = 0.0
    max_grad_norm: Annotated[float, "clip the global gradient norm; 0: off"] = 1.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tokens_per_micro_batch")
        require_at_least(self, 0, "warmup_steps")
        require(0 <= self.warmup_ratio <= 1, "warmup_ratio", self.warmup_ratio, "must be a share in [0, 1]")
        bound = f"must be 0 beside warmup_steps={self.warmup_steps}; they say the same thing, set one"
        require(self.warmup_ratio == 0 or self.warmup_steps == 0, "warmup_ratio", self.warmup_ratio, bound)
        require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "must be in [0, 1]")
        falls, bound = self.schedule != "constant", "must be 0 with schedule=constant, which does not fall"
        require(falls or self.final_lr_ratio == 0, "final_lr_ratio", self.final_lr_ratio, bound)
        require_at_least(self, 0, "max_grad_norm", remedy="0 turns clipping off")

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the run; None where only the data says."""
        raise NotImplementedError

    def warmup_of(self, updates: int) -> int:
        """The updates of warm-up in a run of `updates`."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * updates - 1e-9)  # 0.07 * 100 is a little above 7


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OptimizationConfig):
    """The `train` section of a run that generates groups."""

    prompts_per_step: Annotated[int, "prompts a step; `prune` with `allocate` takes floor(G / k) times as many"] = 8
    completions_per_prompt: Annotated[int, "completions a prompt, the group size"] = 8
    updates_per_step: Annotated[int, "optimizer updates a step; must divide prompts_per_step"] = 1
    epochs_per_step: Annotated[int, "passes over the step's batch"] = 1
    target_kl: Annotated[float | None, "nats a token; an epoch too far above it is the step's last; null: off"] = None
    target_kl_factor: Annotated[float, "too far above: approx_kl of the epoch > this * target_kl"] = 1.5

    def __post_init__(self) -> None:
        counts = ("steps", "prompts_per_step", "completions_per_prompt", "updates_per_step", "epochs_per_step")
        require_at_least(self, 1, *counts)
        super().__post_init__()
        divides = self.prompts_per_step % self.updates_per_step == 0
        bound = f"must divide prompts_per_step={self.prompts_per_step}; a group is never split over two updates"
        require(divides, "updates_per_step", self.updates_per_step, bound)
        target, factor = self.target_kl, self.target_kl_factor
        usable = target is None or 0 < target < math.inf
        require(usable, "target_kl", target, "must be > 0 nats", remedy="null turns it off")
        bound = "must be null with epochs_per_step=1: it leaves out further epochs, and there are none"
        require(target is None or self.epochs_per_step > 1, "target_kl", target, bound)
        require(0 < factor < math.inf, "target_kl_factor", factor, "must be > 0 and finite")

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_per_step * self.epochs_per_step


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """What every training has that reads rows."""

    system: Annotated[str | None, "system prompt put before each row that has none"] = None
    template_arguments: Annotated[
        Mapping[str, Any], "what the chat template reads beside the messages, as {enable_thinking: false} for Qwen3"
    ] = field(default_factory=dict)
    shuffle: Annotated[bool, "shuffle each epoch by the run's seed"] = True


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    over_length: Annotated[Literal["skip", "refuse"], "a prompt that leaves no room for one new token"] = "skip"
    check_answers: Annotated[int, "rows, drawn by the seed, whose answers are read before the run; 0: all"] = 10_000
    max_unreadable: Annotated[float, "share of unreadable ones above which the run is refused; 1: never"] = 0.01

    def __post_init__(self) -> None:
        require_at_least(self, 0, "check_answers", remedy="0 reads all")
        share = self.max_unreadable
        require(0 <= share <= 1, "max_unreadable", share, "must be a share in [0, 1]", remedy="1 never refuses")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[int, "steps between checkpoints; 0: only at the end"] = 0
    keep_last: Annotated[int, "checkpoints kept; 0: all"] = 2
    keep_best: Annotated[
        bool, "also keep the best one of the held-out evaluations: by eval.metric; of sft, the lowest loss"
    ] = False

    def __post_init__(self) -> None:
        require_at_least(self, 0, "every", "keep_last")


STALL = "seconds without a token or a finished stage before a warning says what waits for whom; 0: never"


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    max_lag: Annotated[
        int, "policy versions a group may be behind at its update; 0: synchronous, no surplus groups"
    ] = 1
    max_concurrent_rollouts: Annotated[
        int | None, "prompts generated at once, asynchronously, with max_lag >= 1; null: between the updates"
    ] = None
    over_age: Annotated[
        OverAge, "groups beyond max_lag: wait for the oldest, so that none is; take what is finished and drop or train"
    ] = "wait"
    rollout_retries: Annotated[int, "how often a prompt whose engine call failed is generated again"] = 2
    reward_timeout: Annotated[float, "seconds a reward may take for one completion"] = 10.0
    reward_memory_mb: Annotated[int, "MiB that a worker of reward functions may need; 0: no limit"] = 16384
    reward_workers: Annotated[int, "worker processes for rewards that parse untrusted text"] = 1
    reward_trial: Annotated[
        Literal["refuse", "warn", "off"], "if the rewards score none of two made-up completions before the run"
    ] = "refuse"
    max_unscored_steps: Annotated[
        int,
        "steps, or generation batches of a step, in a row without one valid score after which the run ends; 0: never",
    ] = 3
    stall_seconds: Annotated[float, STALL] = 600.0
    threads: Annotated[int, "torch threads; 0: all cores"] = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "max_lag", remedy="0 is synchronous training")
        require_stall_seconds(self)
        if self.max_concurrent_rollouts is not None:
            require_at_least(self, 1, "max_concurrent_rollouts", remedy="null generates between the updates")
        require_at_least(self, 0, "rollout_retries", remedy="0 ends the run at the first failure")
        require(self.reward_timeout > 0, "reward_timeout", self.reward_timeout, "must be > 0 seconds")
        require_at_least(self, 0, "reward_memory_mb")
        require_at_least(self, 1, "reward_workers")
        require_at_least(self, 0, "max_unscored_steps", remedy="0 never ends the run")
        require_threads(self.threads, "0 uses all cores")

    @property
    def overlaps(self) -> bool:
        """Whether prompts are generated during training."""
        return self.max_concurrent_rollouts is not None and self.max_lag > 0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. `proxima explain RECIPE` prints every field with its value and where that came from."""

    model: Annotated[ModelConfig, "the policy"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "training questions"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "named scores, each with a weight"]
    algorithm: Annotated[AlgorithmConfig, Presets("proxima.config.presets:ALGORITHMS"), "a preset's name, or its slots"]
    engine: Annotated[Any, Slot("proxima.engine:ENGINES", default="local"), "who generates"]
    critic: Annotated[Any, Slot("proxima.config.critic_schema:CRITICS"), "estimates values for gae; null: none"] = None
    seed: Annotated[int, "seeds data order, sampling and initialisation"] = 1
    rollouts: Annotated[str | None, "a run folder: train on its stored rollouts; null: generate"] = None
    folder: Annotated[str | None, "run folder; null: runs/<recipe>-<time>"] = None
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    sampling: Annotated[Sampling, "how the training completions are sampled"] = field(default_factory=Sampling)
    train: Annotated[TrainConfig, "batch, optimizer, schedule"] = field(default_factory=TrainConfig)
    eval: Annotated[EvalConfig, "held-out evaluation"] = field(default_factory=EvalConfig)
    checkpoint: Annotated[CheckpointConfig, "what is kept"] = field(default_factory=CheckpointConfig)
    runtime: Annotated[RuntimeConfig, "the loop and its machine"] = field(default_factory=RuntimeConfig)
    monitor: Annotated[Any, Slot("proxima.view.trackers:TRACKERS", many=True), "trackers that also log the run"] = ()

    def __post_init__(self) -> None:
        require_plain_folder(self.folder)

    @property
    def replayed(self) -> Path | None:
        """The folder of the run whose rollouts are trained on; `{seed}` in it is the seed. None: they are generated."""
        return None if self.rollouts is None else Path(self.rollouts.replace("{seed}", str(self.seed))).expanduser()


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What `proxima eval` reads of a recipe: all that it needs without one has a default, but for the model."""

    model: Annotated[ModelConfig, "the policy"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "named scores; a named set has its own"] = ()
    engine: Annotated[Any, Slot("proxima.engine:ENGINES", default="local"), "who generates"]
    seed: Annotated[int, "seeds sampling and bootstrap"] = 1
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    eval: Annotated[EvalConfig, "held-out questions"] = field(default_factory=EvalConfig)
    runtime: Annotated[RuntimeConfig, "the machine"] = field(default_factory=RuntimeConfig)


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """What `proxima generate` reads of a run's config."""

    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
