"""SkyRL-Gym environments."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from proxima.data import FieldError
from proxima.environment.protocol import Environment, Reply
from proxima.system.user_modules import require_package


class SkyRLGym(Environment):
    """An environment registered with skyrl_gym. It receives the row's messages and, as `extras`, the row's columns with
    `reward_spec: {ground_truth: answer of the row}`. Rewards are those of the environment's steps.

    Args:
        env: its id, such as `gsm8k_multi_turn`.
        config: passed to it as `env_config`.
        extras: further extras, such as `{max_turns: 3}`.
    """

    def __init__(
        self, env: str, config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None
    ) -> None:
        require_package("skyrl_gym", "it needs", "skyrl-gym")
        import skyrl_gym
        from skyrl_gym.envs.registration import registry

        if env not in registry:
            raise FieldError("env", env, "is not registered", remedy=f"known are {', '.join(registry)}")
        self.make = partial(skyrl_gym.make, env, env_config=dict(config or {}))
        self.extras = dict(extras or {})
        self.env: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        columns = {name: value for name, value in row.items() if name not in ("messages", "answer")}
        truth = {"reward_spec": {"method": "rule", "ground_truth": row.get("answer")}, "extra_info": {}}
        self.env = self.make(extras={**truth, **columns, **self.extras})
        messages, _ = self.env.init([dict(message) for message in row["messages"]])
        return list(messages)

    def respond(self, text: str) -> Reply:
        """Take a step."""
        step = self.env.step(text)
        done = bool(step["done"])
        if done:
            self.env.close()
        return Reply(step["observations"] or "", reward=float(step["reward"]), done=done)
