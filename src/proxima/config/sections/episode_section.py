"""Checks of tasks with an environment or tools, and of the section `episode`, an `EpisodeSettings` of
`proxima.rollout`."""

from collections.abc import Sequence
from typing import Any

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.data_section import scorers_of, tasks_of
from proxima.engine.protocol import Sampling
from proxima.reward import REWARDS
from proxima.rollout.episodes.settings import EpisodeSettings


def only_rl_plays(r: Resolved[Any]) -> Findings:
    """Refuse environments and tools in a run on a fixed data set, which generates nothing."""
    if "episode" in type(r.config).__dataclass_fields__:
        return
    for path, task in tasks_of(r.config).items():
        for name in ("environment", "tools"):
            if getattr(task, name, None):
                yield f"{path}.{name}", "has no effect in a run on a fixed data set; remove it, or use proxima train"


def environment_rewards_have_one(r: Resolved[Any], reward: Sequence[Any]) -> Findings:
    """A reward from an environment needs a task with one: it can't score a single answer."""
    if r.get("episode") is None:
        return
    tasks = tasks_of(r.config)
    for path, (place, specs) in scorers_of(r, reward).items():
        for i, spec in enumerate(specs):
            task = tasks[path]
            if task is not None and REWARDS.holds(spec, "environment") and not getattr(task, "environment", None):
                message = f"scores by the environment of {path}, which has none"
                yield f"{place}.{i}.kind", f"{message}; set {path}.environment, or name another reward"


def an_episode_has_room_for_a_turn(task: Any, episode: EpisodeSettings, sampling: Sampling) -> Findings:
    """The tokens of an episode must be enough for one turn."""
    if episode.tokens is not None and episode.tokens < sampling.max_tokens:
        message = f"is less than one turn may have, sampling.max_tokens={sampling.max_tokens}"
        yield "episode.tokens", f"{message}; raise it, or lower sampling.max_tokens"
