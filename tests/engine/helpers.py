"""Engines over tiny models, requests, and the trainer's word on what they gave."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxima.data.flow import Completion, Prompt
from proxima.data.trajectory import Trajectory
from proxima.engine.local.general_decoder import RecomputeDecoder
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Engine, Request, Sampling, ScoreRequest
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel, UnloadedModel
from tests.model.rows import ids, loaded

copied = cache(loaded)  # what engines copy from


def engine(
    model: str | LoadedModel = "llama",
    decoder: str = "auto",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_length: int | None = None,
    **settings,
) -> LocalEngine:
    """Over the tiny model of this kind, or the model."""
    spec = Local(
        **{"slots": 8, "dtype": str(dtype).removeprefix("torch.")} | settings,
        decoder="general" if decoder == "recompute" else decoder,
    )
    model = copied(model, seed) if isinstance(model, str) else model
    engine = LocalEngine(model, spec, max_length=max_length)
    if decoder == "recompute":
        engine.scheduler.decoder = RecomputeDecoder(model.model, dtype)
        engine.scheduler.cache = engine.scheduler.decoder.new_cache(engine.scheduler.slots)
    return engine


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def saved(loaded: LoadedModel, folder: Path) -> Path:
    """A model and its tokenizer as files, for a server or a command that reads a folder."""
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def unloaded(path: str = "m", tokenizer: Any = None, context: int = 64) -> UnloadedModel:
    config: Any = None
    return UnloadedModel(path=path, revision=None, config=config, tokenizer=tokenizer, context=context)


def prompt(uid: int, length: int = 5) -> Prompt:
    return Prompt(uid=uid, messages=(), tokens=ids(length, 7000 + uid))


def requests(prompts: int = 3, samples: int = 4, *, seed: int = 1, first: int = 0, **sampling) -> list[Request]:
    """Prompts of 3, 8, 13, 18, 3 … tokens, `samples` completions each."""
    chosen = Sampling(**({"max_tokens": 20} | sampling))
    made_prompts = [prompt(first + i, 3 + 5 * (i % 4)) for i in range(prompts)]
    return [Request(prompt=p, sample=s, sampling=chosen, seed=seed) for p in made_prompts for s in range(samples)]


def checked_leaders(engine: LocalEngine) -> list[tuple[int, ...]]:
    """How many positions each row has in common with its leader, at each step from now on, where all have the same
    bits."""
    counts, decoder = [], engine.scheduler.decoder
    run_step = decoder.step

    def step(tokens, position, cache, *more):
        for row, (leader, common) in enumerate(cache.leaders.T.tolist()):
            assert not common or (leader < row < len(engine.scheduler.running) and common <= position[row])
            for layer in cache.layers:
                assert torch.equal(layer[:, row, :, :common], layer[:, leader, :, :common])
        counts.append(tuple(cache.leaders[1].tolist()))
        return run_step(tokens, position, cache, *more)

    decoder.step = step
    return counts


async def steps(engine: LocalEngine, count: int) -> None:
    """Let the engine decode about so many tokens: its thread takes turns between its callers and us."""
    for _ in range(count):
        await asyncio.sleep(0)
        await engine.compute.run(int)


def run(engine: LocalEngine, asked: Sequence[Request]) -> list[Completion]:
    return asyncio.run(collect(engine, asked))


@cache
def trainer(kind: str, seed: int, dtype: torch.dtype) -> Policy:
    """Only to be asked for log-probs."""
    return Policy(loaded(kind, seed), compute_dtype=dtype)


def trainer_log_prob(
    kind: str,
    asked: Sequence[Request],
    given: Sequence[Completion],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return policy_log_prob(trainer(kind, seed, dtype), asked, given)


def policy_log_prob(policy: Policy, asked: Sequence[Request], given: Sequence[Completion]) -> Tensor:
    with torch.no_grad():
        return policy(policy.pack(rows_of(asked, given))).log_prob


def rows_of(asked: Sequence[Request], given: Sequence[Completion]) -> list[Trajectory]:
    return [
        Trajectory.of(r.prompt, c, group=i, advantage=0.0) for i, (r, c) in enumerate(zip(asked, given, strict=True))
    ]


def scores(engine: Engine, asked: Sequence[Request], given: Sequence[Completion]) -> Tensor:
    """What the engine says of the tokens that were sampled."""
    pairs = zip(asked, given, strict=True)
    wanted = [ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens, temperature=c.temperature) for r, c in pairs]
    return torch.from_numpy(np.concatenate(asyncio.run(engine.score(wanted))))


def behavior(given: Sequence[Completion]) -> Tensor:
    return torch.tensor([x for c in given for x in c.sampled_log_prob])


def agree(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    """The same tokens, and log-probs that differ by rounding."""
    assert [c.tokens.tolist() for c in ours] == [c.tokens.tolist() for c in theirs]
    torch.testing.assert_close(behavior(ours), behavior(theirs), rtol=0, atol=1e-5)


def untruncated(given: Sequence[Completion]) -> Tensor:
    return torch.tensor([x for c in given for x in c.untruncated_log_prob])
