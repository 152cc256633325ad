"""Environments of OpenEnv, which are servers."""

import json
from collections.abc import Mapping
from typing import Any

from proxima.environment.adapters.bridge import Bridge
from proxima.environment.protocol import Environment, Reply


class OpenEnv(Environment):
    """A session with an OpenEnv server; a message of the model is an action. The server must be able to hold as many
    sessions as there are episodes at once (`max_concurrent_envs`). Rewards are those of its steps.

    Args:
        url: of the server, as `http://127.0.0.1:8000`.
        python: an interpreter that has the package openenv.
        action: the field of an action that the message's text becomes; null: the message is the action, in JSON.
        show: the field of an observation that the model sees; null: all of it, in JSON.
        reset: further arguments of the server's `reset`, which also gets the seed.
    """

    def __init__(
        self,
        url: str,
        python: str,
        action: str | None = None,
        show: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self.python, self.action, self.show = url, python, action, show
        self.arguments = dict(reset or {})
        self.client: Bridge | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.client = Bridge(self.python, "openenv", url=self.url)
        return self._shown(self.client.call("reset", seed=seed % 2**31, **self.arguments))

    def respond(self, text: str) -> Reply:
        """Make a step."""
        assert self.client is not None
        action: Any = {self.action: text}
        if self.action is None:
            try:
                action = json.loads(text)
            except ValueError:
                action = None
            if not isinstance(action, dict):
                return Reply("error: the message must be a JSON object")
        step = self.client.call("step", action=action)
        return Reply(self._shown(step), reward=float(step["reward"] or 0.0), done=step["done"])

    def _shown(self, step: Mapping[str, Any]) -> str:
        observation = step["observation"]
        if self.show is None:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self.show])
