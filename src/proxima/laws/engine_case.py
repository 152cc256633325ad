"""The test case of the engine laws: an engine, a small model, prompts, and the trainer's forward pass."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from proxima.data.columns import Floats, Ints
from proxima.data.flow import Completion, Prompt
from proxima.engine.protocol import Capabilities, Engine, EngineSetup, Request, Sampling, close_engine
from proxima.laws.law import Law, require_that
from proxima.model.pretrained import LoadedModel

SECONDS = 300.0  # before a law counts as hung
BOUNDS = {"float32": 2e-3, "float16": 0.02}  # nats, mean over tokens, between two forward passes of the same weights
WIDE_BOUND = 0.12  # in bfloat16
QUANTIZED_BOUND = 0.5
LIMIT = 4096  # tokens: longer contexts are not filled


@dataclass(frozen=True)
class EngineUnderTest:
    """The spec of an engine, and the model that it runs.

    Args:
        setup: the setup from which the engine is built.
        model: returns the model in this process with whose forward pass the engine is compared; None: the laws that
            need it are skipped.
        dtype: the dtype of the engine's weights; None: unknown, treated as bfloat16.
        quantized: the weights have fewer bits than `dtype`.
        draws: the number of tokens drawn to compare their frequencies.
    """

    spec: Any
    setup: EngineSetup
    model: Callable[[], LoadedModel] | None = None
    dtype: str | None = None
    quantized: bool = False
    draws: int = 3000

    @property
    def bound(self) -> float:
        """The bound on the mean difference between the engine's and the trainer's log-probs, nats."""
        if self.quantized:
            return QUANTIZED_BOUND
        return BOUNDS.get(self.dtype or "", WIDE_BOUND)

    def reference(self) -> LoadedModel:
        """The model; laws that need one do not apply without."""
        assert self.model is not None
        return self.model()

    def full_length(self) -> int:
        """The most tokens of prompt and completion together."""
        limits = [self.setup.max_length, getattr(self.reference().model.config, "max_position_embeddings", None)]
        return min(limit for limit in limits if limit is not None)


def tiny_model() -> LoadedModel:
    """A Llama of a few thousand random weights, with one token for each of 63 letters and an end token; created without
    any file."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<end>", *(chr(code) for code in range(48, 111))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])),
        eos_token="<end>",
        pad_token="<end>",
    )
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.lm_head.weight.mul_(12)  # logits as far apart as a trained model's: flat logits hide temperatures
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, path="tiny")


def requests(prompts: int = 3, samples: int = 2, **sampling: Any) -> list[Request]:
    """Requests for prompts of different lengths, `samples` each."""
    chosen = Sampling(**({"max_tokens": 12} | sampling))
    wanted: list[Request] = []
    for uid in range(prompts):
        tokens = (np.arange(3 + 2 * uid, dtype=np.int32) * 5 + uid) % 60 + 1
        wanted += requests_of(uid, tokens, samples, 7, chosen)
    return wanted


def requests_of(uid: int, tokens: Sequence[int] | Ints, samples: int, seed: int, sampling: Sampling) -> list[Request]:
    """`samples` requests for one prompt."""
    prompt = Prompt(uid=uid, messages=(), tokens=np.asarray(tokens, np.int32))
    return [Request(prompt=prompt, sample=sample, sampling=sampling, seed=seed) for sample in range(samples)]


async def completions(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    """All completions, in the order of the requests."""
    answered = {completion.key: completion async for completion in engine.generate(wanted)}
    keys = [request.key for request in wanted]
    missing = sorted(set(keys) - set(answered))
    other = sorted(set(answered) - set(keys))
    counts = f"{len(answered)} completions for {len(keys)} requests"
    which = f"missing {missing[:1]}, not requested {other[:1]} (prompt, sample, turn)"
    require_that(not missing and not other, f"{counts}: {which}")
    return [answered[key] for key in keys]


async def ask(engine: Engine, prompt: Sequence[int], samples: int = 1, **sampling: Any) -> list[Completion]:
    """`samples` completions of one prompt."""
    chosen = Sampling(**({"max_tokens": 12} | sampling))
    return await completions(engine, requests_of(0, prompt, samples, 11, chosen))


def forward(model: LoadedModel, prompt: Sequence[int] | Ints, tokens: Sequence[int] | Ints) -> np.ndarray:
    """[T, V] float64 logits before each of `tokens`, by the trainer's forward pass, in the model's own dtype."""
    ids = [*map(int, prompt), *map(int, tokens)]
    with torch.inference_mode():
        logits = model.model(torch.tensor([ids], device=model.model.device), use_cache=False).logits[0].double()
    before: np.ndarray = logits[len(prompt) - 1 : len(ids) - 1].cpu().numpy()
    return before


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[..., V] nats."""
    log_probs: np.ndarray = torch.from_numpy(logits / (temperature or 1.0)).log_softmax(-1).numpy()
    return log_probs


def chosen_of(log_probs: np.ndarray, tokens: Sequence[int] | Ints) -> Floats:
    """[T] the log-probs of the tokens."""
    chosen: Floats = np.take_along_axis(log_probs, np.asarray(tokens, np.int64)[:, None], -1)[:, 0]
    return chosen


def mean_off(actual: np.ndarray, expected: np.ndarray) -> float:
    """The mean absolute difference over the tokens, nats; infinite if it is not finite."""
    if not len(actual):
        return 0.0
    off = float(np.abs(actual - expected).mean())
    return off if np.isfinite(off) else np.inf


def known_capabilities(case: EngineUnderTest) -> Capabilities:
    """The engine's capabilities; an engine is built to find out."""
    engine: Engine = case.spec.build(case.setup)
    close_engine(engine)
    return engine.capabilities


def engine_law(
    name: str,
    consequence: str,
    check: Callable[[EngineUnderTest, Engine], Awaitable[None]],
    *,
    cure: str,
    applies: Callable[[Any], str | None] = lambda spec: None,
    root: bool = False,
) -> Law:
    """The law that `check(case, engine)` passes; the engine is built for it and closed afterwards."""

    async def limited(case: EngineUnderTest) -> None:
        engine = case.spec.build(case.setup)
        try:
            await asyncio.wait_for(check(case, engine), SECONDS)
        finally:
            close_engine(engine)

    return Law(name, consequence, lambda case, _: asyncio.run(limited(case)), applies=applies, cure=cure, root=root)


def needs_model(case: EngineUnderTest) -> str | None:
    """Why an engine can't be compared with a model, or None."""
    if case.model is not None:
        return None
    return "no model to compare with: give --model FOLDER"
