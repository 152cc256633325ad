"""Environments with roles, for tests."""

from typing import Any

from examples.agents.nim import MOST, RULES, stones_taken
from proxima.environment.protocol import Environment, Reply, RewardWithParts

PLAYERS = ("first", "second")


class Nim(Environment):
    """As `examples/agents/nim.py`, which is an agent.

    Args:
        fails: where it raises: `respond` or `get_reward`.
        names: the role that it names in place of the other one.
        pays: each right move has this reward.
    """

    roles = PLAYERS

    def __init__(self, fails: str = "", names: str = "", pays: float = 0.0) -> None:
        self.fails, self.names, self.pays = fails, names, pays

    def reset(self, number: int) -> list[dict[str, Any]]:
        self.stones, self.mover, self.moves = 4 + number % 9, 0, 0
        self.won: int | None = None
        return [{"role": "system", "content": RULES}, self._heap()]

    def respond(self, text: str) -> Reply:
        if self.fails == "respond":
            raise RuntimeError("the board is lost")
        taken = stones_taken(text)
        if not 1 <= taken <= min(MOST, self.stones):
            self.won = 1 - self.mover
            return Reply(done=True)
        self.stones -= taken
        self.moves += 1
        if self.stones == 0:
            self.won = self.mover
            return Reply(done=True, reward=self.pays)
        self.mover = 1 - self.mover
        first = [{"role": "system", "content": RULES}] if self.moves == 1 else []
        return Reply([*first, self._heap()], role=self.names or PLAYERS[self.mover], reward=self.pays)

    def get_reward(self) -> RewardWithParts | dict[str, float]:
        if self.fails == "get_reward":
            raise RuntimeError("the board is lost")
        if self.won is None:
            return dict.fromkeys(PLAYERS, 0.0)
        value = {PLAYERS[self.won]: 1.0, PLAYERS[1 - self.won]: -1.0}
        return RewardWithParts(value=value, parts={"moves": float(self.moves)})

    def _heap(self) -> dict[str, Any]:
        return {"role": "user", "content": f"The heap has {self.stones} stones."}


class Bidder(Environment):
    """Two who look at a number, each with a tool, before they bid; the higher bid wins."""

    roles = ("buyer", "seller")

    def reset(self, row: dict[str, Any], seed: int) -> Reply:
        self.bids: dict[str, int] = {}
        return Reply("Bid.", role="seller")

    def price(self) -> int:
        """Tell the price."""
        return 4

    def respond(self, text: str) -> Reply:
        self.bids["buyer" if "seller" in self.bids else "seller"] = stones_taken(text)
        return Reply("Bid, too.", role="buyer") if len(self.bids) == 1 else Reply(done=True)

    def get_reward(self) -> dict[str, float]:
        return {role: float(bid) for role, bid in self.bids.items()}


class Unnamed(Environment):
    roles = ("mean", "x")

    def respond(self, text: str) -> str:
        return text
