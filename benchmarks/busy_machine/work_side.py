"""A run's work in a process of its own: the quickstart's generation, or an update of the same completions."""

from benchmarks.side import Channel, argument, clock, serve

PROMPTS, SAMPLES, CONTEXT, AT_ONCE = 8, 8, 32, 2048


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from benchmarks.where.parts import Parts
    from proxima.core import ADVANTAGES
    from proxima.training.batch_builder import BatchBuilder

    torch.set_num_threads(settings["threads"])
    parts, rows, tokens = Parts(settings["model"], settings["dtype"], 1), PROMPTS * SAMPLES, settings["tokens"]
    if settings["part"] == "decode":
        engine, asked = parts.engine(rows), parts.prompts(PROMPTS, CONTEXT)
    else:
        _, stack = parts.trainer(attention="packed", at_once=AT_ONCE)
        builder, groups = (
            BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=()),
            parts.groups(rows, CONTEXT, tokens),
        )

    def once() -> dict[str, float]:
        start = clock()
        if settings["part"] == "decode":
            parts.generate(engine, asked, rows, tokens)
        else:
            parts.train(stack, builder, groups)
        seconds = clock() - start
        return {"seconds": seconds, "rate": rows * tokens / seconds}

    serve(once, channel)


if __name__ == "__main__":
    main()
