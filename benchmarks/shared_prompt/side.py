"""Forward and backward of one batch of groups, with the prompt of a group run once or once a completion."""

from benchmarks.side import Channel, argument, clock, device, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.data import Trajectory
    from proxima.model import Policy, load

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    most = min(40_000, loaded.model.config.vocab_size)
    policy = Policy(loaded, share_prompt=settings["share"], compute_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(min(1000, most // 2), most, (count,), generator=generator).tolist())

    trajectories = []
    for group in range(settings["prompts"]):
        prompt = ids(settings["prompt_tokens"])
        trajectories += [
            Trajectory(prompt_tokens=prompt, tokens=ids(settings["tokens"]), group=group)
            for _ in range(settings["completions"])
        ]
    batch = policy.pack(trajectories)

    def once() -> dict[str, float]:
        policy.model.zero_grad()
        start = clock()
        loss = -policy(batch).log_prob.mean()
        loss.backward()
        seconds = clock() - start
        norm = torch.stack([p.grad.double().square().sum() for p in policy.model.parameters()]).sum().sqrt()
        return {"seconds": seconds, "loss": loss.item(), "grad_norm": norm.item()}

    serve(once, channel, tokens_run=len(batch.tokens), tokens_trained=len(batch.target))


if __name__ == "__main__":
    main()
