"""Time forward and backward of the paths of episodes whose turns forget earlier thoughts, with the paths' common
beginning run once or once per path."""

from benchmarks.side import Channel, argument, bf16_policy, serve, timed_backward


def main() -> None:
    channel, settings = Channel(), argument()
    import numpy as np

    from proxima.data.trajectory import Trajectory

    policy, ids = bf16_policy(settings)
    trajectories, prompt = [], ids(settings["prompt_tokens"])
    for _ in range(settings["completions"]):
        seen: list[int] = []
        for _ in range(settings["turns"]):
            message = ids(settings["message"])
            own = ids(settings["thought"]) + message
            of_model = np.arange(len(seen) + len(own)) >= len(seen)
            sampled = of_model if settings["share"] else None  # None: as for completions that are no episodes
            tokens = seen + own
            item = Trajectory(group=0, prompt_tokens=prompt, tokens=tokens, sampled=sampled, loss_mask=of_model)
            trajectories.append(item)
            seen = seen + message + ids(settings["answer"])
    batch = policy.pack(trajectories)

    def once() -> dict[str, float]:
        return timed_backward(policy, batch, batch.loss_mask)

    serve(once, channel, tokens_run=len(batch.tokens), tokens_trained=int(batch.loss_mask.sum()))


if __name__ == "__main__":
    main()
