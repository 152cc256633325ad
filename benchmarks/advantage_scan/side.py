"""Time the recursion and the blocked sums on the same float64 rows: y_t = x_t + .95 y_{t+1}."""

import time
from typing import Any

from benchmarks.side import Channel, argument, serve

FACTOR = 0.95
TOKENS = 1 << 15  # approximate count per measurement: short rows are repeated so that the clock can resolve them


def recursion(x: Any) -> Any:
    """Sum token by token, all rows at once; `inside` is the padding mask, all True here."""
    import torch

    out, carry, inside = torch.zeros_like(x), x.new_zeros(len(x)), torch.ones_like(x, dtype=torch.bool)
    for t in range(x.shape[1] - 1, -1, -1):
        carry = torch.where(inside[:, t], x[:, t] + FACTOR * carry, carry)
        out[:, t] = carry
    return out


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.core.padded_blocks import suffix_sums

    torch.set_num_threads(settings["threads"])
    shape = settings["rows"], settings["tokens"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    repeats = max(1, TOKENS // shape[1] // 16)

    def seconds(call: Any) -> float:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats

    def once() -> dict[str, float]:
        off = float((suffix_sums(x, FACTOR) - recursion(x)).abs().max())
        return {"loop": seconds(lambda: recursion(x)), "blocks": seconds(lambda: suffix_sums(x, FACTOR)), "off": off}

    serve(once, channel)


if __name__ == "__main__":
    main()
