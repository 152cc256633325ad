"""Time one training step, and the corrections and the mismatch on random log-probs for as many tokens."""

import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from benchmarks.side import Channel, argument, serve

if TYPE_CHECKING:
    from proxima.core.metrics import Metrics
    from proxima.data import PolicyBatch

MISMATCH = "mismatch, measured in every run"


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.core import PolicyBatch, TokenMean
    from proxima.core.correction import Importance, Rejection, mismatch_metrics
    from proxima.core.surrogate import PpoClip
    from proxima.data import Trajectory
    from proxima.model import Policy, load
    from proxima.train import AdamW, PolicyObjective, TrainStack

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device="cpu")
    most = min(40_000, loaded.model.config.vocab_size)
    policy = Policy(loaded, compute_dtype=torch.bfloat16)
    stack = TrainStack(policy, optimizer=AdamW(lr=1e-7))
    objective = PolicyObjective(
        surrogate=PpoClip(), aggregate=TokenMean(), skip_zero_advantage=False, measure={"entropy"}
    )
    generator = torch.Generator().manual_seed(1)
    count, length = settings["sequences"], settings["tokens"]
    ids = torch.randint(min(1000, most // 2), most, (count, length), generator=generator).tolist()
    items = [
        Trajectory(
            prompt_tokens=(1, 2, 3),
            tokens=tuple(row),
            group=i // 8,
            advantage=(-1.0) ** i,
            behavior_log_prob=(-10.0,) * length,
        )
        for i, row in enumerate(ids)
    ]
    proximal = -10 + torch.randn(count * length, generator=generator)
    behavior = proximal + 0.05 * torch.randn(count * length, generator=generator)
    batch = PolicyBatch(
        log_prob=proximal,
        proximal_log_prob=proximal,
        behavior_log_prob=behavior,
        advantage=torch.ones(count * length),
        loss_mask=torch.ones(count * length, dtype=torch.bool),
        cu_seqlens=torch.arange(count + 1) * length,
    )
    corrections = {
        "token weights, truncated, veto": [Importance(level="token", upper=2.0, veto=1e-4)],
        "sequence weights, clipped, self-normalised, k3 rejection": [
            Importance(level="sequence", bound="clip", upper=2.0, normalise=True),
            Rejection(level="sequence", statistic="k3", reduce="mean", upper=0.01),
        ],
        "metrics only": [Importance(apply=False)],
    }

    measures = {name: partial(_correct, batch, specs) for name, specs in corrections.items()}
    measures[MISMATCH] = partial(mismatch_metrics, batch)

    def once() -> dict[str, dict[str, float]]:
        start = time.perf_counter()
        stack.update(objective, [items])
        seconds = {"step": time.perf_counter() - start}
        memory = {"step": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        for name, measure in measures.items():
            memory[name] = peak_allocation(measure)
            seconds[name] = sorted(_timed(measure) for _ in range(5))[2]
        return {"seconds": seconds, "memory": memory}

    serve(once, channel, measures=list(measures))


def _correct(batch: "PolicyBatch", specs: Sequence[Any]) -> "Metrics":
    from proxima.core.loss import apply_corrections

    return apply_corrections(batch, specs)[2]


def _timed(measure: Callable[[], "Metrics"]) -> float:
    """Return the seconds of a call, with the division and the sync that logging needs."""
    start = time.perf_counter()
    values = [metric.value for metric in measure().values()]
    assert len(values) > 10
    return time.perf_counter() - start


def peak_allocation(measure: Callable[[], object]) -> float:
    """Return the peak number of bytes that torch holds for `measure`, its result included."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = measure()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert kept and sizes
    return float(max(accumulate(sizes)))


if __name__ == "__main__":
    main()
