"""Laws of servers, each checked on its own: features that a run needs beyond the engine protocol. The spec of a case is
a `BareServer`; its model, if it has one, is that of the folder `setup.model_path`.

The laws in `CONTROL_LAWS` pause the server and load weights: they disturb its other users.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from proxima.engine.http.client import ServerClient
from proxima.engine.http.dialect import Chunk, TokenRequest, WeightHandover
from proxima.engine.protocol import Sampling
from proxima.laws.bare_server import joined, whole_answer
from proxima.laws.engine_case import SECONDS, EngineUnderTest, mean_off
from proxima.laws.law import Law, require_that

PROMPT = tuple(3 + 5 * i % 50 for i in range(11))
LABEL = "proxima-check"
TEXTS = (  # texts on which tokenizers differ
    "What is 17 + 25?",
    "  two spaces,\ttab\nand\r\nlines \n\n",
    "naïve café, Straße, ﬁ, e\u0301",
    "数学は楽しい。 Привет, мир! שלום",
    "🙂👩‍👩‍👧 ‍",
    "def f(x):\n    return x**2  # 1_000.5e-3",
    "<|im_start|>user\n<|im_end|></s><s>[INST]",
    "1234567890 3.14159 ½ ²",
)


async def token_ids(case: EngineUnderTest, client: ServerClient) -> None:
    """The server returns token ids, and a finite log-prob with each."""
    log_probs = case.spec.facts.log_probs
    require_that(log_probs is not None, "the log-probs of sampled tokens do not come, or of what is unknown")
    answer = await whole_answer(case.spec, client, asked("ids", temperature=1.0))
    require_that(bool(np.isfinite(answer.log_prob).all()), "log-probs are not finite")


async def stop_tokens(case: EngineUnderTest, client: ServerClient) -> None:
    """A stop token ends a completion and is its last token."""
    free = (await whole_answer(case.spec, client, asked("free", temperature=0.0))).tokens
    at = next((i for i in range(1, len(free)) if free[i] not in free[:i]), None)
    require_that(at is not None, "the greedy completion repeats one token")
    assert at is not None
    stop = (int(free[at]),)
    answer = await whole_answer(case.spec, client, asked("stopped", temperature=0.0, stop_tokens=stop))
    require_that(answer.finish_reason == "stop", f"finish_reason {answer.finish_reason!r} at the stop token {free[at]}")
    require_that(int(answer.tokens[-1]) == free[at], "the stop token is not the last of the completion")
    require_that(free[at] not in answer.tokens[:-1], "tokens come after the stop token")


async def _read(
    case: EngineUnderTest, client: ServerClient, request: TokenRequest, chunks: list[Chunk], news: asyncio.Event
) -> None:
    """Append the chunks of a completion to `chunks` as they arrive, and set `news` for each."""
    async for chunk in case.spec.dialect.stream(client, case.spec.facts, request):
        chunks.append(chunk)
        news.set()


async def seeds(case: EngineUnderTest, client: ServerClient) -> None:
    """The same request with the same seed gives the same tokens."""
    requests = [asked(f"seed-{i}", seed=seed) for i, seed in enumerate((9, 9, 10))]
    first, second, other = [(await whole_answer(case.spec, client, request)).tokens for request in requests]
    require_that(np.array_equal(first, second), "the same seed gave other tokens")
    require_that(not np.array_equal(first, other), "another seed gave the same tokens")


async def vocabulary(case: EngineUnderTest, client: ServerClient) -> None:
    """The server's tokenizer gives the same ids as the model's."""
    differ = []
    for text in TEXTS:
        ids = await case.spec.dialect.tokenize(client, case.spec.facts, text)
        if ids != list(case.setup.tokenizer(text, add_special_tokens=False).input_ids):
            differ.append(text)
    require_that(not differ, f"{len(differ)} of {len(TEXTS)} texts have other ids, {differ[:1]!r} for one")


async def spans(case: EngineUnderTest, client: ServerClient) -> None:
    """The version spans of a completion cover each of its tokens exactly once."""
    check_spans(await whole_answer(case.spec, client, asked("spans", chunk_tokens=3)))


async def pauses_of_server(case: EngineUnderTest, client: ServerClient) -> None:
    """A pause with mode `keep` stops the tokens until the server resumes; one with `abort` ends running requests."""
    dialect, facts = case.spec.dialect, case.spec.facts
    for mode in ("abort", "keep"):
        seen: list[Chunk] = []
        begun = asyncio.Event()
        task = asyncio.create_task(_read(case, client, asked(f"pause-{mode}", max_tokens=200), seen, begun))
        await asyncio.wait_for(begun.wait(), case.spec.seconds)
        await dialect.pause(client, facts, mode)
        try:
            if mode == "abort":
                await asyncio.wait_for(task, case.spec.seconds)
            else:
                await dialect.health(client, facts)  # answers come in order: everything sent before has arrived
                held = len(joined(seen).tokens)
                for _ in range(3):
                    await dialect.health(client, facts)
                require_that(len(joined(seen).tokens) <= held + 1, "tokens come while the server is paused")
        finally:
            await dialect.resume(client, facts)
        await asyncio.wait_for(task, SECONDS)
        reason, expected = seen[-1].finish_reason, "abort" if mode == "abort" else "length"
        require_that(reason == expected, f"finish_reason {reason!r} after a pause with {mode}")


async def loaded_weights(case: EngineUnderTest, client: ServerClient) -> None:
    """Loaded weights get their version, later completions carry it, and log-probs stay the same, because the server
    already has these weights."""
    dialect, facts = case.spec.dialect, case.spec.facts
    folder = Path(case.setup.model_path)  # which holds the weights that the server should have
    probe = np.asarray(PROMPT, np.int32)
    before = await dialect.score(client, facts, probe[:4], probe[4:])
    await dialect.pause(client, facts, "abort")
    try:
        handover = WeightHandover(version=1, label=LABEL, folder=folder.resolve())
        await dialect.load_weights(client, facts, handover)
        await dialect.reset_prefix_cache(client, facts, running=False)
    finally:
        await dialect.resume(client, facts)
    version = (await dialect.health(client, facts)).weight_version
    require_that(version == LABEL, f"the version is {version!r} after {LABEL!r} was loaded")
    answer = await whole_answer(case.spec, client, asked("after"))
    if facts.version_spans:
        require_that({span[0] for span in check_spans(answer)} == {LABEL}, "completions carry another version")
    off = mean_off(await dialect.score(client, facts, probe[:4], probe[4:]), before)
    require_that(off < 0.5, f"log-probs moved by {off:.3g} nats: the server had other weights than {folder}")


def check_spans(answer: Chunk) -> tuple[tuple[str, int, int], ...]:
    """The spans; `Violation` unless they cover each token exactly once."""
    spans = answer.version_spans
    require_that(bool(spans), "no version spans at the end of a completion")
    assert spans is not None
    edges = [0, *(end for _, _, end in spans)]
    covered = [start for _, start, _ in spans] == edges[:-1] and edges[-1] == len(answer.tokens)
    require_that(covered, f"version spans {spans} for {len(answer.tokens)} tokens")
    return spans


def asked(
    name: str, *, stop_tokens: tuple[int, ...] = (), seed: int | None = None, chunk_tokens: int = 1, **sampling: Any
) -> TokenRequest:
    """A request for a fixed prompt."""
    return TokenRequest(
        id=f"proxima-check-{name}",
        tokens=PROMPT,
        sampling=Sampling(**({"max_tokens": 16} | sampling)),
        seed=seed,
        stop_tokens=stop_tokens,
        chunk_tokens=chunk_tokens,
    )


def _has_tokenizer(case: EngineUnderTest) -> str | None:
    return "no tokenizer to compare with: give --model FOLDER" if case.model is None else None


ABSENT = {  # features that a server may lack, and the message for each
    "pauses": "it can't be paused",
    "seeds": "it has no seeds",
    "version_spans": "it does not report which weights sampled which token; proxima counts by itself",
}


def _has(fact: str) -> Callable[[EngineUnderTest], str | None]:
    return lambda case: None if getattr(case.spec.facts, fact) else ABSENT[fact]


def _loads(case: EngineUnderTest) -> str | None:
    if case.model is None:
        return "no weights to load: give --model FOLDER"
    return None if case.spec.facts.takes_weights else "the server takes no weights"


def _with_client(case: EngineUnderTest, use: Callable[[ServerClient], Awaitable[Any]]) -> Any:
    async def used() -> Any:
        async with case.spec.connect() as client:
            return await asyncio.wait_for(use(client), SECONDS)

    return asyncio.run(used())


def server_law(name: str, consequence: str, check: Callable[..., Awaitable[None]], **more: Any) -> Law:
    """The law that `check(case, client)` passes."""
    return Law(name, consequence, lambda case, _: _with_client(case, partial(check, case)), **more)


SERVER_LAWS = (
    server_law("token_ids", "the trainer reads wrong tokens", token_ids),
    server_law("tokenizer", "prompts and completions mean something else", vocabulary, applies=_has_tokenizer),
    server_law("stop_tokens", "completions run on after their end", stop_tokens),
    server_law("seeds", "a completion that is asked for again is another one", seeds, applies=_has("seeds")),
    server_law("version_spans", "the age of the data is unknown", spans, applies=_has("version_spans")),
)
CONTROL_LAWS = (
    server_law("pause", "tokens are sampled while the weights change", pauses_of_server, applies=_has("pauses")),
    server_law("weights", "the data comes from other weights than it says", loaded_weights, applies=_loads),
)
