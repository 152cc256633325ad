"""Every law of servers fails for a server with the defect that it is there for. The servers are FAKES of SGLang."""

import asyncio
import copy

import pytest
import torch

from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.detect import detect_server
from proxima.engine.protocol import EngineSetup
from proxima.laws.bare_server import BareServer
from proxima.laws.engine_case import EngineUnderTest, tiny_model
from proxima.laws.law import check_law
from proxima.laws.sampling_laws import SAMPLING_LAWS
from proxima.laws.server_laws import CONTROL_LAWS, SERVER_LAWS
from tests.engine.helpers import saved
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.engine.http.small_http import Answer

LAWS = {law.name: law for law in (*SERVER_LAWS, *CONTROL_LAWS)}


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The weights that the fake serves."""
    return saved(tiny, tmp_path_factory.mktemp("same"))


class NoLogProbs(FakeSglang):
    def output(self, *given):
        result = super().output(*given)
        for name in ("output_top_logprobs", "input_token_logprobs"):
            result["meta_info"].pop(name, None)
        return result


class OtherTokenizer(FakeSglang):
    def tokenize(self, body):
        return Answer({"tokens": [token + 1 for token in super().tokenize(body).body["tokens"]]})


class RunsOn(FakeSglang):
    """Never stops at a token."""

    def ending(self, entry):
        entry.sampling["ignore_eos"] = True
        return super().ending(entry)


class ForgetsSeeds(FakeSglang):
    def uniform(self, entry):
        return self.random.random()


class WrongSpans(FakeSglang):
    def output(self, *given):
        result = super().output(*given)
        result["meta_info"]["weight_versions"][-1]["end"] -= 1
        return result


class NeverPauses(FakeSglang):
    async def pause(self, body):
        return Answer({"status": "ok"})


class ForgetsTheVersion(FakeSglang):
    async def update_weights_from_disk(self, body):
        return await super().update_weights_from_disk(body | {"weight_version": None})


class OldSpans(FakeSglang):
    """Loads, and goes on to call its tokens by the version before."""

    def step(self, entry):
        super().step(entry)
        entry.versions[-1] = "default"


class OtherWeights(FakeSglang):
    """Serves other weights than those of the folder."""

    def __init__(self, loaded, options):
        super().__init__(loaded, options)
        self.model = copy.deepcopy(loaded.model)
        with torch.no_grad():
            self.model.lm_head.weight.mul_(3.0)


DEFECTS = [
    (NoLogProbs, "token_ids", "log-probs of sampled tokens do not come"),
    (OtherTokenizer, "tokenizer", "of 8 texts have other ids"),
    (RunsOn, "stop_tokens", "finish_reason 'length' at the stop token"),
    (ForgetsSeeds, "seeds", "the same seed gave other tokens"),
    (WrongSpans, "version_spans", "version spans (('default', 0, 15),) for 16 tokens"),
    (NeverPauses, "pause", "finish_reason 'length' after a pause with abort"),
    (ForgetsTheVersion, "weights", "its weights are called 'default' after 'proxima-check' was loaded"),
    (OldSpans, "weights", "completions carry another version"),
    (OtherWeights, "weights", "the server had other weights than"),
]


async def found_at(server):
    client = ServerClient(Address(server.url))
    try:
        return await detect_server(client)
    finally:
        await client.close()


def checked(server, law, tiny, folder):
    bare = BareServer(Address(server.url), *asyncio.run(found_at(server)))
    setup = EngineSetup(model_path=str(folder), tokenizer=tiny.tokenizer, load_weights=lambda: tiny)
    return check_law(LAWS[law], EngineUnderTest(bare, setup, lambda: tiny))


HELD = ("proxima-check-pause-",)  # they run until what the law does has come


def options():
    return FakeSglangOptions(enable_deterministic_inference=True, pace=0.001, context_length=168, holds=HELD)


def test_every_law_has_a_defect():
    assert {law for _, law, _ in DEFECTS} == set(LAWS)


@pytest.mark.parametrize(("defective", "law", "message"), DEFECTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_defect_is_found(defective, law, message, tiny, folder):
    with defective(tiny, options()) as server:
        result = checked(server, law, tiny, folder)
    assert result.status == "FAILED" and message in result.detail, result


@pytest.mark.parametrize("law", sorted(LAWS))
def test_a_sound_server_passes(law, tiny, folder):
    with FakeSglang(tiny, options()) as server:
        result = checked(server, law, tiny, folder)
    assert result.status == "passed", result


def test_log_probs_before_truncation_are_scored_where_a_server_reports_those_after_it(tiny, folder):
    (law,) = (entry for entry in SAMPLING_LAWS if entry.name == "truncation")
    with FakeSglang(tiny, FakeSglangOptions(processed=True)) as server:
        bare = BareServer(Address(server.url), *asyncio.run(found_at(server)))
        assert bare.facts.log_probs == "processed"
        case = EngineUnderTest(bare, EngineSetup.of(tiny), lambda: tiny, dtype="float32")
        assert check_law(law, case).status == "passed"
