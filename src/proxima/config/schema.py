"""The configuration of a run as dataclasses: each field once, with its default, bounds, and meaning and unit as text.
The classes of its sections, with their checks, are in `sections`, as are those of runs on fixed data, see `families`.

A field marked with `Slot` holds `{kind: NAME, ...fields}` in a recipe, or NAME alone, where NAME is a key of the slot's
table or `package.module:Class`; here it holds the spec built from it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from proxima.config.problems import require_plain_folder
from proxima.config.sections.algorithm import RECOMPUTED, AlgorithmConfig
from proxima.config.sections.critic import ModelCritic
from proxima.config.sections.data import DataConfig
from proxima.config.sections.eval import CheckpointConfig, EvalConfig
from proxima.config.sections.model import ModelConfig
from proxima.config.sections.placement import Placement
from proxima.config.sections.runtime import Folder, Monitor, RuntimeConfig, View
from proxima.config.sections.train import TrainConfig
from proxima.data.kinds import Slot
from proxima.engine.protocol import Sampling
from proxima.rollout.episodes.settings import EpisodeSettings

EPISODE = "limits of tasks with an environment or tools"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. `proxima explain RECIPE` prints every field with its value and where that came from."""

    model: Annotated[ModelConfig, "the policy"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "training questions"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "named scores, each with a weight"]
    algorithm: Annotated[AlgorithmConfig, "a preset's name, or its slots"]
    engine: Annotated[Any, Slot("proxima.engine:ENGINES", default="local"), "who generates"]
    critic: Annotated[Any, Slot("proxima.config.sections:CRITICS"), "estimates values for gae; null: none"] = None
    seed: Annotated[int, "seeds data order, sampling and initialisation"] = 1
    rollouts: Annotated[str | None, "a run folder: train on its stored rollouts; null: generate"] = None
    folder: Folder = None
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    sampling: Annotated[Sampling, "how the training completions are sampled"] = field(default_factory=Sampling)
    episode: Annotated[EpisodeSettings, EPISODE] = field(default_factory=EpisodeSettings)
    train: Annotated[TrainConfig, "batch, optimizer, schedule"] = field(default_factory=TrainConfig)
    eval: Annotated[EvalConfig, "held-out evaluation"] = field(default_factory=EvalConfig)
    checkpoint: Annotated[CheckpointConfig, "what is kept"] = field(default_factory=CheckpointConfig)
    runtime: Annotated[RuntimeConfig, "the loop and its machine"] = field(default_factory=RuntimeConfig)
    placement: Placement = None
    monitor: Monitor = ()
    view: View = False

    def __post_init__(self) -> None:
        require_plain_folder(self.folder)

    @property
    def replayed(self) -> Path | None:
        """The folder of the run whose rollouts are trained on, with the seed for `{seed}`; None: they are generated."""
        if self.rollouts is None:
            return None
        return Path(self.rollouts.replace("{seed}", str(self.seed))).expanduser()

    @property
    def max_unscored_steps(self) -> int:
        """The number of steps without a score after which the run ends; 0 if it does not train on scores."""
        if self.algorithm.trains_on_rewards:
            return self.runtime.max_unscored_steps
        return 0

    @property
    def value_warmup(self) -> int:
        """The number of initial steps in which only the critic is trained."""
        if isinstance(self.critic, ModelCritic):
            return self.critic.value_warmup_steps
        return 0

    @property
    def recomputes_proximal(self) -> bool:
        """True if the proximal log-probs need a separate forward pass. With one update per step and no KL penalty in
        the reward that reads them earlier, the first forward pass of the update supplies them."""
        several = self.train.updates_per_step * self.train.epochs_per_step > 1
        return self.algorithm.proximal in RECOMPUTED and (several or self.algorithm.reward_kl is not None)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The fields of a recipe that `proxima eval` reads; without a recipe, all but the model have defaults."""

    model: Annotated[ModelConfig, "the policy"]
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True), "named scores; a named set has its own"] = ()
    engine: Annotated[Any, Slot("proxima.engine:ENGINES", default="local"), "who generates"]
    seed: Annotated[int, "seeds sampling and bootstrap"] = 1
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    eval: Annotated[EvalConfig, "held-out questions"] = field(default_factory=EvalConfig)
    episode: Annotated[EpisodeSettings, EPISODE] = field(default_factory=EpisodeSettings)
    runtime: Annotated[RuntimeConfig, "the machine"] = field(default_factory=RuntimeConfig)


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """The fields of a run's config that `proxima generate` reads."""

    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class PlayedConfig:
    """The fields that `proxima generate` reads of a run whose task has an environment or tools."""

    model: Annotated[ModelConfig, "the policy"]
    task: Annotated[Any, Slot("proxima.task:TASKS"), "training questions"]
    seed: Annotated[int, "seeds generated tasks"] = 1
    data: Annotated[DataConfig, "how rows become prompts"] = field(default_factory=DataConfig)
    sampling: Annotated[Sampling, "how the training completions are sampled"] = field(default_factory=Sampling)
    episode: Annotated[EpisodeSettings, EPISODE] = field(default_factory=EpisodeSettings)


@dataclass(frozen=True)
class CheckConfig:
    """The slots whose kinds `proxima check` checks against laws, one spec each."""

    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES")] = None
    correction: Annotated[Any, Slot("proxima.core.correction:CORRECTIONS")] = None
    penalty: Annotated[Any, Slot("proxima.core:PENALTIES")] = None
    aggregate: Annotated[Any, Slot("proxima.core:AGGREGATES")] = None
    distillation: Annotated[Any, Slot("proxima.core:DISTILLATIONS")] = None
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES")] = None
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS")] = None
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True)] = ()
    engine: Annotated[Any, Slot("proxima.engine:ENGINES")] = None
