"""A scorer behind HTTP, against a real server that is slow, wrong, hostile, or gone: what it answers costs its own
completions, little memory and no token."""

import asyncio
import gzip
import json
import re
import threading
from contextlib import nullcontext

import pytest

from proxima.data import UserError
from proxima.reward import http, posting
from proxima.reward.http import Http
from proxima.reward.math.numbers import Number
from tests.ports import kept_port
from tests.refusals import refused
from tests.reward.make import LONG, SHORT, ask, completion, prompt, runner, scored
from tests.reward.server import lengths, scorer


def run(reward, *texts, answer="42", others=()):
    return scored([reward, *others], prompt(answer, level=3), *texts)


def quick(url, **fields):
    return Http(**{"url": url, "seconds": LONG, "backoff": 0.001, **fields})


def refusal(reward):
    """Why the run does not begin."""
    with runner(reward) as made:
        (line,) = refused(made.check)
    return line


def test_ten_completions_in_one_request_with_all_that_a_scorer_may_need():
    texts = ["4", "It is 42", "", "\ud83d", "é" * 10, "42\n", "\x00", "a b", "<b>", '"']
    with scorer(lengths) as server:
        scores = run(quick(server.url), *texts)
    assert [score.value for score in scores] == [float(len(text)) for text in texts]
    (request,) = server.requests
    facts = {"uid": 7, "answer": "42", "metadata": {"level": 3}}
    assert request["prompt"] == {"messages": [{"role": "user", "content": "?"}], **facts}
    assert request["completions"][1] == {"sample": 1, "text": "It is 42", "tokens": [5, 5, 5], "finish_reason": "stop"}
    assert server.headers[0]["Content-Type"] == "application/json" and "Authorization" not in server.headers[0]


NOT_FINITE = "ValueError: returned {}, expected a finite number"
LEFT_OUT = "ValueError: returned x={}, expected a finite number; a part without a value is left out"
SAID = {  # of a completion, in JSON → its value, or why it has none
    "1": 1.0,
    "0.5": 0.5,
    '{"value": 2.0, "correct": true, "parts": {"style": 0.25}}': 2.0,
    '{"value": -1, "correct": false}': -1.0,
    '{"value": 3, "parts": null, "error": null}': 3.0,
    '{"error": "the judge\\nrefused"}': "the judge refused",
    "null": "the server has no score for it",
    "NaN": NOT_FINITE.format("nan"),
    "9" * 400: NOT_FINITE.format("inf"),
    "9" * 5000: "ValueError: ",
    "-1e999": NOT_FINITE.format("-inf"),
    '"good"': "ValueError: returned value='good', expected a number",
    '{"reward": 1}': "ValueError: a score without 'value' (keys: reward)",
    '{"value": 1, "correct": "yes"}': "ValueError: returned correct='yes', expected true, false or null",
    '{"value": 1, "parts": [1]}': "ValueError: ",
    "[1]": "ValueError: ",
    **dict.fromkeys(("true", '{"value": 1, "correct": 1}', '{"value": "1"}'), "ValueError: "),
    '{"value": 1, "parts": {"style": false}}': "ValueError: ",
    '{"value":1,"parts":{"x":NaN}}': LEFT_OUT.format("nan"),
    '{"value":1,"parts":{"x":1e999}}': LEFT_OUT.format("inf"),
    f'{{"value":1,"parts":{{"x":{"9" * 5000}}}}}': "ValueError: ",
    "[" * 50 + "]" * 50: "ValueError: ",
    "4": 4.0,
}


def test_what_a_server_may_say_of_each_completion():
    with scorer(lambda request, n: f'{{"scores": [{", ".join(SAID)}]}}'.encode()) as server:
        scores = run(quick(server.url), *map(str, range(len(SAID))))
    for score, (said, expected) in zip(scores, SAID.items(), strict=True):
        if isinstance(expected, float):
            assert score.value == expected, said
        else:
            assert not score.valid and score.error.startswith(f"http: {expected}"), said
    assert scores[2].correct is True and scores[2].parts == {"http": 2.0, "http/style": 0.25}
    assert scores[3].correct is False


BROKEN = {
    **dict.fromkeys((b"{", b"<html>busy</html>", b"\xff\xfe", b""), "is not JSON"),
    **dict.fromkeys((b"[1, 2]", b'{"scores": 1}'), "has no list 'scores'"),
    b'{"scores": [1]}': "has 1 scores for 2 completions",
    b'{"scores": [1, 2, 3]}': "has 3 scores for 2 completions",
    b"[" * 100_000: "has more than 64 levels of objects and lists",
    b'{"scores": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "has more than 64 levels",
    b'{"scores": [' + b"[]," * 300_000 + b"1]}": "has more than 200,000 objects and lists",
    '{"scores": [1, 2]}'.encode("utf-16"): "is not JSON: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_answer_costs_the_request_and_is_not_asked_for_again(body):
    with scorer(lambda request, n: body) as server:
        scores = run(quick(server.url), "a", "b", others=[Number()])
    assert [score.valid for score in scores] == [False, False] and len(server.requests) == 1
    assert all(score.error.startswith(f"http: ValueError: the answer {BROKEN[body]}") for score in scores)
    assert scores[0].parts == {"number": 0.0}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_errors_that_pass_are_tried_again(status):
    with scorer(lambda request, n: (status, b"", {"Retry-After": "0"}) if n < 2 else lengths(request, n)) as server:
        (score,) = run(quick(server.url), "abc")
    assert score.value == 3.0 and len(server.requests) == 3


def test_waits_double_and_a_longer_retry_after_is_kept(monkeypatch):
    waits = []

    async def pause(seconds):
        waits.append(seconds)

    monkeypatch.setattr(posting, "pause", pause)
    told = ["0", "7", "9999", "tomorrow", "0", "0"]
    with scorer(lambda _, n: (503, b"", {"Retry-After": told[n]}) if n < 6 else lengths(_, n)) as server:
        (score,) = run(quick(server.url, retries=6, backoff=0.5), "abc")
    assert score.value == 3.0 and waits == [0.5, 7.0, 30.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize(("status", "requests"), [(500, 3), (400, 1), (404, 1), (422, 1)])
def test_errors_that_stay_are_invalid_and_never_zero(status, requests):
    with scorer(lambda request, n: (status, b"{}", {})) as server:
        (score,) = run(quick(server.url, retries=2), "abc")
    assert not score.valid and score.value != score.value and len(server.requests) == requests
    times = ", 3 times" if requests == 3 else ""
    assert score.error.startswith(f"http: PostFailed: {server.url} answers {status} ") and score.error.endswith(times)


def test_a_broken_connection_is_retried_when_the_server_is_back():
    def answer(request, n):
        if n in (0, 3):
            raise ConnectionAbortedError
        if n in (1, 2):
            return 200, b'{"scores": [1', {"Content-Length": "100"}
        return lengths(request, n)

    with scorer(answer) as server, runner(quick(server.url, retries=2)) as made:
        scores = [ask(made, None, "abcd")[0] for _ in range(2)]
    assert not scores[0].valid and "closed the connection" in scores[0].error and scores[0].error.endswith(", 3 times")
    assert scores[1].value == 4.0 and len(server.requests) == 5


@pytest.mark.slow
def test_the_time_of_an_attempt_ends_while_the_server_hangs_or_drips():
    """The first attempt gets nothing, the second a byte now and then."""
    ended = threading.Event()

    def drip():
        while not ended.wait(0.02):
            yield b"1"

    def answer(request, n):
        return [ended.wait(LONG)] if n == 0 else (200, drip(), {"Content-Length": "1000000"})

    with scorer(answer) as server:
        (score,) = run(quick(server.url, seconds=SHORT, retries=1), "abc")
        assert len(server.requests) == 2
        ended.set()
    assert score.error == f"http: PostFailed: {server.url} has not answered after {SHORT:g} s, 2 times"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_its_server_gets_nothing(monkeypatch, status):
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    with scorer(lengths) as other, scorer(lambda request, n: (status, b"", {"Location": other.url})) as server:
        reward = quick(server.url, token_env="SCORER_TOKEN")
        (score,) = run(reward, "abc")
        said = refusal(reward)
    assert not score.valid and other.gets == 0 and other.requests == [] and len(server.requests) == 2
    message = f"{server.url} answers {status} .*"
    assert re.fullmatch(f"http: PostFailed: {message}, a redirect, which is not followed", score.error)
    assert re.fullmatch(f"reward 'http': {message}; give the address that it leads to", said)


@pytest.mark.slow
def test_requests_at_once_are_bounded_however_many_groups_wait():
    three = threading.Barrier(3)  # the first three are there together

    def answer(request, n):
        if n < 3:
            three.wait(LONG)
        return lengths(request, n)

    with scorer(answer) as server:

        async def main(made):
            groups = [[completion("x" * i, sample=j) for j in range(4)] for i in range(60)]
            return await asyncio.gather(*(made.score(prompt(), group) for group in groups))

        before = set(threading.enumerate())
        with runner(quick(server.url, max_concurrent=3)) as made:
            results = asyncio.run(main(made))
            started = {thread.name for thread in set(threading.enumerate()) - before}
        values = [score.value for scores in results for score in scores]
        assert values == [float(i) for i in range(60) for _ in range(4)]
        assert len(server.requests) == 60 and server.most == 3
        assert len([name for name in started if "process_request" not in name]) <= 8  # of the server


def test_a_group_may_be_asked_for_in_pieces_that_fail_alone():
    def answer(request, n):
        return b"{" if request["completions"][0]["sample"] == 2 else lengths(request, n)

    with scorer(answer) as server:
        scores = run(quick(server.url, per_request=2), "a", "bb", "ccc", "dddd", "eeeee")
    assert sorted(len(request["completions"]) for request in server.requests) == [1, 2, 2]
    assert [score.value if score.valid else None for score in scores] == [1.0, 2.0, None, None, 5.0]


def test_a_token_comes_from_the_environment_and_stays_out_of_the_config(monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    with scorer(lengths) as server:
        reward = quick(server.url, token_env="SCORER_TOKEN")
        assert run(reward) == [] and server.requests == []  # no completions ask nobody
        run(reward, "a")
    assert server.headers[0]["Authorization"] == "Bearer secret" and "secret" not in repr(reward)


def test_before_the_run_nobody_need_be_there_for_what_is_only_logged():
    absent = f"http://127.0.0.1:{kept_port()}/"
    for weight, expected in ((0.0, nullcontext()), (1.0, pytest.raises(UserError))):
        with runner(quick(absent, retries=0, weight=weight), Number()) as made, expected:
            made.check()
    assert made.rewards[0].weight == 1.0


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_before_the_run_a_wrong_address_is_refused(status):
    with scorer(lambda request, n: (status, b"", {})) as server:
        said = refusal(quick(server.url))
    assert said.startswith(f"reward 'http': {server.url} answers {status} ")
    assert said.endswith("; is it the right address, and may you use it?")


@pytest.mark.parametrize("answer", [lengths, lambda request, n: (422, b"", {}), lambda request, n: b"nothing to do"])
def test_before_the_run_any_other_word_to_an_empty_list_is_fine(answer):
    with scorer(answer) as server, runner(quick(server.url)) as made:
        made.check()
    assert server.requests == [{"prompt": None, "completions": []}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "ftp://host/x"}, "url='ftp://host/x' must be an address"),
        ({"url": "http://host:port/"}, "url='http://host:port/' must be an address"),
        ({"url": "http://a b/"}, "url='http://a b/' must be an address"),
        ({"url": "http://me:pass@host/"}, "url='http://…@host' must hold no password: it would be written down; use t"),
        ({"seconds": 0}, "seconds=0 must be > 0 and finite"),
        ({"retries": -1}, "retries=-1 must be >= 0"),
        ({"backoff": -0.5}, "backoff=-0.5 must be >= 0 seconds and finite"),
        ({"per_request": -1}, "per_request=-1 must be >= 0; 0 sends all completions of a prompt at once"),
    ],
)
def test_bad_fields(fields, message):
    (line,) = refused(Http, **{"url": "http://localhost/", **fields})
    assert line.startswith(message)


def error_of(answer, *texts):
    """The only error of a request's completions, and how often the server was asked."""
    with scorer(answer) as server:
        scores = run(quick(server.url), *(texts or ("abc", "de")))
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


@pytest.mark.slow
def test_a_compressed_response_is_not_unpacked():
    bomb = gzip.compress(json.dumps({"scores": [1, 2]}).encode() + b" " * (8 << 20))
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
    (line,) = refused(Http, url="http://localhost/", token_env="SCORER_TOKEN")
    assert line.startswith("token_env='SCORER_TOKEN' must hold a token of ASCII characters")
    monkeypatch.setenv("SCORER_TOKEN", "good")
    with scorer(lengths) as server, runner(quick(server.url, token_env="SCORER_TOKEN")) as made:
        monkeypatch.setenv("SCORER_TOKEN", token)  # it changes during the run
        (score,) = ask(made, None, "abc")
    assert not score.valid and "cret" not in score.error and server.requests == []
