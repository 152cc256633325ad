"""OpenEnv environments, which run as servers."""

import json
from collections.abc import Mapping
from typing import Any

from proxima.environment.adapters.bridge import Bridge
from proxima.environment.protocol import Environment, Reply


class OpenEnv(Environment):
    """A session with an OpenEnv server; each message of the model is an action. The server must be able to hold as
    many sessions as episodes run at once (`max_concurrent_envs`). Rewards are those of the server's steps.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        python: an interpreter that has the package openenv.
        action: the action's field that receives the message's text; null: the message is the action, in JSON.
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
        """Take a step."""
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
