"""The dialect of SGLang, over a fake of its protocol."""

import asyncio
import copy
import json
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from httpx import Response

from proxima.data import FieldError, UserError
from proxima.data.columns import SamplingMask
from proxima.engine.http.answer_values import RouteShape
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.detect import detect_server
from proxima.engine.http.dialect import ServerFacts, TokenRequest, WeightsInFolder, WrittenTokens
from proxima.engine.http.server_checks import capabilities_of, check_facts, check_masks
from proxima.engine.http.sglang import Sglang, SglangDialect, _StreamReader, are_named
from proxima.engine.protocol import Sampling, ServerError
from proxima.engine.serve.launch import Serve
from proxima.laws import engine_case
from proxima.laws.engine_case import chosen_of, log_softmax
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.engine.http.fake_vllm import experts_of
from tests.engine.http.plain_servers import LONG
from tests.engine.http.test_server_checks import NEEDS

PROMPT = (3, 9, 27, 17, 51)
HELD = {"pace": 0.003, "holds": ("a",)}  # a fake that stops after eight tokens until it is paused or told to abort


@dataclass
class Talk:
    """A server and its dialect, whose methods are called with the client and the facts."""

    server: FakeSglang
    client: ServerClient
    dialect: SglangDialect
    facts: ServerFacts

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self.dialect, name), self.client, self.facts)

    async def whole(self, request):
        """All chunks."""
        async with aclosing(self.stream(request)) as chunks:
            return [chunk async for chunk in chunks]

    async def runs(self, count: int) -> None:
        """Wait until so many requests run."""
        while len(self.server.running) != count:
            await asyncio.sleep(0.001)

    async def begun(self, **sampling):
        """What reads all chunks of a request, once it runs."""
        task = asyncio.create_task(self.whole(request(**sampling)))
        await self.runs(1)
        return task


@asynccontextmanager
async def fake(tiny, **options):
    with FakeSglang(tiny, FakeSglangOptions(**options)) as server:
        client = ServerClient(Address(server.url), seconds=LONG)
        try:
            dialect, facts = await detect_server(client)
            assert isinstance(dialect, SglangDialect)
            yield Talk(server, client, dialect, facts)
        finally:
            await client.close()


def tokens_of(chunks):
    return np.concatenate([chunk.tokens for chunk in chunks])


def request(id="a", *, prompt=PROMPT, stop_tokens=(), seed=None, chunk_tokens=1, **sampling):
    chosen, more = Sampling(**({"max_tokens": 8} | sampling)), {"stop_tokens": stop_tokens, "seed": seed}
    return TokenRequest(id=id, tokens=prompt, sampling=chosen, chunk_tokens=chunk_tokens, **more)


def forward(tiny, tokens, temperature=1.0):
    """[T] log-probs of the tokens by the model itself."""
    return chosen_of(log_softmax(engine_case.forward(tiny, PROMPT, tokens), temperature), tokens)


async def test_what_a_server_can_do_is_found_by_asking(tiny):
    async with fake(tiny) as talk:
        facts = talk.facts
    assert facts.server == "sglang 0.0.fake" and facts.model == "tiny" and facts.dtype == "float32"
    assert facts.max_length == 506 and facts.quantization is None
    assert facts.log_probs == "untruncated" and facts.version_spans and facts.sampling_mask
    assert not facts.keeps_kv and not facts.seeds and not facts.batch_invariant


async def test_a_server_that_a_run_has_left_paused_answers_the_next_one(tiny):
    async with fake(tiny) as talk:
        await talk.pause("keep")
        assert talk.server.paused
        async with asyncio.timeout(LONG):
            assert await talk.dialect.probe(talk.client) == talk.facts


async def test_a_server_that_has_not_ended_its_warm_up_is_not_ready(tiny):
    """Its own request would be held by a pause, and keep the cache from being flushed."""
    async with fake(tiny) as talk:
        talk.server.starting = True
        with pytest.raises(ServerError, match="/health: status 503") as raised:
            await talk.dialect.probe(talk.client)
        assert raised.value.status == 503


async def test_a_server_can_do_less(tiny):
    options = {"spans": False, "return_original_logprob": True, "enable_deterministic_inference": True}
    async with fake(tiny, **options) as talk:
        facts = talk.facts
    assert facts.log_probs == "raw" and facts.seeds and facts.batch_invariant
    assert not facts.version_spans


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_tokens_that_could_be_sampled_come_with_each_token_when_asked(tiny, incremental):
    plain = request(max_tokens=6, top_k=4, top_p=0.8, chunk_tokens=2)
    async with fake(tiny, incremental=incremental) as talk:
        without = await talk.whole(plain)
        outcome = await talk.whole(replace(plain, id="b", sampling_mask=True))
    assert all(chunk.sampling_mask is None for chunk in without)
    mask = SamplingMask.joined([chunk.sampling_mask for chunk in outcome])
    mask.check(tokens_of(outcome))
    assert len(mask) == 6 and mask.counts.max() <= 4
    assert all(chunk.sampled_log_prob is None for chunk in without)
    sampled, reported = (
        np.concatenate([getattr(chunk, name) for chunk in outcome]) for name in ("sampled_log_prob", "log_prob")
    )
    assert len(sampled) == 6 and (sampled > reported).all() and (sampled <= 0).all()  # of fewer tokens


def test_both_log_probs_come_with_masks():
    """So a training over masks can read those of the distribution sampled from."""
    facts = ServerFacts(
        server="sglang 1", model="m", log_probs="untruncated", sampling_mask=True, sampled_with_masks=True
    )
    both = capabilities_of(Sglang(sampling_mask=True), facts)
    assert both.log_probs == "both" and not both.scores_any_temperature
    assert capabilities_of(Sglang(), facts).log_probs == "untruncated"
    assert capabilities_of(Sglang(sampling_mask=True), replace(facts, log_probs="raw")).log_probs == "raw"


@pytest.mark.parametrize(("incremental", "interval"), [(False, 1), (False, 3), (True, 1), (True, 3)])
async def test_every_form_of_stream_gives_each_token_once(tiny, incremental, interval):
    async with fake(tiny, incremental=incremental) as talk:
        chunks = await talk.whole(request(temperature=0.7, chunk_tokens=interval))
    assert len(tokens_of(chunks)) == 8 and len(chunks) == (8 if interval == 1 else 3)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    log_probs = np.concatenate([chunk.log_prob for chunk in chunks])
    np.testing.assert_allclose(log_probs, forward(tiny, tokens_of(chunks), 0.7), atol=1e-4)
    assert chunks[-1].version_spans == (("default", 0, 8),)


@pytest.mark.slow
async def test_every_field_of_the_sampling_is_sent(tiny):
    """A server with defaults of its own samples as it is told."""
    defaults = {"temperature": 5.0, "top_k": 3, "max_new_tokens": 2, "stop": ["a"], "stop_token_ids": list(range(64))}
    defaults |= {"repetition_penalty": 1.9, "ignore_eos": False, "frequency_penalty": 2.0, "min_p": 0.9, "top_p": 0.1}
    async with fake(tiny) as plain, fake(tiny, preferred_sampling_params=defaults) as talk:
        expected, outcome = [await server.whole(request(temperature=0.0)) for server in (plain, talk)]
        calls = [call for call in talk.server.calls if call.url.path == "/generate"]
    assert tokens_of(outcome).tolist() == tokens_of(expected).tolist() and len(tokens_of(outcome)) == 8
    assert all(set(defaults) <= set(json.loads(call.content)["sampling_params"]) for call in calls)


async def test_a_grammar_is_sent_where_a_request_has_one(tiny):
    schema = '{"type": "object"}'
    async with fake(tiny) as talk:
        await talk.whole(request())
        await talk.whole(replace(request(), grammar=schema))
        calls = [json.loads(call.content) for call in talk.server.calls if call.url.path == "/generate"]
    assert [call["sampling_params"]["json_schema"] for call in calls[-2:]] == [None, schema]
    assert Sglang().grammars and capabilities_of(Sglang(), talk.facts).grammars


async def test_a_completion_ends_with_its_stop_token(tiny):
    async with fake(tiny) as talk:
        free = tokens_of(await talk.whole(request(temperature=0.0))).tolist()
        at = next(i for i in range(1, 8) if free[i] not in free[:i])
        chunks = await talk.whole(request("b", temperature=0.0, stop_tokens=(free[at],)))
    assert tokens_of(chunks).tolist() == free[: at + 1] and chunks[-1].finish_reason == "stop"


async def test_a_seed_repeats_a_completion(tiny):
    async with fake(tiny, enable_deterministic_inference=True) as talk:
        drawn = [tokens_of(await talk.whole(request(f"n{i}", seed=seed))).tolist() for i, seed in enumerate((9, 9, 10))]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
async def test_a_stop_at_a_token_that_ends_nothing_here_is_refused(tiny):
    """SGLang's own end of sequence can't be switched off alone."""
    async with fake(tiny) as talk:
        with pytest.raises(UserError, match="stopped at token 0, which ends no completion here"):
            for number in range(40):  # the end is one of 64 tokens
                await talk.whole(request(f"n{number}", max_tokens=40, stop_tokens=(63,)))


async def test_scores_are_those_of_the_given_tokens(tiny):
    tokens = np.array([5, 1, 44], np.int32)
    prompt, given = (WrittenTokens.of(np.int32(ids), None) for ids in (PROMPT, [*PROMPT, *tokens]))
    async with fake(tiny) as talk:
        outcome, none = await talk.score(given, len(PROMPT)), await talk.score(prompt, len(PROMPT))
        pairs = talk.server.input_pairs
        talk.server.input_pairs = lambda body: [*pairs(body)[:-1], [None, body["input_ids"][-1], None]]
        with pytest.raises(ServerError, match="a log-prob is None, not a number"):
            await talk.score(given, len(PROMPT))
    np.testing.assert_allclose(outcome, forward(tiny, tokens), atol=1e-4)
    assert outcome.dtype == np.float32 and none.shape == (0,)


async def test_the_last_token_of_the_vocabulary_is_scored(tiny):
    """SGLang names it 0; another token that it names so is still another."""
    last = tiny.model.config.vocab_size - 1
    tokens = np.array([5, last, 44], np.int32)
    given = WrittenTokens.of(np.int32([*PROMPT, *tokens]), None)
    async with fake(tiny) as talk:
        talk.facts = replace(talk.facts, sizes={"vocab_size": last + 1})
        outcome = await talk.score(given, len(PROMPT))
        talk.facts = replace(talk.facts, sizes={"vocab_size": last + 2})
        with pytest.raises(ServerError, match="log-probs are of other tokens"):
            await talk.score(given, len(PROMPT))
    np.testing.assert_allclose(outcome, forward(tiny, tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("names", "vocabulary", "named"),
    [
        ([5, 63, 44, 63], 64, True),
        ([5, 0, 44, 0], 64, True),
        ([5, 0, 44, 0], None, True),
        ([5, 0, 44, 0], 65, False),
        ([5, 0, 44, 63], None, False),  # one of them only
        ([5, 0, 0, 0], None, False),
        ([5, 1, 44, 1], None, False),
        ([5, 63, 44], None, False),
    ],
)
def test_the_names_of_tokens(names, vocabulary, named):
    assert are_named([5, 63, 44, 63], names, vocabulary) is named


def handover(folder, version=1):
    return WeightsInFolder(version=version, label=f"run-{version}", folder=folder, seconds=LONG)


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """A folder with other weights."""
    folder = tmp_path_factory.mktemp("other")
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
async def test_new_weights_while_requests_run(tiny, other):
    """Retracted, so that the flush works and no token is sampled from another version's KV; the spans say which. And
    the server is called the same afterwards, though its model path is that of the weights: a replica that was ejected
    for a moment could not return."""
    async with fake(tiny, **HELD) as talk:
        task = await talk.begun(max_tokens=40)
        await talk.pause("keep")
        await talk.load_folder(handover(other))
        await talk.reset_prefix_cache(running=True)
        assert (await talk.health()).weight_version == "run-1"
        await talk.resume()
        chunks = await task
        assert talk.server.stale == 0
        loading = next(call for call in talk.server.calls if call.url.path == "/update_weights_from_disk")
        assert (await talk.dialect.probe(talk.client)).model == talk.facts.model
    (first, start, seam), (second, again, end) = chunks[-1].version_spans
    assert (first, start, second, again, end) == ("default", 0, "run-1", seam, 40) and len(tokens_of(chunks)) == 40
    assert json.loads(loading.content).items() >= {"flush_cache": False, "abort_all_requests": False}.items()


async def test_requests_that_wait_are_counted(tiny, monkeypatch):
    async with fake(tiny, **HELD) as talk:
        loads = [{"num_waiting_reqs": 3}, {"num_waiting_reqs": 4}]
        monkeypatch.setattr(talk.server, "load", lambda: loads.pop())
        assert [(await talk.health()).waiting for _ in range(2)] == [4, 3]
        monkeypatch.setattr(talk.server, "load", lambda: {"num_waiting_reqs": "many"})
        with pytest.raises(ServerError, match="/v1/loads: unexpected response: num_waiting_reqs is"):
            await talk.health()


@pytest.mark.slow
async def test_a_flush_that_fails_is_an_error(tiny):
    """As it does while requests run, or are frozen in place."""
    async with fake(tiny, **HELD) as talk:
        task = await talk.begun(max_tokens=300)
        with pytest.raises(ServerError, match="/flush_cache.*: status 400: Flush cache failed."):
            await talk.reset_prefix_cache(running=False)
        await talk.client.post("/pause_generation", {"mode": "in_place"})
        with pytest.raises(ServerError, match="/flush_cache.*: status 400"):
            await talk.reset_prefix_cache(running=True)
        await talk.resume()
        await talk.pause("abort")
        await task
        await talk.reset_prefix_cache(running=False)
        assert not talk.server.prefixes


async def test_weights_that_do_not_load_are_an_error(tiny, tmp_path):
    async with fake(tiny) as talk:
        with pytest.raises(ServerError, match="update_weights_from_disk: .*no model in"):
            await talk.load_folder(handover(tmp_path))


async def test_it_releases_its_devices_and_takes_them_back(tiny, monkeypatch):
    """Only if it keeps its weights meanwhile, by its options."""
    async with fake(tiny) as talk:
        info = talk.server.server_info
        for backup in (False, True):
            more = {"enable_memory_saver": True, "enable_weights_cpu_backup": backup}
            monkeypatch.setattr(talk.server, "server_info", lambda more=more: info() | more)
            assert (await talk.dialect.probe(talk.client)).sleeps == backup
        await talk.pause("abort")
        await talk.sleep()
        assert talk.server.released == {"kv_cache", "weights"}
        await talk.wake()
        assert talk.server.released == {"kv_cache"}
        await talk.wake_cache()
        assert not talk.server.released and talk.server.paused


async def test_a_prompt_that_the_server_cuts_is_refused(tiny):
    long = request(prompt=tuple(1 + i % 60 for i in range(600)))
    async with fake(tiny, allow_auto_truncate=True) as cuts, fake(tiny) as refuses:
        with pytest.raises(UserError, match="read 506 tokens of a prompt of 600"):
            await cuts.whole(long)
        with pytest.raises(ServerError, match=r"status 400: Input length \(600 tokens\) exceeds"):
            await refuses.whole(long)


def event(tokens=(1, 2), pairs=((-0.5, 1), (-0.25, 2)), total=2, **meta):
    more = {"finish_reason": None, "prompt_tokens": len(PROMPT), "completion_tokens": total} | meta
    return {
        "output_ids": list(tokens),
        "meta_info": more | {"output_token_logprobs": [[*pair, None] for pair in pairs]},
    }


def read(body):
    return _StreamReader(ServerClient(Address("http://127.0.0.1:1")), request()).chunk(body)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (event(pairs=((-0.5, 1),)), ServerError, "1 log-probs where 2 tokens are counted"),
        (event(pairs=()), ServerError, "0 log-probs where 2 tokens are counted"),
        (event(tokens=(1, 3)), ServerError, "log-probs are of other tokens"),
        (event(finish_reason={"type": "nap"}), ServerError, "unexpected response"),
        ({"text": "hello"}, ServerError, "unexpected response"),
        (event(finish_reason={"type": "abort", "status_code": 500, "message": "oom"}), ServerError, "status 500: oom"),
        (event(prompt_tokens=4), UserError, "read 4 tokens of a prompt of 5"),
    ],
)
def test_what_can_not_be_read_is_no_completion(body, error, message):
    with pytest.raises(error, match=message):
        read(body)


ABORTED = {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}}


@pytest.mark.parametrize("masked", [False, True])
def test_an_aborted_answer_may_count_a_token_that_it_lacks(masked):
    """The server counts one token and sends no log-prob, also for a request that was aborted before its first."""
    spans = [{"version": "default", "start": 0, "end": 1}]
    body = event(tokens=(), pairs=(), total=1, weight_versions=spans, **ABORTED)
    reader = _StreamReader(ServerClient(Address("http://127.0.0.1:1")), replace(request(), sampling_mask=masked))
    chunk = reader.chunk(body)
    assert chunk.finish_reason == "abort" and len(chunk.tokens) == 0 and chunk.version_spans is None
    assert (chunk.sampling_mask is not None and len(chunk.sampling_mask) == 0) if masked else not chunk.sampling_mask


def test_an_aborted_answer_that_lacks_a_token_has_no_routes():
    """They would be of a token more than there are, which is the end of a completion's attempts."""
    shape = RouteShape(layers=3, mixtures=(0, 2), experts=8, per_token=2)
    reader = _StreamReader(ServerClient(Address("http://127.0.0.1:1")), replace(request(), routes=shape))
    chunk = reader.chunk(event(tokens=(), pairs=(), total=1, routed_experts="of one more", **ABORTED))
    assert chunk.finish_reason == "abort" and chunk.routes is None


def test_the_status_of_an_abort_is_read_before_its_tokens():
    ending = {"type": "abort", "status_code": 503, "message": "Request waiting timeout reached."}
    with pytest.raises(ServerError, match="status 503: Request waiting timeout reached"):
        read(event(pairs=(), total=1, finish_reason=ending))


def test_sampling_masks_without_top_k_are_refused_before_the_run():
    spec = Sglang(url="http://127.0.0.1:1", sampling_mask=True)
    refused, taken = (replace(NEEDS, samplings=(Sampling(top_p=0.9, top_k=k),)) for k in (0, 3))
    with pytest.raises(FieldError, match="sampling_mask=True is refused by SGLang without a top_k.*sampling.top_k=512"):
        spec.check(refused)
    with pytest.raises(FieldError, match="can't be reached"):  # the rest is asked of the server
        spec.check(taken)


async def test_prompts_up_to_the_maximum_length_are_taken(tiny):
    """The server refuses prompts that reach into the last tokens of its context."""
    long = request(prompt=tuple(1 + i % 60 for i in range(505)), max_tokens=1)
    async with fake(tiny) as talk:
        assert talk.facts.max_length == 506
        assert len(tokens_of(await talk.whole(long))) == 1


def test_a_log_prob_that_is_missing_is_nan():
    assert np.isnan(read(event(pairs=((None, 1), (-0.25, 2)))).log_prob).tolist() == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [False, True])
async def test_experts_come_with_the_end_where_they_are_asked_for(tiny, incremental):
    shape = RouteShape(layers=3, mixtures=(0, 2), experts=8, per_token=2)
    asked = request("x", max_tokens=6)
    async with fake(tiny, incremental=incremental, enable_return_routed_experts=True) as talk:
        assert talk.facts.latest_routes and talk.facts.routed_experts
        routed, plain = await talk.whole(replace(asked, routes=shape)), await talk.whole(asked)
    assert all(chunk.routes is None for chunk in [*routed[:-1], *plain])
    fed = [*PROMPT, *tokens_of(routed)[:-1].tolist()]
    assert np.array_equal(routed[-1].routes, experts_of(fed)[:, [0, 2]])
    async with fake(tiny) as talk:
        assert talk.facts.latest_routes and not talk.facts.routed_experts
        assert (await talk.whole(replace(asked, routes=shape)))[-1].routes is None


def test_a_longer_server_is_asked_for_by_its_own_option():
    """Of a run whose `model.max_length` is set: its context has the tokens that no prompt may reach into."""
    spec = Sglang(url="http://127.0.0.1:1")
    facts = ServerFacts(server="sglang 1", model="m", max_length=64, log_probs="untruncated", takes_weights=True)
    with pytest.raises(UserError, match=r"of 64 tokens, and the run has 100; set model.max_length=64, .*-length 106$"):
        check_facts(spec, facts, NEEDS, "http://127.0.0.1:1")


@pytest.mark.parametrize("arguments", [(), ("--sampling-mask-max-tokens=5000",)])
def test_masks_of_a_large_top_k_are_refused_before_a_server_starts(arguments, monkeypatch):
    spec = Sglang(sampling_mask=True, serve=Serve(arguments=arguments))
    monkeypatch.setattr("proxima.engine.http.engine.check_serve", lambda *_, **__: None)
    needs = replace(NEEDS, samplings=(Sampling(top_k=5000),))
    if arguments:
        assert spec.check(needs) == []  # the server is asked once it runs
        return
    with pytest.raises(
        FieldError, match="top_k of 5000, more than 4096; set .*=4096.* --sampling-mask-max-tokens 5000"
    ):
        spec.check(needs)


async def test_masks_of_a_larger_top_k_than_the_server_allows_are_refused(tiny):
    async with fake(tiny, sampling_mask_max_tokens=16) as talk:
        assert talk.facts.largest_mask == 16
        check_masks(Sglang(sampling_mask=True), talk.facts, replace(NEEDS, samplings=(Sampling(top_k=16),)), "it")
        with pytest.raises(ServerError, match="status 400: return_sampling_mask requires .* <= 16; got top_k=17"):
            await talk.whole(replace(request(top_k=17), sampling_mask=True))
    with pytest.raises(FieldError, match="is refused by it with a top_k of 17, more than 16"):
        check_masks(Sglang(sampling_mask=True), talk.facts, replace(NEEDS, samplings=(Sampling(top_k=17),)), "it")


def test_a_final_answer_without_masks_is_named():
    reader = _StreamReader(ServerClient(Address("http://127.0.0.1:1")), replace(request(), sampling_mask=True))
    with pytest.raises(ServerError, match="0 sampling masks where 2 tokens are counted"):
        reader.chunk(event(finish_reason={"type": "length", "length": 2}))


async def test_a_server_without_the_call_for_its_queue_is_too_old(tiny):
    with FakeSglang(tiny) as server:
        table = server.table
        server.table = lambda: table() | {("GET", "/v1/loads"): lambda _: Response(404, json={"detail": "Not Found"})}
        client = ServerClient(Address(server.url), seconds=LONG)
        with pytest.raises(UserError, match="sglang 0.0.fake has no /v1/loads.*; start SGLang 0.5.22 or later"):
            await SglangDialect().probe(client)
        await client.close()
