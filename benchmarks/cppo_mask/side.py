"""Time both masks on the same batch: the formulas of arXiv 2606.10968 sequence by sequence, and ours."""

import threading
import time
from typing import Any

from benchmarks.side import Channel, argument, serve


def plain_loop(b: Any, delta: float, w_min: float, delta_b: float) -> tuple[Any, Any]:
    """Return keep [N] and each token's distance from its threshold [N]: a loop over sequences, formulas as printed."""
    import torch

    keep, margin = [], []
    for start, end in zip(b.cu_seqlens[:-1].tolist(), b.cu_seqlens[1:].tolist(), strict=True):
        pi, mu, advantage = b.log_prob[start:end].exp(), b.behavior_log_prob[start:end].exp(), b.advantage[start:end]
        far = (pi - mu).abs()
        length = end - start
        weight = 1 - (1 - w_min) * torch.arange(length) / max(length - 1, 1)
        spent = weight * far
        granted = far.quantile(0.9).clamp(delta_b, 2 * delta_b)
        before, prior = spent.cumsum(0) - spent, weight.cumsum(0) - weight
        allowed = torch.minimum(torch.tensor(delta), delta + granted * prior - before)
        keep.append((advantage * (pi - mu) <= 0) | (spent <= allowed))
        margin.append((spent - allowed).abs())
    return torch.cat(keep), torch.cat(margin)


def peak_during(call: Any) -> int:
    """Return the peak growth of the process's memory in bytes while `call` runs, sampled every half millisecond."""
    import psutil

    process, held, done = psutil.Process(), [0], threading.Event()
    base = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.0005):
            held[0] = max(held[0], process.memory_info().rss - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    held[0] = max(held[0], process.memory_info().rss - base)
    done.set()
    watcher.join()
    return held[0]


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.core import PolicyBatch
    from proxima.core.surrogate import Cppo

    torch.set_num_threads(settings["threads"])
    sequences, tokens = settings["sequences"], settings["tokens"]
    count = sequences * tokens
    generator = torch.Generator().manual_seed(1)
    behavior = -torch.rand(count, generator=generator).mul_(3)
    drift = torch.randn(count, generator=generator).mul_(0.05)
    b = PolicyBatch(
        log_prob=(behavior + drift).clamp_(max=0),
        behavior_log_prob=behavior,
        advantage=torch.randn(sequences, generator=generator).repeat_interleave(tokens),
        loss_mask=torch.ones(count, dtype=torch.bool),
        cu_seqlens=torch.arange(sequences + 1) * tokens,
    )
    spec = Cppo()

    def once() -> dict[str, float]:
        start = time.perf_counter()
        slow, margin = plain_loop(b, spec.delta, spec.w_min, spec.delta_b)
        between = time.perf_counter()
        fast, _ = spec.masks(b)
        end = time.perf_counter()
        disagree = int(((slow != fast) & (margin > 1e-6)).sum())
        copies = peak_during(lambda: spec.masks(b)) / (4 * count)
        return {"loop": between - start, "packed": end - between, "disagree": disagree, "copies": copies}

    serve(once, channel)


if __name__ == "__main__":
    main()
