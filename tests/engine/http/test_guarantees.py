"""What servers may do at the worst moment: no token gets another version, nobody waits forever, nothing is left."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from proxima.data import FieldError, UserError
from proxima.engine.http.client import Address, ServerClient, StreamSize
from proxima.engine.http.dialect import Chunk
from proxima.engine.http.generation_job import GenerationJob
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest, ServerError
from tests.engine.http.fake_model import LetterTokenizer, sequence_log_probs
from tests.engine.http.plain_servers import (
    IN_PLACE,
    RULES,
    WEIGHTS,
    PlainDialect,
    begun,
    check,
    engine_over,
    fakes,
    go_on,
    hold_scores,
    requests,
    update,
    versions,
)
from tests.engine.http.raw_server import RawServer
from tests.processes import until


def jobs_of(engine):
    """Seen by the engine's own loop: another thread would read queues that change."""

    async def jobs():
        return engine._pool.jobs

    return engine._loop.call(jobs())


@pytest.mark.slow
async def test_a_server_that_hides_its_versions_makes_no_short_completions(fleet):
    """It said at the start that it tells them: what it sampled after new weights came is asked for again."""
    asked = requests(5, 3)
    engine, servers = fleet(facts=IN_PLACE, published=True)
    task = await begun(engine, servers, asked)
    servers[0].facts["version_spans"] = False
    await engine.publish(update(2))
    go_on(servers)
    given = await task
    check(asked, given)
    assert any(versions([completion]) >= {1, 2} for completion in given)


async def test_callers_that_leave_before_sending_free_their_room(fleet):
    engine, _ = fleet(max_running=2)
    for _ in range(5):
        stream = engine.generate(requests(2, 2))
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await stream.aclose()
    await until(lambda: not jobs_of(engine))
    check(requests(2, 2), await collect(engine, requests(2, 2)))
    await until(lambda: engine._pool.replicas[0].assigned == 0)


@pytest.mark.slow
async def test_the_only_server_dies_while_new_weights_wait_for_what_runs(fleet):
    asked = requests(4, 2)
    engine, (server,) = fleet(facts=IN_PLACE, interrupt="finish", published=True)
    task = await begun(engine, [server], asked)
    publishing = asyncio.create_task(engine.publish(update(2)))
    await until(lambda: engine._pool.loading)
    server.die()
    await until(lambda: engine._pool.counts["ejected"] == 1)
    go_on([server])
    server.come_back()
    await publishing
    check(asked, await task)


async def test_scores_are_of_one_version(fleet):
    """New weights come while a completion is scored by the server that sampled it."""
    asked = requests(1, 1, first=3, top_k=3, max_tokens=4)
    engine, (server,) = fleet(facts=IN_PLACE, published=True)
    release, calls = hold_scores(server, 1), server.calls["/score"]
    task = asyncio.create_task(collect(engine, asked))
    await until(lambda: server.calls["/score"] > calls)
    await engine.publish(update(2))
    release()
    (given,) = await task
    assert given.policy_version.tolist() == [1] * len(given.tokens)
    assert np.isnan(given.untruncated_log_prob).all()  # nobody has the old weights


async def test_scores_of_a_caller_are_of_the_weights_that_are_there(fleet):
    prompt, tokens = [1, 2], [3, 4, 5]
    engine, (server,) = fleet(published=True)
    release, calls = hold_scores(server, 1), server.calls["/score"]
    task = asyncio.create_task(engine.score([ScoreRequest(prompt_tokens=prompt, tokens=tokens)]))
    await until(lambda: server.calls["/score"] > calls)
    await engine.publish(update(2))
    release()
    (result,) = await task
    np.testing.assert_allclose(result, sequence_log_probs(WEIGHTS[2], prompt, tokens), atol=1e-5)


class ByteTokenizer(LetterTokenizer):
    def decode(self, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return bytes(map(int, tokens)).decode(errors="replace")


def test_a_stop_sign_of_many_tokens_is_seen_across_the_seam():
    (request,) = requests(1, 1, stop=("🦊",))
    collected = []
    stop_rules = replace(RULES, tokenizer=ByteTokenizer(), vocabulary=256, stop_tokens=())
    job = GenerationJob(request, stop_rules, collected.append)
    signs = list("🦊".encode())
    job.begin(1)
    job.append(Chunk(tokens=signs[:1], log_prob=[-1.0]), {})
    job.keep()
    job.begin(2)
    given = [job.append(Chunk(tokens=[completion], log_prob=[-1.0]), {}) for completion in signs[1:]]
    assert given == [None, None, "stop"]


# ---- calls that have no end ------------------------------------------------------------------------------------------


async def test_a_token_is_not_sent_where_a_server_points_to(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    with RawServer() as first, RawServer() as other:

        async def point(good):
            head = f"HTTP/1.1 307 X\r\nLocation: {other.url}/there\r\nContent-Length: 0"
            yield f"{head}\r\nConnection: close\r\n\r\n".encode()

        first.script, first.is_target = point, lambda path, body: path == "/here"
        client = ServerClient(Address(first.url, token_env="SOME_KEY"))
        with pytest.raises(ServerError, match="status 307"):
            await client.get("/here")
        with pytest.raises(ServerError, match="status 307"):
            await anext(client.events("/here", {}, StreamSize(1, 1)))
        await client.close()
    assert [call.headers["authorization"] for call in first.calls] == ["Bearer secret"] * 2 and not other.connections


@pytest.mark.parametrize("token", ["key\n", "two words", "schlüssel", "\x07"])
def test_what_is_no_key_is_said_without_telling_it(token, monkeypatch):
    monkeypatch.setenv("SOME_KEY", token)
    with pytest.raises(FieldError) as error:
        Address("http://127.0.0.1:1", token_env="SOME_KEY")
    assert "token_env" in str(error.value) and token not in str(error.value)


def test_an_engine_that_is_refused_leaves_no_connection(monkeypatch):
    closed = []
    whole = ServerClient.close

    async def close(self):
        closed.append(self.url)
        await whole(self)

    monkeypatch.setattr(ServerClient, "close", close)
    servers = [*fakes(), *fakes(facts={"model": "another"})]
    with pytest.raises(UserError), engine_over(servers):
        pass
    assert closed == [server.url for server in servers]


@pytest.mark.parametrize("state", ["idle", "running", "paused", "publishing", "finishing", "dead"])
async def test_an_engine_closes_from_any_state(state, fleet):
    """In a moment, with nobody left who waits."""
    engine, (server,) = fleet(interrupt="finish" if state == "finishing" else "recompute")
    server.stop_after = 2 if state != "dead" else None
    tasks = []
    if state == "dead":
        server.die()
    if state != "idle":
        tasks.append(asyncio.create_task(collect(engine, requests(3, 2))))
        await until(lambda: jobs_of(engine))
    if state == "paused":
        await engine.pause()
    if state in ("publishing", "finishing"):
        hold_scores(server)
        tasks.append(asyncio.create_task(engine.publish(update(1))))
        await until(lambda: engine._pool.loading)
    await asyncio.to_thread(engine.close)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    with pytest.raises(RuntimeError, match="closed"):
        await collect(engine, requests(1, 1))
    assert "proxima-servers" not in {thread.name for thread in threading.enumerate()}
    assert [(type(entry), str(entry)) for entry in ended] == [(RuntimeError, "the engine is closed")] * len(ended)


class FailsWhenCancelled(PlainDialect):
    """As `asyncio.gather` does when one of its calls fails at that moment."""

    def __init__(self):
        self.asked = 0

    async def health(self, client, facts):
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ServerError("http://x", "/load", "status 500") from None


async def test_an_engine_closes_though_a_health_check_fails_at_that_moment(fleet):
    engine, _ = fleet()
    engine._pool.replicas[0].dialect = dialect = FailsWhenCancelled()
    await until(lambda: dialect.asked == 1)
    await asyncio.to_thread(engine.close)
    assert dialect.asked == 1
