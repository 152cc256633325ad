"""One training step, and the corrections on the log-probs of that very step."""

import time

from benchmarks.side import Channel, argument, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.core import PolicyBatch, TokenMean
    from proxima.core.correction import Importance, Rejection
    from proxima.core.loss import apply_corrections
    from proxima.core.surrogate import PpoClip
    from proxima.data import Trajectory
    from proxima.model import Policy, load
    from proxima.train import AdamW, PolicyObjective, TrainStack

    torch.set_num_threads(settings["threads"])
    policy = Policy(load(settings["model"], device="cpu"), compute_dtype=torch.bfloat16)
    stack = TrainStack(policy, optimizer=AdamW(lr=1e-7))
    objective = PolicyObjective(surrogate=PpoClip(), aggregate=TokenMean(), skip_zero_advantage=False)
    generator = torch.Generator().manual_seed(1)
    count, length = settings["sequences"], settings["tokens"]
    ids = torch.randint(1000, 40_000, (count, length), generator=generator).tolist()
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

    def once() -> dict[str, float]:
        start = time.perf_counter()
        stack.update(objective, [range(count)], items)
        measured = {"step": time.perf_counter() - start}
        for name, specs in corrections.items():
            times = []
            for _ in range(5):
                start = time.perf_counter()
                done = apply_corrections(batch, specs)
                values = {
                    key: value.value for key, value in done.metrics.items()
                }  # with the division and the sync that logging needs
                times.append(time.perf_counter() - start)
            assert len(values) > 10
            measured[name] = sorted(times)[2]
        return measured

    serve(once, channel, corrections=list(corrections))


if __name__ == "__main__":
    main()
