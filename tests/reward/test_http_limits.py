"""What a hostile scorer answers costs its own completions, little memory and no token."""

import asyncio
import gzip
import json

import pytest

from proxima.reward import http
from proxima.reward.http import Http
from tests.reward.make import LONG, completions, prompt, runner
from tests.reward.server import lengths, scorer


def error_of(answer, *texts, **fields):
    """The only error of a request's completions, and how often the server was asked."""
    with scorer(answer) as server, runner(Http(url=server.url, seconds=LONG, backoff=0.001, **fields)) as made:
        scores = asyncio.run(made.score(prompt(), completions(*(texts or ("abc", "de")))))
        (error,) = {score.error for score in scores}
    assert not any(score.valid for score in scores)
    return error.replace(server.url, "it"), len(server.requests)


def test_a_response_without_end_is_read_up_to_its_limit():
    sent = []

    def endless():
        while len(sent) < 4096:  # 256 MiB
            yield b" " * (1 << 16)
            sent.append(1)

    error, asked = error_of(lambda request, n: endless(), "abc")
    limit = http.RESPONSE_BYTES + http.COMPLETION_BYTES
    assert (error, asked) == (f"http: PostFailed: it sends more than {limit:,} bytes", 1)
    assert len(sent) < 1024  # what the sockets buffer beyond the limit


def test_a_compressed_response_is_not_unpacked():
    bomb = gzip.compress(json.dumps({"scores": [1, 2]}).encode() + b" " * (64 << 20))
    message = error_of(lambda request, n: (200, bomb, {"Content-Encoding": "gzip"}))
    assert message == ("http: PostFailed: it sends an answer compressed by 'gzip', which was not asked for", 1)


def test_a_score_of_many_parts_is_no_flood_of_metrics():
    flood = {"value": 1, "parts": {f"m{i}": 0.0 for i in range(65)}}
    error, _ = error_of(lambda request, n: {"scores": [flood, flood]})
    assert "expected an object with at most 64 numbers" in error


@pytest.mark.parametrize("key", ["error", "detail"])
def test_why_a_server_refuses_is_said(key):
    body = json.dumps({key: "completions[0].finish_reason=5\nmust be text"}).encode()
    error, asked = error_of(lambda request, n: (400, body, {}))
    assert error == "http: PostFailed: it answers 400 Bad Request: completions[0].finish_reason=5 must be text"
    assert asked == 1


@pytest.mark.parametrize("body", [b"x" * 100_000, b"[" * 4000, b"<html>", b'{"error": 5}', b"\xff"])
def test_a_refusal_without_a_short_reason_has_its_status(body):
    assert error_of(lambda request, n: (400, body, {})) == ("http: PostFailed: it answers 400 Bad Request", 1)


@pytest.mark.parametrize("token", ["secret\n", "se cret", "sécret", "secret\r\nX: y"])
def test_a_token_that_is_no_header_is_refused_and_never_said(token, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", token)
    with pytest.raises(ValueError) as caught:
        Http(url="http://localhost/", token_env="SCORER_TOKEN")
    assert str(caught.value).startswith("token_env='SCORER_TOKEN' must hold a token of ASCII characters")
    monkeypatch.setenv("SCORER_TOKEN", "good")
    with scorer(lengths) as server, runner(Http(url=server.url, token_env="SCORER_TOKEN")) as made:
        monkeypatch.setenv("SCORER_TOKEN", token)  # it changes during the run
        (score,) = asyncio.run(made.score(prompt(), completions("abc")))
    assert not score.valid and "cret" not in score.error and server.requests == []
