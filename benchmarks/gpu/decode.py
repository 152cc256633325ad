"""Decoding with 4B in bfloat16: the local engine with 64 and 256 rows against the limit by bytes, new weights to it,
and `generate` of transformers."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.forecast import Forecast, kind_here
from benchmarks.gpu.record import Record, part_options, release
from benchmarks.gpu.sizes import SMALL, WHOLE, config_of, drawn_model
from benchmarks.side import clock, device
from proxima.config.sections.model import ModelConfig
from proxima.data.flow import Prompt
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.pretrained import LoadedModel

ROWS = (64, 256)
GROUP = 8  # completions of a prompt
CASE = 30.0  # seconds: an engine is built, records its graphs and decodes twice


def requests(rows: int, prompt: int, tokens: int, vocabulary: int, seed: int) -> list[Request]:
    """`rows` completions, `GROUP` of a prompt."""
    draw = np.random.default_rng(seed)
    group = min(GROUP, rows)
    sampling = Sampling(max_tokens=tokens)
    asked = []
    for uid in range(rows // group):
        words = tuple(draw.integers(3, vocabulary, prompt).tolist())
        question = Prompt(uid=uid, messages=(), tokens=words)
        asked += [Request(prompt=question, sample=i, sampling=sampling, seed=seed) for i in range(group)]
    return asked


def engine_of(loaded: LoadedModel, rows: int) -> LocalEngine:
    """The engine in this process, with as many slots."""
    return LocalEngine(loaded, Local(slots=rows, dtype="bfloat16"))


def decoded(record: Record, loaded: LoadedModel, plan: Forecast, rows: int, prompt: int, tokens: int) -> None:
    """Seconds of a decode step: those of all tokens, without those up to the first."""
    engine, vocabulary = engine_of(loaded, rows), plan.config.vocab_size

    def seconds(count: int, seed: int) -> float:
        asked = requests(rows, prompt, count, vocabulary, seed)
        start = clock()
        made = asyncio.run(collect(engine, asked))
        took = clock() - start
        if any(len(completion.tokens) != count for completion in made):
            raise RuntimeError("a completion has ended early")
        return took

    seconds(tokens, 1)  # graphs are recorded at each length
    step = (seconds(tokens, 2) - seconds(1, 3)) / (tokens - 1)
    context = prompt + tokens / 2
    planned, least = plan.decode_step(rows, context), plan.decode_limit(rows, context)
    record.figure(f"4B, {rows} rows: a decode step", 1e3 * step, "ms", predicted=1e3 * planned)
    record.figure(f"4B, {rows} rows: tokens a second", rows / step, "tokens/s", predicted=rows / planned)
    record.figure(f"4B, {rows} rows: share of the limit by bytes", least / step, "", predicted=least / planned)


def published(record: Record, loaded: LoadedModel, plan: Forecast) -> None:
    """New weights to the engine in this process."""
    engine = engine_of(loaded, GROUP)
    model: Any = loaded.model
    times = []
    for version in (1, 2, 3):
        start = clock()
        asyncio.run(engine.publish(WeightUpdate(version=version, module=model)))
        times.append(clock() - start)
    record.figure(
        "4B: new weights to the engine in the process", min(times[1:]), "s", predicted=plan.publish(in_process=True)
    )


def generated(record: Record, loaded: LoadedModel, rows: int, prompt: int, tokens: int) -> None:
    """The same with `generate`."""
    model: Any = loaded.model
    vocabulary = model.config.vocab_size
    asked = requests(rows, prompt, tokens, vocabulary, 2)
    ids = torch.tensor([np.asarray(request.prompt.tokens).tolist() for request in asked], device=device())
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "pad_token_id": 0}

    def seconds(count: int) -> float:
        start = clock()
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)
        if made.shape[1] != prompt + count:
            raise RuntimeError("a completion has ended early")
        return clock() - start

    seconds(2)
    step = (seconds(tokens) - seconds(1)) / (tokens - 1)
    record.figure(f"4B, {rows} rows: a step of `generate`", 1e3 * step, "ms")


def main() -> None:
    record, rehearse = part_options("decode")
    if rehearse:
        torch.set_num_threads(1)
    config = config_of("4B", rehearse=rehearse)
    prompt, tokens = (6, 4) if rehearse else (256, 128)
    spec = ModelConfig(path="", compute_dtype="bfloat16")
    plan = Forecast(config, spec, SMALL if rehearse else WHOLE)
    room = 2.5 * 2 * plan.model.parameters / 2**30  # the weights, the engine's copy of them, and the cache
    if torch.cuda.is_available() and room > kind_here().memory:
        record.leave_out("4B", f"needs {room:.0f} GiB")
        return
    loaded = drawn_model(config, dtype=torch.bfloat16)
    for rows in (8, 16) if rehearse else ROWS:
        own = partial(decoded, record, loaded, plan, rows, prompt, tokens)
        record.case(f"4B, {rows} rows", CASE, own)
    record.case("4B: new weights to the engine in the process", CASE / 2, partial(published, record, loaded, plan))
    release()
    rows = 8 if rehearse else ROWS[0]
    record.case("4B: `generate`", CASE, partial(generated, record, loaded, rows, prompt, 4 if rehearse else 32))


if __name__ == "__main__":
    main()
