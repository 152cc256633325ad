"""The fake of SGLang answers like the real server, of which `recordings/sglang.json` has the answers; see
`record_sglang`."""

import json
from typing import Any

import numpy as np
import pytest

from proxima.data import UserError
from proxima.data.columns import SamplingMask
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import TokenRequest
from proxima.engine.http.sglang import SglangDialect, _StreamReader
from proxima.engine.protocol import Sampling, ServerError
from proxima.model.load import load
from tests.engine.helpers import saved
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.engine.http.record_sglang import CALLS, FILE, PROMPT, ROUTES, Recorder

RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def differences(fake: Any, real: Any, place: str = "") -> list[str]:
    """Where the fake's answer has what the real one has not, or a value of another type."""
    if isinstance(fake, dict) and isinstance(real, dict):
        invented = [f"{place}.{name} is invented" for name in fake.keys() - real.keys()]
        return invented + [d for name in fake.keys() & real.keys() for d in differences(fake[name], real[name], name)]
    if isinstance(fake, list) and isinstance(real, list):
        if not fake or not real:
            return [] if len(fake) == len(real) else [f"{place}: {len(fake)} values, not {len(real)}"]
        return differences(fake[0], real[0], place) + differences(fake[-1], real[-1], place)
    if isinstance(fake, (int, float)) and isinstance(real, (int, float)) and not isinstance(real, bool):
        return []
    return [] if type(fake) is type(real) else [f"{place} is {fake!r}, and SGLang has {real!r}"]


@pytest.fixture
def server(tiny, tmp_path):
    tiny = load(str(saved(tiny, tmp_path / "tiny")))
    with FakeSglang(tiny, FakeSglangOptions(context_length=256, enable_return_routed_experts=True)) as server:
        yield server


def check(fake: Any, name: str) -> None:
    real = RECORDED[name]
    assert fake["status"] == real["status"], fake
    if "text" in real:
        assert fake["text"] == real["text"]
    elif "messages" in real:
        assert not differences(fake["messages"], real["messages"])
        assert len(fake["messages"]) == len(real["messages"])
    else:
        assert not differences(fake["answer"], real["answer"])


@pytest.mark.parametrize("name", [*CALLS, *(ROUTES.keys() & RECORDED.keys())])
async def test_the_fake_answers_like_the_server(name, server):
    check(await Recorder(server.url, server.path).call(*(CALLS | ROUTES)[name]), name)


@pytest.mark.parametrize("name", ["aborted", "aborted_before_a_token"])
async def test_the_fake_aborts_like_the_server(name, server):
    server.options.pace = 0.01
    if name == "aborted_before_a_token":
        server.step = lambda _: None  # it waits
    aborted, held = await Recorder(server.url).aborted(begun=name == "aborted")
    check(aborted, name)
    if name == "aborted":
        check(held, "flush_while_one_runs")


def read(name: str, **request: Any) -> Any:
    """The chunks that the dialect makes of a recorded stream."""
    client, tokens = ServerClient(Address("http://127.0.0.1:1")), tuple(PROMPT)
    asked = TokenRequest(id="a", tokens=tokens, sampling=Sampling(max_tokens=200), seed=None, **request)
    reader = _StreamReader(client, asked)
    return [chunk for message in RECORDED[name]["messages"] if (chunk := reader.chunk(message)) is not None]


def test_recorded_streams_are_read():
    chunks = read("masked_stream", sampling_mask=True)
    assert [len(chunk.tokens) for chunk in chunks] == [1, 1, 1] and chunks[-1].finish_reason == "length"
    SamplingMask.joined([chunk.sampling_mask for chunk in chunks]).check(np.concatenate([c.tokens for c in chunks]))
    assert [chunk.finish_reason for chunk in read("aborted")] == ["abort"]
    (unbegun,) = read("aborted_before_a_token")
    assert unbegun.finish_reason == "abort" and not len(unbegun.tokens)


@pytest.mark.parametrize("name", ["masked_without_top_k_stream", "too_long_stream"])
def test_recorded_refusals_are_errors(name):
    with pytest.raises((ServerError, UserError), match="aborted with status 400: "):
        read(name, sampling_mask="masked" in name)


async def test_the_dialect_reads_what_was_recorded(server, monkeypatch):
    """The real answers to the calls of a probe."""
    real = {(method, path): RECORDED[name]["answer"] for name, (method, path, _) in CALLS.items() if method == "GET"}
    table = server.table
    monkeypatch.setattr(server, "table", lambda: table() | {key: lambda _, a=a: a for key, a in real.items()})
    client = ServerClient(Address(server.url))
    facts = await SglangDialect().probe(client)
    await client.close()
    assert (facts.server, facts.max_length, facts.largest_mask) == ("sglang 0.5.23", 250, 4096)
