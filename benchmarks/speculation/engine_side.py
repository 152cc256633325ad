"""The local engine with drafts of `num_speculative_tokens` tokens; 0: no drafts."""

import asyncio
import hashlib
import random
from collections.abc import Callable
from typing import Any

from benchmarks.side import Channel, argument, clock, device, serve
from benchmarks.speculation.tasks import TASKS


def main() -> None:
    channel, settings = Channel(), argument()
    import torch

    from proxima.data import Prompt
    from proxima.engine import Local, LocalEngine, Request, Sampling
    from proxima.engine.local import collect
    from proxima.model import load

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    spec = Local(slots=settings["rows"], num_speculative_tokens=settings["num_speculative_tokens"])
    engine, seed = LocalEngine(loaded, spec), 0
    prefill = engine.scheduler.decoder.prefill = Timed(engine.scheduler.decoder.prefill)

    def chat(messages: list[dict[str, str]]) -> tuple[int, ...]:
        ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return tuple(ids[settings["tokens"] - engine.scheduler.max_length :])  # cuts the prompts of a tiny model only

    def once() -> dict[str, Any]:
        nonlocal seed
        seed += 1
        return {task: measured(task) for task in settings["tasks"]}

    def measured(task: str) -> dict[str, Any]:
        draw, rows = random.Random(seed), settings["rows"]
        count = settings["completions"] // rows * rows
        prompts = [Prompt(uid=i, messages=(), tokens=chat(TASKS[task](draw))) for i in range(count // min(8, rows))]
        sampling = Sampling(max_tokens=settings["tokens"])
        requests = [
            Request(prompt=prompt, sample=i, sampling=sampling, seed=seed)
            for prompt in prompts
            for i in range(min(8, rows))
        ]
        before, completions, start, prefill.seconds = _counts(engine), [], clock(), 0.0
        at_once = count if rows == engine.scheduler.slots else rows  # the engine has at least eight slots
        for at in range(0, count, at_once):
            completions += asyncio.run(collect(engine, requests[at : at + at_once]))
        seconds = clock() - start - prefill.seconds
        counts = {name: value - before[name] for name, value in _counts(engine).items()}
        made = b"".join(c.tokens.tobytes() + c.sampled_log_prob.tobytes() for c in completions)
        tokens = sum(len(c.tokens) for c in completions)
        digest = hashlib.sha256(made).hexdigest()[:16]
        return {"seconds": seconds, "tokens": tokens, "rate": tokens / seconds, "digest": digest, **counts}

    measured(settings["tasks"][0])  # to warm up
    serve(once, channel)


class Timed:
    """A function wrapper that sums up the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = clock()
        answer = self.function(*arguments)
        self.seconds += clock() - start
        return answer


def _counts(engine: Any) -> dict[str, int]:
    """Return the counts since the engine started; empty without drafts."""
    return dict(engine.scheduler.detail.get("speculation", {}))


if __name__ == "__main__":
    main()
