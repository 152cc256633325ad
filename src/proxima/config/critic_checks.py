"""Checks of the critic against the rest of the run."""

from collections.abc import Iterator
from typing import Any

from proxima.config.algorithm_checks import trains_on_rewards
from proxima.config.critic_schema import ModelCritic
from proxima.config.machine_checks import has_score, model_problem
from proxima.config.problems import Problem
from proxima.config.resolve import Resolved
from proxima.data import FieldError


def critic_model_exists(r: Resolved[Any]) -> Iterator[Problem]:
    """What the critic starts from is a model folder or a hub name."""
    critic = r.config.critic
    if isinstance(critic, ModelCritic) and critic.path is not None and (remedy := model_problem(critic.path)):
        yield r.problem("critic.path", remedy)


def critic_is_read(r: Resolved[Any]) -> Iterator[Problem]:
    """Values are for advantages, which a teacher alone does not have, and a head that exists is not drawn anew."""
    critic = r.config.critic
    if critic is None:
        return
    if not trains_on_rewards(r.config):
        message = "predicts rewards, which are only measured; set critic=null, or name an algorithm.surrogate"
        yield r.problem("critic.kind", message)
    if isinstance(critic, ModelCritic) and critic.head_std and critic.path is not None and has_score(critic.path):
        yield r.problem("critic.head_std", f"is for a new head, and {critic.path} has one; set it to 0")


def critic_fits_the_step(r: Resolved[Any]) -> Iterator[Problem]:
    """What the critic changes of `train` is as valid there, and the policy is trained in some step."""
    critic = r.config.critic
    if not isinstance(critic, ModelCritic):
        return
    try:
        critic.training(r.config.train)
    except FieldError as error:
        yield r.problem(f"critic.{error.field}", error.requirement)
    if (waits := critic.value_warmup_steps) >= (steps := r.config.train.steps):
        message = f"the policy would wait for all {steps} steps of the run (train.steps={steps}); lower it"
        yield r.problem("critic.value_warmup_steps", f"{message}, with {waits} it never learns")
