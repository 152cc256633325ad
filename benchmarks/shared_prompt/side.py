"""Time forward and backward of one batch of groups, with a group's prompt run once or once per completion, or the
common opening run once."""

from benchmarks.side import Channel, argument, bf16_policy, serve, timed_backward


def main() -> None:
    channel, settings = Channel(), argument()
    from proxima.data.trajectory import Trajectory

    policy, ids = bf16_policy(settings, share_prompt=settings["run"] != "once a completion")
    trajectories, opening = [], ids(settings["opening"])
    for group in range(settings["prompts"]):
        prompt = [*opening, *ids(settings["prompt_tokens"])]
        if settings["run"] != "openings once":
            prompt[0] = group  # the prompts start differently, and cost as much
        trajectories += [
            Trajectory(prompt_tokens=prompt, tokens=ids(settings["tokens"]), group=group)
            for _ in range(settings["completions"])
        ]
    batch = policy.pack(trajectories)

    def once() -> dict[str, float]:
        return timed_backward(policy, batch, slice(None))

    serve(once, channel, tokens_run=len(batch.tokens), tokens_trained=len(batch.target))


if __name__ == "__main__":
    main()
