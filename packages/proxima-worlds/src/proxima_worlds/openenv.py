"""OpenEnv environments, which run as servers."""

import json
import weakref
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from proxima.data.json_reader import json_type, load_json
from proxima.environment.protocol import Environment, Reply
from proxima.process.program import Program, ProgramFailed

SCRIPT = Path(__file__).with_name("openenv_process.py")


class OpenEnv(Environment):
    """A session with an OpenEnv server; each message of the model is an action. The server must be able to hold as
    many sessions as episodes run at once (`max_concurrent_envs`). Rewards are those of the server's steps.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        python: an interpreter that has the package openenv.
        action: the action's field that receives the message's text; null: the message is the action, in JSON.
        show: the field of an observation that the model sees; null: the whole observation, in JSON.
        reset: more arguments of the server's `reset`, which also gets the seed.
    """

    _programs: dict[str, Program] = {}  # noqa: RUF012  by interpreter, for all sessions of a worker
    _numbers = count()

    def __init__(
        self,
        url: str,
        python: str,
        action: str | None = None,
        show: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.python = python
        self.action = action
        self.show = show
        self.arguments = dict(reset or {})

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        program = self._programs.get(self.python)
        if program is None or not program.alive:
            program = self._programs[self.python] = Program((self.python, str(SCRIPT)))
        self.program = program
        self.number = next(self._numbers)
        self._call("make", url=self.url)
        weakref.finalize(self, _dropped, program, self.number)
        return self._shown(self._call("reset", seed=seed % 2**31, **self.arguments))

    def respond(self, text: str) -> Reply:
        """Take a step."""
        action: Any = {self.action: text}
        if self.action is None:
            try:
                action = load_json(text)
            except ValueError:
                action = None
            if not isinstance(action, dict):
                return Reply("error: the message must be a JSON object")
        step = self._call("step", action=action)
        if not isinstance(step, dict):
            raise ProgramFailed(f"the server's step must be an object, not {json_type(step)}")
        reward = step.get("reward") or 0.0
        done = step.get("done")
        if not isinstance(reward, int | float) or not isinstance(done, bool):
            raise ProgramFailed(f"the server's step has the reward {reward!r:.100}, and done = {done!r:.100}")
        return Reply(self._shown(step), reward=float(reward), done=done)

    def _shown(self, step: Mapping[str, Any]) -> str:
        if not isinstance(step, dict) or "observation" not in step:
            raise ProgramFailed("the server's answer has no observation")
        observation = step["observation"]
        if self.show is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or self.show not in observation:
            raise ProgramFailed(f"the server's observation has no {self.show!r}")
        return str(observation[self.show])

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the session; ProgramFailed if it raises."""
        result: dict[str, Any] = self.program.call(method, number=self.number, arguments=arguments)
        return result


def _dropped(program: Program, number: int) -> None:
    with suppress(ProgramFailed):
        program.call("drop", number=number, arguments={})
