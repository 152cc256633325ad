"""The `critic` section of a run: the estimator of values, its initial weights and its training."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings
from proxima.config.sections.algorithm import AGGREGATE, AlgorithmConfig
from proxima.config.sections.model import has_score
from proxima.config.sections.train import TrainConfig
from proxima.core.value import ValueLoss
from proxima.data import FieldError, require
from proxima.data.kinds import Slot
from proxima.model.pretrained import UnloadedModel, read_auxiliary_model


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Fields common to both kinds of critic."""

    loss: Annotated[ValueLoss, "of a token, towards its return"] = field(default_factory=ValueLoss)
    aggregate: Annotated[Any, AGGREGATE, "per-token losses -> one number, with a denominator of its own"] = None
    head_std: Annotated[float, "standard deviation of a new head's weights; 0: all first values are 0"] = 0.0
    bootstrap: Annotated[
        bool, "value after a completion that the length limit cut off: that of its last state; false: 0"
    ] = True

    def __post_init__(self) -> None:
        require(0 <= self.head_std < float("inf"), "head_std", self.head_std, "must be >= 0 and finite")

    def check_model(self, policy: UnloadedModel) -> None:
        """Raise FieldError if the critic's model can't be read, or if its tokens are not those of the policy."""


@dataclass(frozen=True, kw_only=True)
class ModelCritic(CriticConfig):
    """A separate model, trained alongside the policy on every completion with a score. Fields that are null are as in
    `train`."""

    path: Annotated[str | None, "a reward model, or a language model that gets a new head; null: model.path"] = None
    revision: Annotated[str | None, "hub revision of path"] = None
    value_warmup_steps: Annotated[int, "first steps of the run, in which the critic learns and the policy waits"] = 0
    optimizer: Annotated[Any, Slot("proxima.training:OPTIMIZERS"), "of the critic"] = None
    schedule: Annotated[Literal["constant", "linear", "cosine"] | None, "learning rate after the warm-up"] = None
    warmup_steps: Annotated[int | None, "updates of linear warm-up; the first of w has 1 / w of the rate"] = None
    final_lr_ratio: Annotated[float | None, "share of the learning rate that linear and cosine fall towards"] = None
    max_grad_norm: Annotated[float | None, "clip the critic's global gradient norm; 0: off"] = None
    tokens_per_micro_batch: Annotated[int | None, "tokens forwarded at once"] = None
    updates_per_step: Annotated[int | None, "optimizer updates a step; must divide prompts_per_step"] = None
    epochs_per_step: Annotated[int | None, "passes over the step's completions"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "value_warmup_steps")
        named = self.path is not None or self.revision is None
        require(named, "revision", self.revision, "must be null without a path")

    def check_model(self, policy: UnloadedModel) -> None:
        if self.path is not None:
            remedy = "start the critic from a model of the same family"
            read_auxiliary_model(policy, self.path, self.revision, "critic.path", remedy)

    def training(self, train: TrainConfig) -> TrainConfig:
        """The run's `train` section with the critic's own settings in place of its values.

        Raises:
            FieldError: the combination is invalid, as in `train`.
        """
        names = {info.name for info in fields(train)}
        changes = {name: value for name, value in vars(self).items() if name in names and value is not None}
        if "warmup_steps" in changes:
            changes["warmup_ratio"] = 0.0
        if self.schedule == "constant":
            changes.setdefault("final_lr_ratio", 0.0)
        return replace(train, **changes)


@dataclass(frozen=True, kw_only=True)
class HeadCritic(CriticConfig):
    """A linear head on the policy's trunk: its loss is added to the policy's, and both train the trunk."""

    coefficient: Annotated[float, "of the critic's loss beside the policy's"] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.coefficient < float("inf"), "coefficient", self.coefficient, "must be > 0 and finite")


def critic_fits_the_run(critic: Any, algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """Refuse a critic if only a teacher trains, and `head_std` if the critic's model already has a head. The critic's
    changes to `train` must be valid there, and the policy must be trained in some step."""
    if critic is None:
        return
    if not algorithm.trains_on_rewards:
        message = "predicts rewards, but nothing trains on them; set critic=null, or name an algorithm.surrogate"
        yield "critic.kind", message
    if not isinstance(critic, ModelCritic):
        return
    if critic.head_std and critic.path is not None and has_score(critic.path):
        yield "critic.head_std", f"is for a new head, and {critic.path} has one; set it to 0"
    try:
        critic.training(train)
    except FieldError as error:
        yield f"critic.{error.field}", error.requirement
    waits = critic.value_warmup_steps
    steps = train.steps
    if waits >= steps:
        message = f"the policy would wait for all {steps} steps of the run (train.steps={steps}); lower it"
        yield "critic.value_warmup_steps", f"{message}, with {waits} it never learns"
