"""Our side: the local engine, as a run uses it."""

import asyncio

from benchmarks.decode_vs_hf.prompts import prompts, without_end
from benchmarks.side import Channel, argument, clock, device, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.data.flow import Prompt
    from proxima.engine.local.local_engine import Local, LocalEngine, collect
    from proxima.engine.protocol import Request, Sampling
    from proxima.model.load import load

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    tokens = prompts(loaded.tokenizer, settings["prompts"])
    without_end(loaded.model, loaded.tokenizer)
    engine = LocalEngine(loaded, Local(slots=settings["rows"], dtype=settings["dtype"]))
    asked = [Prompt(uid=i, messages=(), tokens=tuple(ids)) for i, ids in enumerate(tokens)]
    sampling = Sampling(max_tokens=settings["tokens"])
    seed = 0

    def once() -> dict[str, float]:
        nonlocal seed
        seed += 1
        samples = range(settings["rows"] // settings["prompts"])
        requests = [Request(prompt=prompt, sample=i, sampling=sampling, seed=seed) for prompt in asked for i in samples]
        start = clock()
        completions = asyncio.run(collect(engine, requests))
        seconds = clock() - start
        made = sum(len(completion.tokens) for completion in completions)
        return {"seconds": seconds, "tokens": made, "rate": made / seconds}

    serve(once, channel, parameters=loaded.parameters, decoder=type(engine.scheduler.decoder).__name__)


if __name__ == "__main__":
    main()
