"""math-verify, called as in its documentation: in this process, one answer after the other, ordinary answers only."""

import logging
import time
from typing import Any

from benchmarks.math_reward.answers import groups
from benchmarks.side import Channel, argument, serve


def main() -> None:
    channel, settings = Channel(), argument()
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    pairs = [
        (gold, answer.text)
        for gold, own in groups(settings["answers"], settings["group"], settings["hostile"], settings["seed"])
        for answer in own
        if answer.right is not None
    ][: settings["plain"]]

    def once() -> dict[str, Any]:
        start, used = time.perf_counter(), time.process_time()
        right = sum(bool(verify(parse(f"${gold}$"), parse(text))) for gold, text in pairs)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - used,
            "answers": len(pairs),
            "right": right,
        }

    serve(once, channel)


if __name__ == "__main__":
    main()
