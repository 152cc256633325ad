"""Time an update over the same groups after pruning at a rate: selection, packing, forward, backward, optimizer."""

from benchmarks.side import Channel, argument, bf16_policy, clock, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.core import ADVANTAGES, AGGREGATES, SURROGATES
    from proxima.core.selection.dropping import Prune
    from proxima.data.flow import Completion, Group, Prompt, Score
    from proxima.training.batch_builder import BatchBuilder
    from proxima.training.objectives.policy_objective import PolicyObjective
    from proxima.training.stack import TrainStack

    policy, ids = bf16_policy(settings)
    stack = TrainStack(policy)
    objective = PolicyObjective(surrogate=SURROGATES["ppo_clip"](), aggregate=AGGREGATES["token_mean"]())
    generator = torch.Generator().manual_seed(1)

    def completion(uid: int, sample: int) -> Completion:
        n = settings["tokens"]
        return Completion(
            prompt_uid=uid,
            sample=sample,
            tokens=tuple(ids(n)),
            text="",
            sampled_log_prob=(-10.0,) * n,
            untruncated_log_prob=(-10.0,) * n,
            policy_version=(0,) * n,
            finish_reason="stop",
            temperature=1.0,
        )

    groups = []
    for uid in range(settings["prompts"]):
        size = settings["completions"]
        rewards = torch.rand(size, generator=generator).tolist()  # all different: no advantage is 0, nothing is skipped
        groups.append(
            Group(
                prompt=Prompt(uid=uid, messages=(), tokens=tuple(ids(settings["prompt_tokens"]))),
                completions=tuple(completion(uid, sample) for sample in range(size)),
                scores=tuple(Score(value=value) for value in rewards),
            )
        )
    if settings["rate"]:
        selection = (Prune(rate=settings["rate"]),)
    else:
        selection = ()
    algorithm = BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=selection)

    def once() -> dict[str, float]:
        start = clock()
        chosen = algorithm.step_batch(groups, step=1)
        items = objective.items(chosen.trajectories, chosen.updates)
        result = stack.update(objective, items, lambda done, total: None)
        return {"seconds": clock() - start, "tokens": result.tokens}

    chosen = algorithm.step_batch(groups, step=1)
    prompts = len({item.group for item in chosen.trajectories}) * settings["prompt_tokens"]
    run = prompts + sum(len(item.tokens) for item in chosen.trajectories)
    serve(once, channel, completions=len(chosen.trajectories), tokens_run=run)


if __name__ == "__main__":
    main()
