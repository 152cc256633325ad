"""The `train` section: batch, optimizer, schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings, Resolved
from proxima.data import require
from proxima.data.kinds import Slot
from proxima.training import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Fields common to all training, with or without groups."""

    steps: Annotated[int, "steps of the run"] = 100
    tokens_per_micro_batch: Annotated[int, "tokens forwarded at once"] = 4096
    optimizer: Annotated[Any, Slot("proxima.training:OPTIMIZERS", default="adamw"), "optimizer"] = None
    schedule: Annotated[Literal["constant", "linear", "cosine"], "learning rate after the warm-up"] = "constant"
    warmup_steps: Annotated[int, "updates of linear warm-up; the first of w has 1 / w of the rate"] = 0
    warmup_ratio: Annotated[float, "the same as a share of the run's updates, rounded up; in place of warmup_steps"] = (
        0.0
    )
    final_lr_ratio: Annotated[float, "share of the learning rate that linear and cosine fall towards"] = 0.0
    max_grad_norm: Annotated[float, "clip the global gradient norm; 0: off"] = 1.0
    on_zero_gradient: Annotated[
        Literal["skip", "step"],
        "an update with a gradient of 0: weights stay; or momentum and decay move them, as in TRL",
    ] = "skip"

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tokens_per_micro_batch")
        require_at_least(self, 0, "warmup_steps")
        require(0 <= self.warmup_ratio <= 1, "warmup_ratio", self.warmup_ratio, "must be a share in [0, 1]")
        bound = f"must be 0 if warmup_steps is set (here {self.warmup_steps}): both give the length of the warm-up"
        require(self.warmup_ratio == 0 or self.warmup_steps == 0, "warmup_ratio", self.warmup_ratio, bound)
        require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "must be in [0, 1]")
        falls = self.schedule != "constant"
        bound = "must be 0 with schedule=constant, which does not fall"
        require(falls or self.final_lr_ratio == 0, "final_lr_ratio", self.final_lr_ratio, bound)
        require_at_least(self, 0, "max_grad_norm", remedy="0 turns clipping off")

    @property
    def updates(self) -> int | None:
        """Optimizer updates of the run; None if they depend on the data."""
        raise NotImplementedError

    def warmup_of(self, updates: int) -> int:
        """The number of warm-up updates in a run of `updates` updates."""
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
        # the micro-batches of a step are counted before the run, one sequence after the other
        sequences = self.prompts_per_step * self.completions_per_prompt
        bound = f"times completions_per_prompt={self.completions_per_prompt} is {sequences:,}; at most {2**20:,}"
        require(sequences <= 2**20, "prompts_per_step", self.prompts_per_step, bound)
        bound = f"must divide prompts_per_step={self.prompts_per_step}; a group is never split over two updates"
        divides = self.prompts_per_step % self.updates_per_step == 0
        require(divides, "updates_per_step", self.updates_per_step, bound)
        target = self.target_kl
        factor = self.target_kl_factor
        usable = target is None or 0 < target < math.inf
        require(usable, "target_kl", target, "must be > 0 nats", remedy="null turns it off")
        bound = "must be null with epochs_per_step=1: it leaves out further epochs, and there are none"
        require(target is None or self.epochs_per_step > 1, "target_kl", target, bound)
        require(0 < factor < math.inf, "target_kl_factor", factor, "must be > 0 and finite")

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_per_step * self.epochs_per_step


def warmup_is_given_once(r: Resolved[Any], train: OptimizationConfig) -> Findings:
    """A command line that turns off the steps of the warm-up must not leave the recipe's share."""
    steps = r.entry("train.warmup_steps").origin
    ratio = r.entry("train.warmup_ratio").origin
    if train.warmup_ratio and steps == "command line" and ratio != "command line":
        yield "train.warmup_steps", "leaves train.warmup_ratio, which the recipe sets; set that to 0"


def warmup_ends(train: OptimizationConfig) -> Findings:
    """Warn if the learning rate does not reach its value within the run."""
    updates = train.updates
    if updates is not None and train.warmup_of(updates) >= updates:
        name = "train.warmup_ratio" if train.warmup_ratio else "train.warmup_steps"
        noun = "update" if updates == 1 else "updates"
        made = f"the run has {updates} {noun}"
        message = f"{made}, so the learning rate never reaches its value; lower {name} or raise train.steps"
        yield name, message


def muon_has_whole_matrices(r: Resolved[Any], train: OptimizationConfig) -> Findings:
    """Muon needs whole matrices, which an adapter does not have."""
    if OPTIMIZERS.holds(train.optimizer, "muon") and r.get("model.lora") is not None:
        reason = "orthogonalizes updates of whole matrices, and an adapter has factors of them"
        yield "train.optimizer.kind", f"{reason}; use adamw with model.lora"
