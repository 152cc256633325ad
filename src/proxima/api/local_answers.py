"""Generation with a model outside training, for `proxima generate`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from proxima.data import renamed
from proxima.data.flow import Completion, Message
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling
from proxima.model.chat.written_text import stop_string, written_text
from proxima.model.images.image_store import ImageStore
from proxima.model.load import load
from proxima.model.positions import require_length
from proxima.model.precision import ComputeDtype
from proxima.model.pretrained import load_config, own_stop_tokens, without_progress_bars
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row, user_message
from proxima.task.template_traps import stop_note, template_note

if TYPE_CHECKING:
    from PIL.Image import Image

PIECE_SECONDS = 0.05  # between polls of the answer so far


def local_engine(
    path: str,
    dtype: ComputeDtype,
    device: str,
    warn: Callable[[str], object],
    *,
    max_length: int | None = None,
    images: bool = False,
    stop: Sequence[str] = (),
) -> tuple[Any, LocalEngine]:
    """Load a model; return its tokenizer and a local engine for sequences of at most `max_length` tokens.

    Args:
        path: hub name or folder. dtype: of the engine's computation.
        warn: called with each problem of the chat template, such as an end-of-turn token that neither the model's files
            nor `stop` names.
        max_length: tokens of prompt and completion; None: those of the model.
        images: the tokenizer gets an `ImageStore`, for prompts that show images.
        stop: the stop strings that will be used.

    Raises:
        UserError: the model can't be loaded, or `max_length` is not possible for it.
    """
    store: Any = None
    if images:
        store = ImageStore(path)
    with without_progress_bars():
        with renamed("model.max_length", "--max-length"):
            require_length(load_config(path), max_length)
        loaded = load(path, dtype=torch.float32, device=device, max_length=max_length)
    if store is not None:
        loaded = replace(loaded, tokenizer=store.tokenizer)
    generation = None
    if hasattr(loaded.model, "generation_config"):
        generation = loaded.model.generation_config
    ends = own_stop_tokens(generation, loaded.model.config, loaded.tokenizer)
    notes = stop_note(loaded.tokenizer, ends, stop, stop="--stop={!r:.60}", limit="--max-tokens")
    for note in [*template_note(loaded.tokenizer, path), *notes]:
        warn(note)
    return loaded.tokenizer, LocalEngine(loaded, Local(dtype=dtype), max_length=max_length)


@dataclass
class ShownEngine:
    """A local engine that generates one completion at a time and shows it while it is sampled.

    Args:
        engine, tokenizer: from `local_engine`.
        show: called with each piece of the completion's text, which is shown without the stop string that ends it.

    `tokens` holds the tokens of the current completion so far; it is empty between completions.
    """

    engine: LocalEngine
    tokenizer: Any
    show: Callable[[str], object]
    tokens: Sequence[int] = ()

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion, None]:
        """See `Engine`; takes exactly one request."""
        self.tokens = ()
        (request,) = requests
        answer = asyncio.ensure_future(collect(self.engine, requests))
        shown = 0
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=PIECE_SECONDS)
                if answer.done():
                    break
                for running in await self.engine.in_flight():
                    self.tokens = running.tokens.tolist()
                    text = written_text(self.tokenizer, running.tokens, begun=request.prompt.begun).text
                    certain = self._certain(text, len(request.prompt.begun), request.sampling.stop)
                    if len(certain) > shown:
                        self.show(certain[shown:])
                        shown = len(certain)
        finally:
            answer.cancel()
        (completion,) = await answer
        self.show(completion.text.removesuffix(completion.stopped_by)[shown:])
        self.tokens = ()
        yield completion

    @staticmethod
    def _certain(text: str, begun: int, stop: Sequence[str]) -> str:
        """The part of the text that later tokens can't change: it ends before an incomplete character or a possible
        stop string. The first `begun` characters are the prompt's."""
        if stop_string(text[begun:], stop) is not None or text.endswith("\ufffd"):
            return ""
        return text[: max(begun, len(text) - max(map(len, stop), default=0))]


@dataclass
class ChatSession:
    """A chat with a model, turn by turn.

    Args:
        tokenizer, engine: from `local_engine`.
        system: the system prompt; None: no system prompt.
        messages: the chat so far, without the system prompt.
    """

    tokenizer: Any
    engine: LocalEngine
    sampling: Sampling
    system: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    messages: list[Message] = field(default_factory=list)

    def answer(self, text: str, show: Callable[[str], object]) -> bool:
        """Ask a question, and `show` the pieces of the answer while it is sampled. Returns False if the length limit
        cut the answer off.

        After a KeyboardInterrupt, the text shown so far becomes the model's turn.

        Raises:
            UserError: the chat leaves no room for an answer, or the template refuses it; the chat is then unchanged.
        """
        row = Row(messages=(*self.messages, *user_message(text)))
        prompt = to_prompt(row, len(self.messages), self.tokenizer, self.system, self.template_arguments)
        request = Request(prompt=prompt, sample=0, sampling=self.sampling, seed=self.seed)
        pieces: list[str] = []

        def add(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        try:
            shown: Any = ShownEngine(self.engine, self.tokenizer, add)
            (completion,) = asyncio.run(collect(shown, [request]))
            return completion.finish_reason != "length"
        finally:
            if pieces:
                self.messages += [*user_message(text), {"role": "assistant", "content": "".join(pieces)}]


def generate(
    tokenizer: Any,
    engine: LocalEngine,
    questions: Sequence[str],
    *,
    sampling: Sampling,
    samples: int = 1,
    system: str | None = None,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    images: Sequence["Image"] = (),
) -> list[Completion]:
    """Generate `samples` answers for each question, in order, with tokenizer and engine from `local_engine`. Every
    question shows all images."""
    rows = [Row(messages=user_message(question)) for question in questions]
    if images:
        rows = [Row(messages=tokenizer.images.numbered(row.messages, images)) for row in rows]
    prompts = [to_prompt(row, i, tokenizer, system, template_arguments) for i, row in enumerate(rows)]
    requests: list[Request] = []
    for each in prompts:
        for sample in range(samples):
            requests.append(Request(prompt=each, sample=sample, sampling=sampling, seed=seed))
    return asyncio.run(collect(engine, requests))
