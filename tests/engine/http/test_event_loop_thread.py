"""An event loop of its own, and streams in it that are left before their end."""

import asyncio
import gc
import logging

import numpy as np
import pytest

from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.http.client import ServerClient
from proxima.engine.http.dialect import TokenRequest
from proxima.engine.http.sglang import SglangDialect
from proxima.engine.http.vllm import VllmDialect
from proxima.engine.protocol import Sampling
from tests.engine.http.fake_vllm import FakeVllm

CHOICE = {"token_ids": [3], "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}]}}
VLLM_EVENT = {"choices": [CHOICE], "prompt_token_ids": [1, 2]}
SGLANG_EVENT = {"meta_info": {"completion_tokens": 1, "prompt_tokens": 2, "output_token_logprobs": [[-1.0, 3, None]]}}


@pytest.mark.parametrize(("dialect", "event"), [(VllmDialect(), VLLM_EVENT), (SglangDialect(), SGLANG_EVENT)])
def test_a_stream_that_is_left_closes_its_connection_at_once(dialect, event, monkeypatch):
    closed = []

    async def events(path, body, size):
        try:
            while True:
                yield event
        finally:
            closed.append(path)

    async def main():
        client: ServerClient = FakeVllm().client()
        facts = await VllmDialect().probe(client)
        monkeypatch.setattr(client, "events", events)
        request = TokenRequest(id="a", tokens=np.array([1, 2]), sampling=Sampling(max_tokens=4), stop_tokens=())
        stream = dialect.stream(client, facts, request)
        assert (await anext(stream)).tokens.tolist() == [3]
        await stream.aclose()
        assert len(closed) == 1  # not by the garbage collector, in a task that nobody waits for

    asyncio.run(main())


@pytest.mark.slow
def test_what_is_left_in_a_loop_that_closes_ends_with_it(caplog):
    loop, closed, held = EventLoopThread("test"), [], []

    async def inner():
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0)
            closed.append("inner")

    async def outer():
        async for entry in inner():
            yield entry

    async def reads():
        async for _ in outer():
            await asyncio.sleep(60)

    async def last():
        await asyncio.sleep(0)  # the reader has begun

    loop.submit(lambda: held.append(asyncio.ensure_future(reads())))
    loop.call(last())
    gc.collect()  # what other tests have left, which may complain
    with caplog.at_level(logging.ERROR, "asyncio"):
        loop.close(last)
        held.clear()
        gc.collect()
    assert closed == ["inner"] and not caplog.records, caplog.text


def test_an_interrupt_ends_the_task_that_it_reaches_and_not_the_loop():
    thread, ended = EventLoopThread("test"), []

    async def interrupted():
        raise KeyboardInterrupt

    async def last():
        ended.append("last")

    assert isinstance(thread.start(interrupted()).exception(timeout=60), KeyboardInterrupt)
    thread.close(last)
    assert ended == ["last"]
