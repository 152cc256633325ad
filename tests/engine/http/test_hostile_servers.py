"""What a hostile server can do: each time the run goes on with right completions, or ends with one line."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxima.data import Completion, Prompt, UserError
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.generation_job import CompletionRules
from proxima.engine.http.vllm import Vllm
from proxima.engine.local import collect
from proxima.engine.protocol import Request, Sampling, ScoreRequest
from tests.engine.http.fake_vllm import VOCABULARY, log_softmax, logits_after
from tests.engine.http.raw_server import PAUSE, RawServer

pytestmark = pytest.mark.slow
LONG = 600.0  # seconds after which an engine waits for ever
TCP = Path("/proc/sys/net/ipv4/tcp_rmem")  # its last number is the size that a receive buffer may grow to here
TAKEN = (8 << 20) + (int(TCP.read_text().split()[2]) if TCP.exists() else 32 << 20)  # bytes that may leave the server
OFFERED = TAKEN + (8 << 20)  # bytes of an answer that should be small
Script = Callable[[httpx.Response], AsyncIterator[bytes | None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TO_END = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Words:
    """The tokenizer of the fake."""

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


class NoSync:
    async def close(self) -> None: ...


# ---- scripts ---------------------------------------------------------------------------------------------------------


def raw(*parts: bytes | Callable[[], bytes] | None) -> Script:
    """These bytes, or what a function gives, whatever was asked."""

    async def script(good: httpx.Response) -> AsyncIterator[bytes | None]:
        for part in parts:
            yield part() if callable(part) else part

    return script


def status(code: int, body: bytes = b'{"error": {"message": "on purpose"}}', head: bytes = b"") -> Script:
    return raw(b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s" % (code, head, len(body), body))


def endless(head: bytes, part: bytes, size: int = OFFERED) -> Script:
    async def script(good: httpx.Response) -> AsyncIterator[bytes | None]:
        yield head
        for _ in range(size // len(part)):
            yield part

    return script


def drip(part: bytes, seconds: float) -> Script:
    async def script(good: httpx.Response) -> AsyncIterator[bytes | None]:
        while True:
            yield part
            await asyncio.sleep(seconds)

    return script


def encoded(name: bytes, content: bytes | Callable[[], bytes]) -> Script:
    return raw(TO_END[:-2] + b"Content-Encoding: " + name + b"\r\n\r\n", content)


def text(change: Callable[[str], str | bytes], head: bytes = TO_END) -> Script:
    """The good body, changed as text."""

    async def script(good: httpx.Response) -> AsyncIterator[bytes | None]:
        changed = change(good.text)
        yield head + (changed.encode(errors="surrogatepass") if isinstance(changed, str) else changed)

    return script


def event(change: Callable[[dict[str, Any]], Any]) -> Script:
    """The good event, changed."""

    def changed(whole: str) -> str:
        body = json.loads(next(line for line in whole.splitlines() if line.startswith("data: {"))[6:])
        result = change(body)
        return f"data: {json.dumps(body if result is None else result)}\n\ndata: [DONE]\n\n"

    return text(changed)


def answer(change: Callable[[dict[str, Any]], Any]) -> Script:
    """The good answer that is no stream, changed."""

    def changed(whole: str) -> str:
        body = json.loads(whole)
        result = change(body)
        return json.dumps(body if result is None else result)

    return text(changed)


def choice(**fields: Any) -> Script:
    return event(lambda body: body["choices"][0].update(fields))


def first_token(token: Any) -> Script:
    """Another first token, in both places."""

    def change(body: dict[str, Any]) -> None:
        choice = body["choices"][0]
        choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = token

    return event(change)


def first_log_prob(value: Any) -> Script:
    return event(lambda body: body["choices"][0]["logprobs"]["content"][0].update(logprob=value))


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@cache
def bomb(name: str = "gzip") -> bytes:
    return (gzip if name == "gzip" else zlib).compress(b"x" * OFFERED, 9)


STREAM: dict[str, Script] = {
    # status lines
    **{f"status {code}": status(code) for code in (204, 206, 304, 400, 404, 405, 413, 422, 500, 501, 502, 504, 599)},
    "refuses with 401": status(401),
    "refuses with 403 and the key": status(403, b"your key is sk-something\x1b[2J"),
    "busy": status(429),
    "busy for ever": status(429, head=b"Retry-After: 999999999\r\n"),
    "busy until a date": status(429, head=b"Retry-After: Wed, 21 Oct 2099 07:28:00 GMT\r\n"),
    "busy for minus one": status(429, head=b"Retry-After: -1\r\n"),
    "busy and unavailable": status(503, head=b"Retry-After: 0\r\n"),
    "redirects": status(307, head=b"Location: http://127.0.0.1:1/there\r\n"),
    "redirects to nonsense": status(302, head=b"Location: http://[::\r\n"),
    "redirects nowhere": status(301),
    "an error of megabytes": endless(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % OFFERED, b"x" * 65536),
    "an error that is a gzip bomb": raw(b"HTTP/1.1 500 X\r\nContent-Encoding: gzip\r\n\r\n", bomb),
    "status 42": raw(b"HTTP/1.1 42 X\r\n\r\n"),
    "status of four digits": raw(b"HTTP/1.1 2000 OK\r\n\r\n"),
    # headers
    "closes at once": raw(),
    "closes in the headers": raw(b"HTTP/1.1 200 OK\r\nContent-Ty"),
    "hangs before the headers": raw(PAUSE),
    "drips its headers": drip(b"H", 0.02),
    "a header of 200 KB": raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"),
    "endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1000),
    "endless 1xx": drip(b"HTTP/1.1 102 Processing\r\n\r\n", 0.001),
    "header bytes that are none": raw(b"HTTP/1.1 200 OK\r\n\x00\xff: \xfe\r\n\r\n"),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "HTTP/0.9": raw(b"data: hello\n\n"),
    "HTTP/2": raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "cookies": status(200, head=b"Set-Cookie: a=%s\r\n" % (b"x" * 50_000)),
    "switches protocols": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"),
    # framing
    "headers and then nothing": raw(CHUNKED, PAUSE),
    "headers and the end": raw(CHUNKED),
    "a chunk size that is none": raw(CHUNKED, b"zz\r\nhello\r\n"),
    "a chunk of 2^64": raw(CHUNKED, b"FFFFFFFFFFFFFFFF\r\n", PAUSE),
    "a chunk header without end": endless(CHUNKED, b"1;" + b"x" * 4096),
    "trailers without end": endless(CHUNKED + b"0\r\n", b"X-A: b\r\n" * 1000),
    "a negative length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello"),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
    "less than its length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\ndata: {}\n"),
    "more than its length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"),
    "a gigabyte announced": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", b"x" * 65536),
    "HTTP/1.0, whole": text(lambda whole: whole, b"HTTP/1.0 200 OK\r\n\r\n"),
    "another content type, whole": text(lambda whole: whole, TO_END.replace(b"text/event-stream", b"image/png")),
    # size
    "a line without end": endless(TO_END, b"x" * 65536),
    "an event without end": endless(TO_END + b'data: {"choices": "', b"x" * 65536),
    "comments without end": endless(TO_END, b": still here\n" * 5000),
    "blank lines without end": endless(TO_END, b"\n\n\n".ljust(60) * 1000),
    "empty events without end": endless(TO_END, b'data: {"choices": []}'.ljust(198) + b"\n\n"),
    "a gzip bomb": encoded(b"gzip", bomb),
    "a deflate bomb": encoded(b"deflate", lambda: bomb("deflate")),
    "says gzip, is none": encoded(b"gzip", b"data: [DONE]\n\n"),
    "says br": encoded(b"br", b"\x00" * 100),
    # lines
    "no DONE": text(lambda whole: whole.replace("data: [DONE]\n\n", "")),
    "DONE alone": text(lambda whole: "data: [DONE]\n\n"),
    "DONE twice, and more after it": text(lambda whole: whole + "data: [DONE]\n\ndata: {\n\n"),
    "cut in the middle": text(lambda whole: whole[: len(whole) // 2]),
    "CRLF": text(lambda whole: whole.replace("\n", "\r\n")),
    "CR": text(lambda whole: whole.replace("\n", "\r")),
    "a byte order mark": text(lambda whole: b"\xef\xbb\xbf" + whole.encode()),
    "UTF-16": text(lambda whole: whole.encode("utf-16")),
    "bytes that are no text": text(lambda whole: whole.encode().replace(b"choices", b"\xff\xfe")),
    "the event twice": text(lambda whole: whole.split("data: [DONE]")[0] * 2 + "data: [DONE]\n\n"),
    # JSON
    "no JSON": text(lambda whole: "data: hello\n\ndata: [DONE]\n\n"),
    "HTML": text(lambda whole: "<!DOCTYPE html><title>Sign in</title>"),
    "a list": text(lambda whole: "data: []\n\ndata: [DONE]\n\n"),
    "100,000 levels": text(lambda whole: f"data: {deep(100_000)}\n\ndata: [DONE]\n\n"),
    "100,000 levels within": text(lambda whole: f'data: {{"choices": {deep(100_000)}}}\n\ndata: [DONE]\n\n'),
    "800 levels within": text(lambda whole: f'data: {{"choices": [{{"token_ids": {deep(800)}}}]}}\n\ndata: [DONE]\n\n'),
    "an error of 800 levels": text(lambda whole: f'data: {{"error": {deep(800)}}}\n\ndata: [DONE]\n\n'),
    "a number of 5,000 digits": text(lambda whole: whole.replace('"logprob": -', '"logprob": -' + "9" * 5000, 1)),
    "an error": event(lambda message: {"error": {"message": "out of memory"}}),
    "an error of escapes": event(lambda message: {"error": "\x1b[2J\x00\ud800\n\nTraceback"}),
    "an error of 200 KB": event(lambda message: {"error": {"message": "x" * 200_000}}),
    # fields
    "no choices": event(lambda message: {"detail": "quota exceeded"}),
    "choices null": event(lambda message: message.update(choices=None)),
    "choices a text": event(lambda message: message.update(choices="none")),
    "choices a number": event(lambda message: message.update(choices=7)),
    "no token_ids": event(lambda message: message["choices"][0].pop("token_ids")),
    "token_ids a text": choice(token_ids="1234"),
    "token_ids a mapping": choice(token_ids={"0": 1}),
    "two choices": event(lambda message: message["choices"].append(message["choices"][0])),
    "token true": first_token(True),
    "token 1.0": first_token(1.0),
    'token "1"': first_token("1"),
    "token null": first_token(None),
    "token -1": first_token(-1),
    "token 2^40": first_token(2**40),
    "token 10^30": first_token(10**30),
    "a token beyond the vocabulary": first_token(VOCABULARY),
    "log-prob true": first_log_prob(True),
    "log-prob false": first_log_prob(False),
    'log-prob "-1"': first_log_prob("-1"),
    "log-prob null": first_log_prob(None),
    "log-prob NaN": first_log_prob(float("nan")),
    "log-prob infinity": first_log_prob(float("inf")),
    "log-prob minus infinity": first_log_prob(float("-inf")),
    "log-prob 10^400": first_log_prob(-(10**400)),
    "log-prob 0.5": first_log_prob(0.5),
    "log-prob -9999": first_log_prob(-9999.0),
    "too few log-probs": event(lambda message: message["choices"][0]["logprobs"]["content"].pop()),
    "log-probs of other tokens": event(lambda message: message["choices"][0]["logprobs"]["content"].reverse()),
    "no log-probs": choice(logprobs=None),
    "log-probs a text": choice(logprobs="none"),
    "another prompt's answer": event(lambda message: message.update(prompt_token_ids=[1, 2, 3])),
    "no prompt": event(lambda message: message.pop("prompt_token_ids")),
    "an empty prompt": event(lambda message: message.update(prompt_token_ids=[])),
    "a prompt of booleans": event(lambda message: message.update(prompt_token_ids=[True, True])),
    "a prompt in quotes": event(lambda message: message.update(prompt_token_ids="5, 6")),
    "too many tokens": event(lambda message: _repeat(message, 3)),
    "too few tokens for its length": event(lambda message: _cut(message, 2)),
    "a stop without a stop token": choice(finish_reason="stop"),
    "no end": choice(finish_reason=None),
    "an end that is none": choice(finish_reason="tired"),
    "an end that is a list": choice(finish_reason=["length"]),
    "an abort": choice(finish_reason="abort"),
    "versions of other weights": choice(weight_versions=[{"version": "other", "start": 0, "end": 4}]),
    "versions of some tokens": choice(weight_versions=[{"version": "default", "start": 0, "end": 2}]),
    "versions that overlap": choice(weight_versions=[{"version": "default", "start": 0, "end": 4}] * 2),
    "versions of booleans": choice(weight_versions=[{"version": "default", "start": False, "end": 4}]),
    "versions that are none": choice(weight_versions="default"),
    "masks that nobody asked for": choice(sampling_mask=[[True]]),
}

ANYWHERE: dict[str, Script] = {
    "megabytes": endless(TO_END, b" " * 65536),
    "deep": text(lambda whole: deep(100_000)),
    "refused": status(403),
}

MODELS = ANYWHERE | {
    "another model": answer(lambda message: message["data"][0].update(id="other")),
    "no model": answer(lambda message: message.update(data=[])),
    "models a mapping": answer(lambda message: message.update(data={})),
    "no data": answer(lambda message: {"detail": "no"}),
    "an id of 1 MB": answer(lambda message: message["data"][0].update(id="x" * 1_000_000)),
    "an id that is a number": answer(lambda message: message["data"][0].update(id=7)),
    "an id of escapes": answer(lambda message: message["data"][0].update(id="\x1b[2J\n")),
    "a length of true": answer(lambda message: message["data"][0].update(max_model_len=True)),
    "a length of -5": answer(lambda message: message["data"][0].update(max_model_len=-5)),
    "a length in quotes": answer(lambda message: message["data"][0].update(max_model_len="64")),
    "empty": text(lambda whole: ""),
    "HTML": text(lambda whole: "<html>"),
    "null": text(lambda whole: "null"),
    "hangs": raw(PAUSE),
    "busy": status(429),
    "a gzip bomb": encoded(b"gzip", bomb),
}

WEIGHTS = ANYWHERE | {
    "another version": answer(lambda message: message.update(weight_version="other")),
    "version true": answer(lambda message: message.update(weight_version=True)),
    "version null": answer(lambda message: message.update(weight_version=None)),
    "no version": answer(lambda message: {}),
    "a version of 1 MB": answer(lambda message: message.update(weight_version="x" * 1_000_000)),
    "a list": text(lambda whole: "[]"),
}

SCORES = ANYWHERE | {
    "no log-probs": answer(lambda message: message.pop("prompt_logprobs")),
    "log-probs a mapping": answer(lambda message: message.update(prompt_logprobs={})),
    "too few": answer(lambda message: message["prompt_logprobs"].pop()),
    "of other tokens": answer(lambda message: _rows(message, lambda row: {"999": {"logprob": -1.0}})),
    "in quotes": answer(lambda message: _rows(message, lambda row: {key: {"logprob": "-1"} for key in row})),
    "true": answer(lambda message: _rows(message, lambda row: {key: {"logprob": False} for key in row})),
    "NaN": answer(lambda message: _rows(message, lambda row: {key: {"logprob": float("nan")} for key in row})),
    "above 0": answer(lambda message: _rows(message, lambda row: {key: {"logprob": 0.5} for key in row})),
    "a gzip bomb": encoded(b"gzip", bomb),
    "busy": status(429),
    "hangs": raw(PAUSE),
}

PROBE = ANYWHERE | {
    "no choices": answer(lambda message: {"error": {"message": "quota exceeded"}}),
    "choices null": answer(lambda message: message.update(choices=None)),
    "no choice": answer(lambda message: message.update(choices=[])),
    "a choice that is a text": answer(lambda message: message.update(choices=["x"])),
    "top log-probs of booleans": answer(lambda message: _top(message, True)),
    "top log-probs of 10^6": answer(lambda message: _top(message, 1e6)),
    "status 500": status(500),
}

#: behaviours that only a limit of time ends
ENDLESS = {
    "hangs before the headers",
    "drips its headers",
    "endless 1xx",
    "headers and then nothing",
    "a chunk of 2^64",
}
ENDLESS |= {"hangs"}


def _repeat(body: dict[str, Any], times: int) -> None:
    choice = body["choices"][0]
    choice["token_ids"] *= times
    choice["logprobs"]["content"] *= times


def _cut(body: dict[str, Any], length: int) -> None:
    choice = body["choices"][0]
    del choice["token_ids"][length:], choice["logprobs"]["content"][length:]


def _rows(body: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> None:
    body["prompt_logprobs"] = [None if row is None else change(row) for row in body["prompt_logprobs"]]


def _top(body: dict[str, Any], value: Any) -> None:
    for entry in body["choices"][0]["logprobs"]["content"]:
        for other in entry["top_logprobs"]:
            other["logprob"] = value


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("hostile")
    yield thread
    thread.close(_nothing)


async def _nothing() -> None: ...


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.005)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 0.02)
    monkeypatch.setattr("proxima.engine.http.replica_keeper.LONGEST_WAIT", 0.05)
    monkeypatch.setattr("proxima.engine.http.replica.READ_OUT_SECONDS", 0.1)


@contextmanager
def hostile(loop: EventLoopThread, script: Script, is_target: Callable[[str, Any], bool]) -> Iterator[RawServer]:
    server = RawServer(loop)
    server.script, server.is_target = script, is_target
    try:
        yield server
    finally:
        loop.call(server.close())


@contextmanager
def engine_of(server: RawServer, name: str, *, at_the_start: bool = False) -> Iterator[HttpEngine]:
    """Its limits are longer than any answer takes on a busy machine, unless the script never ends; and then only when
    the engine has begun, unless the script comes at the start."""
    hurry = {"idle_seconds": 0.1, "call_seconds": 0.1}
    seconds = {"idle_seconds": 30.0, "call_seconds": 30.0, "health_seconds": 0.01, "away_seconds": 0.1}
    seconds |= hurry if at_the_start and name in ENDLESS | {"busy"} else {}
    rules = CompletionRules(tokenizer=Words(), stop_tokens=(), vocabulary=VOCABULARY, max_length=64)
    engine = HttpEngine(Vllm(url=server.url, retries=2, **seconds), rules, NoSync())  # type: ignore[arg-type]
    if name in ENDLESS:
        (replica,) = engine._pool.replicas
        replica.spec = engine._pool.spec = replace(engine.spec, **hurry)
        replica.client.seconds = 0.1
    try:
        yield engine
    finally:
        engine.close()


def requests(first: int) -> list[Request]:
    sampling = Sampling(max_tokens=4)
    prompts = [Prompt(uid=first + i, messages=(), tokens=[5 + i, 6 + i]) for i in range(2)]
    return [Request(prompt=prompt, sample=0, sampling=sampling, seed=1) for prompt in prompts]


def check(asked: list[Request], given: list[Completion]) -> None:
    """Each completion is what the fake's model samples, with its log-probs."""
    for request, completion in zip(asked, given, strict=True):
        assert len(completion.tokens) == 4
        before = [int(request.prompt.tokens[-1]), *map(int, completion.tokens[:-1])]
        right = [log_softmax(logits_after(b, "default"))[t] for b, t in zip(before, completion.tokens, strict=True)]
        np.testing.assert_allclose(completion.sampled_log_prob, right, atol=1e-5)


def is_one_line(error: UserError) -> bool:
    said = str(error)
    return said.isprintable() and len(said) < 1500


def outcome(work: Callable[[], Any]) -> Any:
    """What it gives, or the user's line; anything else is a bug."""
    try:
        return asyncio.run(asyncio.wait_for(work(), LONG))
    except UserError as error:
        assert is_one_line(error), error
        return error


def twice_then_always(server: RawServer, name: str, ask: Callable[[HttpEngine, int], Any]) -> list[Any]:
    """What comes of it when the script answers two calls, and when it answers all."""
    collected = []
    with engine_of(server, name) as engine:
        for number, left in enumerate((2, float("inf"))):
            server.left = left
            collected.append(outcome(lambda number=number: ask(engine, 10 * number)))
    assert server.hit > 0 and server.sent <= TAKEN
    return collected


#: behaviours with which a completion is right all the same
HARMLESS = {"HTTP/1.0, whole", "another content type, whole", "CRLF", "DONE twice, and more after it"}
HARMLESS |= {"masks that nobody asked for", "a byte order mark", "the event twice", "two choices"}
HARMLESS |= {"no DONE", "no end", "an abort"}  # all tokens had come


@pytest.mark.parametrize("name", STREAM)
def test_completions(name: str, loop: EventLoopThread) -> None:
    async def ask(engine: HttpEngine, number: int) -> list[Completion]:
        return list(await collect(engine, requests(number)))

    with hostile(loop, STREAM[name], lambda path, body: bool(body) and body.get("stream")) as server:
        for number, result in enumerate(twice_then_always(server, name, ask)):
            if not isinstance(result, UserError):
                check(requests(10 * number), result)
            assert (name in HARMLESS) or number == 0 or isinstance(result, UserError)
            if "bomb" in name and number:
                assert "compressed by" in str(result)  # and not read


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, loop: EventLoopThread) -> None:
    right = [log_softmax(logits_after(b, "default"))[t] for b, t in ((6, 7), (7, 8))]

    async def ask(engine: HttpEngine, number: int) -> Any:
        return await engine.score([ScoreRequest(prompt_tokens=[5, 6], tokens=[7, 8])])

    def is_target(path: str, body: Any) -> bool:
        return bool(body) and body.get("sampling_params", {}).get("prompt_logprobs") is not None

    with hostile(loop, SCORES[name], is_target) as server:
        first, second = twice_then_always(server, name, ask)
        assert isinstance(second, UserError)
        if not isinstance(first, UserError):
            np.testing.assert_allclose(first[0], right, atol=1e-5)


CALLS = {"/v1/models": MODELS, "/weight_info": WEIGHTS, "/inference/v1/generate": PROBE}


def cases(*paths: str) -> list[tuple[str, str]]:
    return [(path, name) for path in paths for name in CALLS[path]]


@pytest.mark.parametrize(("path", "name"), cases("/v1/models", "/weight_info"))
def test_health_checks(path: str, name: str, loop: EventLoopThread) -> None:
    async def ask(engine: HttpEngine, number: int) -> list[Completion]:
        given = list(await collect(engine, requests(number)))
        while server.hit == 0 or (server.left == float("inf") and server.hit < 3):
            await asyncio.sleep(0.001)
        return given

    with hostile(loop, CALLS[path][name], lambda asked, body: asked == path) as server:
        for number, result in enumerate(twice_then_always(server, name, ask)):
            if not isinstance(result, UserError):
                check(requests(10 * number), result)


@pytest.mark.parametrize(("path", "name"), cases(*CALLS))
def test_what_a_server_says_at_the_start(path: str, name: str, loop: EventLoopThread) -> None:
    with hostile(loop, CALLS[path][name], lambda asked, body: asked == path) as server:
        server.left = float("inf")
        try:
            with engine_of(server, name, at_the_start=True) as engine:
                result = outcome(lambda: collect(engine, requests(0)))
        except UserError as error:
            assert is_one_line(error)
        else:
            assert isinstance(result, UserError) or check(requests(0), result) is None
        assert server.hit > 0 and server.sent <= TAKEN
