"""Environments of packages that are installed beside proxima: reasoning_gym, SkyRL-Gym, TextArena."""

import random
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from proxima.data import FieldError, UserError, require
from proxima.data.errors import suggestion
from proxima.environment.protocol import Environment, Reply
from proxima.system.user_modules import require_package

FORM = "Put the answer between <answer> and </answer>."


class ReasoningGym(Environment):
    """A puzzle; an answer is scored by the puzzle's own verifier. For a task of `seeds`: `reset` writes the prompt.

    The answer is the text in the last `<answer>…</answer>`, or else the whole message. The reward is the verifier's
    score of the last answer, in [0, 1]. An answer that the verifier can't parse is wrong.

    Args:
        task: its name in reasoning_gym, such as `chain_sum`.
        config: the task's own settings.
        attempts: number of answers allowed; each wrong one except the last is answered by "That is not right."
    """

    needs = {"reasoning_gym": "proxima-rl[gym]"}  # noqa: RUF012

    def __init__(self, task: str, config: Mapping[str, Any] | None = None, attempts: int = 1) -> None:
        require_package("reasoning_gym", "it needs", "proxima-rl[gym]")
        from reasoning_gym.factory import DATASETS

        require(task in DATASETS, "task", task, "is not in reasoning_gym", remedy=suggestion(task, DATASETS))
        require(attempts >= 1, "attempts", attempts, "must be >= 1")
        self.task = task
        self.config = dict(config or {})
        self.left = attempts
        self.puzzle: Any = self._made(0)

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.puzzle = self._made(seed)
        return f"{self.puzzle[0]['question']}\n{FORM}"

    def respond(self, text: str) -> Reply:
        """Score an answer."""
        tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = tagged[-1].strip() if tagged else text.strip()
        try:
            score = float(self.puzzle.score_answer(answer, self.puzzle[0]))
        except Exception:  # verifiers raise on answers that they can't parse
            score = 0.0
        self.left -= 1
        if score >= 1 or not self.left:
            return Reply(reward=score, done=True)
        return Reply("That is not right. Try again.")

    def _made(self, seed: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            return create_dataset(self.task, **{**self.config, "seed": seed % 2**31, "size": 1})
        except Exception as error:  # settings are checked by assertions
            raise FieldError("config", self.config, f"is refused by {self.task!r}: {error}") from None


class SkyRLGym(Environment):
    """An environment registered with skyrl_gym. It receives the row's messages and, as `extras`, the row's columns with
    `reward_spec: {ground_truth: answer of the row}`. Rewards are those of the environment's steps.

    Args:
        env: its id, such as `gsm8k_multi_turn`.
        config: passed to it as `env_config`.
        extras: further extras, such as `{max_turns: 3}`.
    """

    needs = {"skyrl_gym": "skyrl-gym"}  # noqa: RUF012

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


class TextArena(Environment):
    """A game for one player; a message of the model is its move. For a task of `seeds`: `reset` writes the prompt.

    The reward is the game's own, once at the end. TextArena draws from the global random generators of Python and
    NumPy, of whose states the worker keeps one for each episode: its course depends only on its seed and moves.

    Args:
        game: its id, such as `GuessTheNumber-v0`.
        config: the game's own arguments.
    """

    needs = {"textarena": "textarena"}  # noqa: RUF012

    def __init__(self, game: str, config: Mapping[str, Any] | None = None) -> None:
        require_package("textarena", "it needs", "textarena")
        import textarena

        try:
            self.game = textarena.make(f"{game}-raw", **(config or {}))  # raw: each turn gives only the new text
        except Exception as error:
            raise FieldError("game", game, f"can't be made: {type(error).__name__}: {error}") from None

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            self.game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise UserError(f"the game is not a single-player game: {error}") from None
        return self._observed()

    def respond(self, text: str) -> Reply:
        """Make a move."""
        done, _ = self.game.step(text)
        if done:
            rewards, _ = self.game.close()
            return Reply(reward=float((rewards or {}).get(0, 0.0)), done=True)
        return Reply(self._observed())

    def _observed(self) -> str:
        """Return the game's new messages, without the player's own moves."""
        _, observed = self.game.get_observation()
        return "\n".join(text.strip() for sender, text, _ in observed if sender != 0)
