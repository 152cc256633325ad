"""Checks of the `reward` section, which holds specs of `proxima.reward`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.data_section import scorers_of
from proxima.config.sections.model_section import ModelConfig, model_problem
from proxima.data import FieldError
from proxima.engine.protocol import Sampling
from proxima.model.pretrained import load_tokenizer
from proxima.reward import REWARDS
from proxima.system.user_modules import user_module_file


def reward_models_are_ready(r: Resolved[Any], model: ModelConfig, reward: Sequence[Any]) -> Findings:
    """A reward model must have a scalar head, and the policy's vocabulary if it reads the policy's tokens."""
    for path, spec in _rewards(r, reward):
        if REWARDS.holds(spec, "model"):
            try:
                spec.check()
                if model_problem(model.path) is None:
                    spec.check_vocabulary(load_tokenizer(model.path, model.revision))
            except FieldError as error:
                yield f"{path}.{error.field}", error.requirement


def reward_functions_exist(r: Resolved[Any], reward: Sequence[Any]) -> Findings:
    """Warn of a function whose file is missing: a command that imports it, as `train`, has refused it already."""
    for path, spec in _rewards(r, reward):
        if REWARDS.holds(spec, "function", "function_batch"):
            module = spec.absolute_path.rpartition(":")[0]
            if not (Path(module).is_file() if module.endswith(".py") else user_module_file(module)):
                yield f"{path}.path", "no such file or module; a path is relative to the current folder"


def _rewards(r: Resolved[Any], reward: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The rewards of the training and of each held-out set, with their paths."""
    for path, rewards in dict(scorers_of(r, reward).values()).items():
        for i, spec in enumerate(rewards):
            yield f"{path}.{i}", spec


def overlong_penalty_is_reachable(sampling: Sampling, reward: Sequence[Any]) -> Findings:
    """Warn if no completion can become long enough for the penalty."""
    longest = sampling.max_tokens
    for i, spec in enumerate(reward):
        if REWARDS.holds(spec, "overlong") and (free := spec.max_tokens - spec.buffer_tokens) >= longest:
            message = f"the penalty starts after {free} tokens, never reached with sampling.max_tokens={longest}"
            yield f"reward.{i}.max_tokens", message
