"""The configs of the commands that read only some sections of a recipe: `eval` and `generate`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from proxima.config.schema import EPISODE
from proxima.config.sections.data_section import DataConfig
from proxima.config.sections.eval_section import EvalConfig
from proxima.config.sections.model_section import ModelConfig
from proxima.config.sections.runtime_section import RuntimeConfig
from proxima.config.slots import Slot
from proxima.engine.protocol import Sampling
from proxima.rollout.episodes.settings import EpisodeSettings


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
