"""A model without training: evaluate it, or let it answer. What `proxima eval` and `proxima generate` call."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from proxima.data import Completion, FieldError, Message, Prompt
from proxima.engine.local import Local, LocalEngine, collect
from proxima.engine.protocol import EngineSetup, Request, Sampling
from proxima.model import load
from proxima.runtime.build import load_model, load_run_data, make_evaluation, make_rewards
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.held_out import summarise
from proxima.runtime.interrupt import quiet_transformers
from proxima.runtime.observer import NullObserver, Observer
from proxima.task.prompts import prompt_tokens

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


def evaluate(config: "RunConfig", *, observer: Observer | None = None, clock: Clock | None = None) -> dict[str, Any]:
    """Evaluate `config.model` on `config.eval`; nothing is written.

    Returns: the record (accuracy, correct, questions …), and `groups`, a list of `Group` with every answer.

    Raises:
        ValueError: no held-out task, or as `train`.
    """
    observer, clock = observer or NullObserver(), clock or SystemClock()
    if config.eval.task is None:
        remedy = "name a task, for example eval.task.kind=gsm8k"
        raise FieldError("eval.task", None, "leaves nothing to evaluate", remedy=remedy)
    with quiet_transformers():
        opened = load_run_data(config)
        loaded = load_model(config)
        rewards = make_rewards(config)
        try:
            engine = config.engine.build(EngineSetup.of(loaded, max_length=opened.max_length))
            evaluation = make_evaluation(config, opened, engine, rewards, observer, clock)
            began = clock.now()
            groups = asyncio.run(evaluation.groups())
        finally:
            rewards.close()
    return {
        "kind": "eval",
        "model": config.model.path,
        "seconds": clock.now() - began,
        **summarise(groups),
        "groups": groups,
    }


def generate(
    path: str,
    questions: Sequence[str],
    *,
    sampling: Sampling,
    samples: int = 1,
    system: str | None = None,
    seed: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    device: str = "auto",
) -> tuple[list[Completion], float]:
    """Answers of a model (a path, or a run folder's last checkpoint) through the local engine.

    Returns: `samples` completions for each question, in order, and the seconds that generation took.
    """
    with quiet_transformers():
        loaded = load(path, dtype=torch.float32, device=device)
    chats: list[tuple[Message, ...]] = [_chat(question, system) for question in questions]
    prompts = [
        Prompt(uid=i, messages=chat, tokens=prompt_tokens(chat, loaded.tokenizer)) for i, chat in enumerate(chats)
    ]
    engine = LocalEngine(loaded, Local(dtype=dtype))
    requests = [Request(prompt=p, sample=s, sampling=sampling, seed=seed) for p in prompts for s in range(samples)]
    clock = SystemClock()
    began = clock.now()
    completions = asyncio.run(collect(engine, requests))
    return completions, clock.now() - began


def _chat(question: str, system: str | None) -> tuple[Message, ...]:
    user: Message = {"role": "user", "content": question}
    return (user,) if system is None else ({"role": "system", "content": system}, user)
