"""Steps of `proxima train` on the demo's recipe, with the seconds of each phase."""

from typing import Any

from benchmarks.side import Channel
from benchmarks.step_vs_trl import proxima_side
from benchmarks.where.phases import Clock


class WatchedTurn(proxima_side.Turn):
    """Sends the seconds of a step's phases along with those of the step."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        super().__init__(channel)
        self.clock = clock

    def step(self, record: Any) -> None:
        self.facts = {"phases": dict(self.clock.seconds)}
        super().step(record)

    def _next(self) -> None:
        self.clock.seconds = dict.fromkeys(self.clock.seconds, 0.0)
        super()._next()


def main() -> None:
    clock = Clock()
    with clock.watch():
        proxima_side.main(lambda channel: WatchedTurn(channel, clock))


if __name__ == "__main__":
    main()
