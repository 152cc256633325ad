"""Answers of a model without training: what `proxima generate` calls."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from proxima.data import Completion, Message, Prompt
from proxima.engine.local import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling
from proxima.model import load
from proxima.model.chat import prompt_tokens
from proxima.runtime.clock import SystemClock
from proxima.runtime.interrupt import quiet_transformers
from proxima.task.prompts import template_note


def generate(
    path: str,
    questions: Sequence[str],
    *,
    sampling: Sampling,
    samples: int = 1,
    system: str | None = None,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: str = "auto",
    warn: Callable[[str], object] = lambda text: None,
) -> tuple[list[Completion], float]:
    """Answers of a model (a path, or a run folder's last checkpoint) through the local engine.

    `warn` is told if the model has no chat template.

    Returns: `samples` completions for each question, in order, and the seconds that generation took.
    """
    with quiet_transformers():
        loaded = load(path, dtype=torch.float32, device=device)
    for note in template_note(loaded.tokenizer, path):
        warn(note)
    first: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
    chats: list[tuple[Message, ...]] = [(*first, {"role": "user", "content": question}) for question in questions]
    prompts = [
        Prompt(uid=i, messages=chat, tokens=prompt_tokens(chat, loaded.tokenizer, template_arguments))
        for i, chat in enumerate(chats)
    ]
    engine = LocalEngine(loaded, Local(dtype=dtype))
    requests = [Request(prompt=p, sample=s, sampling=sampling, seed=seed) for p in prompts for s in range(samples)]
    clock = SystemClock()
    began = clock.now()
    completions = asyncio.run(collect(engine, requests))
    return completions, clock.now() - began
