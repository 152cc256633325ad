"""What a hostile server can do: each time the run goes on with right completions, or ends with one line."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxima.data import UserError
from proxima.data.flow import Prompt
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.dialect import ServerFacts, ServerHealth, WrittenTokens
from proxima.engine.http.generation_job import CompletionRules, GenerationJob
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_checks import introduce
from proxima.engine.http.vllm import Vllm, find_vllm_facts
from proxima.engine.protocol import Request, Sampling, ServerError
from tests.engine.http.fake_vllm import VOCABULARY, FakeVllm, log_softmax, logits_after
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

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


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


def drip(part: bytes, seconds: float, head: bytes = b"") -> Script:
    async def script(good: httpx.Response) -> AsyncIterator[bytes | None]:
        yield head
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


def of_prompt(tokens: Any) -> Script:
    return event(lambda body: body.update(prompt_token_ids=tokens))


def with_choices(choices: Any) -> Script:
    return event(lambda body: body.update(choices=choices))


def model(**fields: Any) -> Script:
    return answer(lambda body: body["data"][0].update(fields))


def version(label: Any) -> Script:
    return answer(lambda body: body.update(weight_version=label))


def scored(value: Any) -> Script:
    return answer(lambda body: _rows(body, lambda row: {key: {"logprob": value} for key in row}))


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@cache
def bomb() -> bytes:
    return gzip.compress(b"x" * OFFERED, 9)


LOG_PROBS = (True, False, "-1", None, float("nan"), float("inf"), float("-inf"), -(10**400), 0.5, -9999.0)
VERSIONS = {
    "of other weights": [{"version": "other", "start": 0, "end": 4}],
    "of some tokens": [{"version": "default", "start": 0, "end": 2}],
    "that overlap": [{"version": "default", "start": 0, "end": 4}] * 2,
    "with a gap": [{"version": "default", "start": start, "end": start + 1} for start in (0, 2, 3)],
    "of more tokens": [{"version": "default", "start": 0, "end": 5}],
    "without a name": [{"version": None, "start": 0, "end": 4}],
    "that end at a fraction": [{"version": "default", "start": 0, "end": 4.0}],
    "of booleans": [{"version": "default", "start": False, "end": 4}],
    "that are none": "default",
}

STREAM: dict[str, Script] = {
    # status lines
    **{f"status {code}": status(code) for code in (204, 206, 304, 400, 404, 500, 599)},
    "refuses with 403 and the key": status(403, b"your key is sk-something\x1b[2J"),
    "busy and unavailable": status(503, head=b"Retry-After: 0\r\n"),
    "redirects to nonsense": status(302, head=b"Location: http://[::\r\n"),
    "an error of megabytes": endless(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % OFFERED, b"x" * 65536),
    "an error that breaks off": raw(b"HTTP/1.1 500 X\r\nContent-Length: 500\r\n\r\nbroken"),
    "an error that is a gzip bomb": raw(b"HTTP/1.1 500 X\r\nContent-Encoding: gzip\r\n\r\n", bomb),
    # headers
    "drips its headers": drip(b"H", 0.02),
    "endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1000),
    "endless 1xx": drip(b"HTTP/1.1 102 Processing\r\n\r\n", 0.001),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    # framing
    "headers and then nothing": raw(CHUNKED, PAUSE),
    "a chunk header without end": endless(CHUNKED, b"1;" + b"x" * 4096),
    "less than its length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\ndata: {}\n"),
    "more than its length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"),
    "a gigabyte announced": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n", b"x" * 65536),
    # size
    "a line without end": endless(TO_END, b"x" * 65536),
    "an event without end": endless(TO_END + b'data: {"choices": "', b"x" * 65536),
    "empty events without end": endless(TO_END, b'data: {"choices": []}'.ljust(198) + b"\n\n"),
    "a gzip bomb": encoded(b"gzip", bomb),
    "says br": encoded(b"br", b"\x00" * 100),
    # lines
    "no DONE": text(lambda whole: whole.replace("data: [DONE]\n\n", "")),
    "DONE alone": text(lambda whole: "data: [DONE]\n\n"),
    "DONE twice, and more after it": text(lambda whole: whole + "data: [DONE]\n\ndata: {\n\n"),
    "cut in the middle": text(lambda whole: whole[: len(whole) // 2]),
    "CRLF": text(lambda whole: whole.replace("\n", "\r\n")),
    "a byte order mark": text(lambda whole: b"\xef\xbb\xbf" + whole.encode()),
    "bytes that are no text": text(lambda whole: whole.encode().replace(b"choices", b"\xff\xfe")),
    "the event twice": text(lambda whole: whole.split("data: [DONE]")[0] * 2 + "data: [DONE]\n\n"),
    # JSON
    "no JSON": text(lambda whole: "data: hello\n\ndata: [DONE]\n\n"),
    "HTML": text(lambda whole: "<!DOCTYPE html><title>Sign in</title>"),
    "a list": text(lambda whole: "data: []\n\ndata: [DONE]\n\n"),
    "an error of 800 levels": text(lambda whole: f'data: {{"error": {deep(800)}}}\n\ndata: [DONE]\n\n'),
    "an error of escapes": event(lambda message: {"error": "\x1b[2J\x00\ud800\n\nTraceback"}),
    "an error of 200 KB": event(lambda message: {"error": {"message": "x" * 200_000}}),
    # fields
    "no choices": event(lambda message: {"detail": "quota exceeded"}),
    **{f"choices {value!r}": with_choices(value) for value in (None, "none", 7)},
    "no token_ids": event(lambda message: message["choices"][0].pop("token_ids")),
    "token_ids a text": choice(token_ids="1234"),
    "two choices": event(lambda message: message["choices"].append(message["choices"][0])),
    **{f"token {token!r}": first_token(token) for token in (True, 1.0, "1", None, -1, 2**40, 10**30, VOCABULARY)},
    **{f"log-prob {str(value)[:9]}": first_log_prob(value) for value in LOG_PROBS},
    "too few log-probs": event(lambda message: message["choices"][0]["logprobs"]["content"].pop()),
    "log-probs of other tokens": event(lambda message: message["choices"][0]["logprobs"]["content"].reverse()),
    "no log-probs": choice(logprobs=None),
    "log-probs a text": choice(logprobs="none"),
    **{f"the prompt {prompt!r}": of_prompt(prompt) for prompt in ([1, 2, 3], [], [True, True], "5, 6")},
    "no prompt": event(lambda message: message.pop("prompt_token_ids")),
    "too many tokens": event(lambda message: _repeat(message, 3)),
    "too few tokens for its length": event(lambda message: _cut(message, 2)),
    "a stop without a stop token": choice(finish_reason="stop"),
    "no end": choice(finish_reason=None),
    "an end that is none": choice(finish_reason="tired"),
    "an end that is a list": choice(finish_reason=["length"]),
    "an abort": choice(finish_reason="abort"),
    **{f"versions {name}": choice(weight_versions=spans) for name, spans in VERSIONS.items()},
    "masks that nobody asked for": choice(sampling_mask=[[1]]),
    "masks of booleans": choice(sampling_mask=[[True]]),
}

#: to every call that is no stream
ANYWHERE: dict[str, Script] = {
    "megabytes": endless(TO_END, b" " * 65536),
    "deep": text(lambda whole: deep(100_000)),
    "refused": status(403),
    "empty": text(lambda whole: ""),
    "HTML": text(lambda whole: "<html>"),
    "hangs": raw(PAUSE),
    "headers and then nothing": raw(CHUNKED, PAUSE),
    "endless": drip(b"1\r\n1\r\n", 0.001, CHUNKED),
    "busy": status(429),
    "a gzip bomb": encoded(b"gzip", bomb),
}

MODELS = {
    "another model": model(id="other"),
    "no model": answer(lambda message: message.update(data=[])),
    "models a mapping": answer(lambda message: message.update(data={})),
    "no data": answer(lambda message: {"detail": "no"}),
    **{f"an id {value!r:.9}": model(id=value) for value in ("x" * 1_000_000, 7, "\x1b[2J\n")},
    **{f"a length of {value!r}": model(max_model_len=value) for value in (True, -5, "64")},
}

WEIGHTS = ANYWHERE | {
    **{f"version {value!r:.9}": version(value) for value in ("other", True, None, "x" * 1_000_000)},
    "no version": answer(lambda message: {}),
    "a list": text(lambda whole: "[]"),
}

SCORES = {
    "megabytes": ANYWHERE["megabytes"],  # more than a score of these tokens may have
    "no log-probs": answer(lambda message: message.pop("prompt_logprobs")),
    "log-probs a mapping": answer(lambda message: message.update(prompt_logprobs={})),
    "too few": answer(lambda message: message["prompt_logprobs"].pop()),
    "of other tokens": answer(lambda message: _rows(message, lambda row: {"999": {"logprob": -1.0}})),
    **{f"log-prob {value!r}": scored(value) for value in ("-1", False, float("nan"), 0.5)},
}

PROBE = {
    "no choices": answer(lambda message: {"error": {"message": "quota exceeded"}}),
    "choices null": answer(lambda message: message.update(choices=None)),
    "no choice": answer(lambda message: message.update(choices=[])),
    "a choice that is a text": answer(lambda message: message.update(choices=["x"])),
    "top log-probs of booleans": answer(lambda message: _top(message, True)),
    "top log-probs of 10^6": answer(lambda message: _top(message, 1e6)),
    "megabytes": ANYWHERE["megabytes"],
    "status 500": status(500),
}

#: behaviours that only a limit of time ends
ENDLESS = {"drips its headers", "endless 1xx", "headers and then nothing", "hangs", "endless"}


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


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.005)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 0.02)
    monkeypatch.setattr("proxima.engine.http.replica.READ_OUT_SECONDS", 0.1)


def hostile(script: Script, is_target: Callable[[str, Any], bool]) -> RawServer:
    server = RawServer()
    server.script, server.is_target = script, is_target
    return server


RULES = CompletionRules(tokenizer=Words(), stop_tokens=(), vocabulary=VOCABULARY, max_length=64)


def check_tokens(request: Request, tokens: Any, log_prob: Any) -> None:
    """They are what the fake's model samples, with its log-probs."""
    assert len(tokens) == 4
    before = [int(request.prompt.tokens[-1]), *map(int, tokens[:-1])]
    right = [log_softmax(logits_after(b, "default"))[t] for b, t in zip(before, tokens, strict=True)]
    np.testing.assert_allclose(log_prob, right, atol=1e-5)


def is_one_line(error: Exception) -> bool:
    said = str(error)
    return said.isprintable() and len(said) < 1500


# ---- one call --------------------------------------------------------------------------------------------------------


def one_call(server: RawServer, seconds: float, ask: Callable[[Replica], Awaitable[Any]]) -> Any:
    """What a replica's call gives, or its error; anything else is a bug."""

    async def work() -> Any:
        spec = Vllm(url=server.url, idle_seconds=seconds, call_seconds=seconds)
        replica = Replica(spec.addresses[0], spec.dialect(), spec, "hostile")
        try:
            return await ask(replica)
        except (ServerError, WrongAnswerError, UserError) as error:
            assert is_one_line(error), error
            return error
        finally:
            await replica.client.close()

    result = asyncio.run(asyncio.wait_for(work(), LONG))
    assert server.hit > 0 or seconds < 30.0  # a busy machine may be late for the short limits
    assert server.sent <= TAKEN
    assert seconds == 30.0 or result is None or "0.1 s" in str(result)
    return result


def limit(name: str) -> float:
    """Seconds: longer than any answer takes on a busy machine, unless the script never ends."""
    return 0.1 if name in ENDLESS else 30.0


@pytest.fixture(scope="module")
def facts() -> ServerFacts:
    return asyncio.run(find_vllm_facts(FakeVllm().client()))


def joined(replica: Replica, facts: ServerFacts) -> Replica:
    """In service, as after a start at which the server was good."""
    replica.facts = facts
    replica.join(ServerHealth(model="fake", weight_version="default"))
    return replica


def new_job() -> GenerationJob:
    prompt = Prompt(uid=0, messages=(), tokens=[5, 6])
    request = Request(prompt=prompt, sample=0, sampling=Sampling(max_tokens=4), seed=1)
    job = GenerationJob(request, RULES, lambda _: None)
    job.begin(0)
    return job


def check_job(job: GenerationJob) -> None:
    (segment,) = job.kept
    check_tokens(job.request, job.tokens, [value for value, _ in segment.log_probs])


#: behaviours with which a completion is right all the same
HARMLESS = {"CRLF", "DONE twice, and more after it", "masks that nobody asked for", "a byte order mark"}
HARMLESS |= {"the event twice", "two choices", "no DONE"}
CUT_OFF = ("no end", "an abort")  # when all tokens have come


def is_completion(path: str, body: Any) -> bool:
    return bool(body) and bool(body.get("stream"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAM)
def test_completions(name: str, facts: ServerFacts) -> None:
    job = new_job()
    with hostile(STREAM[name], is_completion) as server:
        error = one_call(server, limit(name), lambda replica: joined(replica, facts).run(job))
    assert (error is None) == (name in HARMLESS)
    if error is None:
        check_job(job)
    elif name in CUT_OFF:
        job.keep()
        check_job(job)
    if "bomb" in name:
        assert "compressed by" in str(error)  # and not read
    if name == "an error that breaks off":
        assert "status 500" in str(error)


def test_any_number_of_completions_run_at_once_past_no_proxy(facts: ServerFacts, monkeypatch) -> None:
    """httpx alone would keep all but a hundred waiting for a connection, and show them to the environment's proxy."""
    for name, value in (("HTTP_PROXY", "http://127.0.0.1:9"), ("NO_PROXY", ""), ("no_proxy", "")):
        monkeypatch.setenv(name, value)

    async def all_begin(replica: Replica) -> None:
        joined(replica, facts)
        tasks = [asyncio.ensure_future(replica.run(new_job())) for _ in range(120)]
        while server.hit < len(tasks):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with hostile(raw(PAUSE), is_completion) as server:
        assert one_call(server, LONG, all_begin) is None


def is_score(path: str, body: Any) -> bool:
    return bool(body) and body.get("sampling_params", {}).get("prompt_logprobs") is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, facts: ServerFacts) -> None:
    with hostile(SCORES[name], is_score) as server:
        given = WrittenTokens.of(np.int32([5, 6, 7, 8]), None)
        error = one_call(server, limit(name), lambda replica: joined(replica, facts).score(given, 2))
    assert isinstance(error, Exception)


CALLS = {"/v1/models": MODELS, "/weight_info": WEIGHTS, "/inference/v1/generate": PROBE}


def cases(*paths: str) -> list[tuple[str, str]]:
    return [(path, name) for path in paths for name in CALLS[path]]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), cases("/v1/models", "/weight_info"))
def test_health_checks(path: str, name: str, facts: ServerFacts) -> None:
    with hostile(CALLS[path][name], lambda asked, body: asked == path) as server:
        result = one_call(server, limit(name), lambda replica: joined(replica, facts).health())
    if name.startswith("a length"):  # nobody asks for it again
        assert (result.model, result.weight_version) == ("fake", "default")
    elif name in ("another model", "version 'other'"):
        assert "other" in (result.model, result.weight_version)
    else:
        assert isinstance(result, Exception)


@pytest.mark.parametrize(("path", "name"), cases("/v1/models", "/inference/v1/generate"))
def test_what_a_server_says_at_the_start(path: str, name: str) -> None:
    job = new_job()

    async def begin(replica: Replica) -> None:
        await introduce([replica], Words())
        assert replica.in_service
        await replica.run(job)
        check_job(job)

    with hostile(CALLS[path][name], lambda asked, body: asked == path) as server:
        one_call(server, limit(name), begin)
