"""A training run that takes a step on request. `beside.py` starts two with the same seed, so that their steps do the
same work; the page of one of them is open."""

from pathlib import Path

from benchmarks.side import Channel, argument, clock
from proxima.config import resolve
from proxima.runtime.launch.run import train
from proxima.runtime.watch.observer import Observer, Record, Sample


class Asked(Observer):
    """Waits between steps, and sends the duration of each."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.start = channel, 0.0

    def step(self, record: Record, sample: Sample | None) -> None:
        if record["step"] == 1:
            self.channel.send(ready=True)
        else:
            self.channel.send(seconds=clock() - self.start, step=record["step"])
        if not self.channel.wait():
            raise SystemExit
        self.start = clock()


def main() -> None:
    settings, channel = argument(), Channel()
    resolved = resolve("quickstart", [*settings["set"], f"folder={Path(settings['folder'])}"])
    train(resolved.config, resolved=resolved, observer=Asked(channel), overwrite=True)


if __name__ == "__main__":
    main()
