"""Forward and backward of the paths of some episodes, of which each forgets its earlier thoughts: what they begin with
run once, or once a path."""

from benchmarks.side import Channel, argument, clock, device, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import numpy as np
    import torch

    from proxima.data import Trajectory
    from proxima.model import Policy, load

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    most = min(40_000, loaded.model.config.vocab_size)
    policy = Policy(loaded, compute_dtype=torch.bfloat16)
    draw = np.random.default_rng(1)

    def ids(count: int) -> list[int]:
        return draw.integers(min(1000, most // 2), most, count).tolist()

    trajectories, prompt = [], ids(settings["prompt_tokens"])
    for _ in range(settings["completions"]):
        seen: list[int] = []
        for _ in range(settings["turns"]):
            message = ids(settings["message"])
            own = ids(settings["thought"]) + message
            of_model = np.arange(len(seen) + len(own)) >= len(seen)
            sampled = of_model if settings["share"] else None  # None: as of completions that are no episodes
            tokens = seen + own
            item = Trajectory(group=0, prompt_tokens=prompt, tokens=tokens, sampled=sampled, loss_mask=of_model)
            trajectories.append(item)
            seen = seen + message + ids(settings["answer"])
    batch = policy.pack(trajectories)

    def once() -> dict[str, float]:
        policy.model.zero_grad()
        start = clock()
        loss = -policy(batch).log_prob[batch.loss_mask].mean()
        loss.backward()
        seconds = clock() - start
        norm = torch.stack([p.grad.double().square().sum() for p in policy.model.parameters()]).sum().sqrt()
        return {"seconds": seconds, "loss": loss.item(), "grad_norm": norm.item()}

    serve(once, channel, tokens_run=len(batch.tokens), tokens_trained=int(batch.loss_mask.sum()))


if __name__ == "__main__":
    main()
