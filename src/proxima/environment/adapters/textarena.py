"""Games of TextArena for one player."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from proxima.data import FieldError, UserError
from proxima.environment.protocol import Environment, Reply
from proxima.system.user_modules import require_package


class TextArena(Environment):
    """A game; a message of the model is its move. For a task of `seeds`: `reset` writes the prompt.

    The reward is the game's own, once at the end. TextArena draws from the global random generators of Python and
    NumPy, of whose states the worker keeps one for each episode: its course depends only on its seed and moves.

    Args:
        game: its id, such as `GuessTheNumber-v0`.
        config: the game's own arguments.
    """

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
            raise UserError(f"the game is not for one player: {error}") from None
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
