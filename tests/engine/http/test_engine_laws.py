"""`HttpEngine` over a FAKE of SGLang (see `fake_sglang.py`): the laws of engines, and connections."""

import asyncio

import pytest

from proxima.engine.http.sglang import Sglang
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup
from proxima.laws.engine_case import EngineUnderTest, requests
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.laws.law import check_law
from tests.engine.helpers import saved
from tests.engine.http.fake_sglang import FakeSglang

pytestmark = pytest.mark.slow

LAWS = {law.name: law for law in ENGINE_LAWS}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return saved(tiny, tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("law", ["greedy", "truncation", "versions"])
def test_sglang(law, tiny, folder):
    """The other laws of draws hold where every field of a request is sent, which test_sglang.py shows."""
    setup = EngineSetup(model_path=str(folder), tokenizer=tiny.tokenizer, load_weights=lambda: tiny)
    with FakeSglang(tiny) as server:
        case = EngineUnderTest(Sglang(url=server.url), setup, lambda: tiny, dtype="float32")
        result = check_law(LAWS[law], case)
    assert result.status == "passed", result


def test_completions_take_turns_on_a_connection(tiny, folder):
    setup = EngineSetup(model_path=str(folder), tokenizer=tiny.tokenizer, load_weights=lambda: tiny)
    with FakeSglang(tiny) as server:
        engine = Sglang(url=server.url, max_running=2, health_seconds=1000).build(setup)
        try:
            before = server.connections
            given = asyncio.run(collect(engine, requests(4, 5, max_tokens=4)))
            assert len(given) == 20 and server.connections - before < 10
        finally:
            engine.close()
