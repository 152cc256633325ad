"""The dialect of SGLang, over a fake of its protocol."""

import asyncio
import math
from contextlib import aclosing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.check.engine_case import tiny_model
from proxima.data import SamplingMask, UserError
from proxima.engine.http.client import Address, ServerClient, ServerError
from proxima.engine.http.detect import detect_server
from proxima.engine.http.dialect import TokenRequest, WeightHandover
from proxima.engine.http.route_rows import RouteShape
from proxima.engine.http.sglang import SglangDialect
from proxima.engine.protocol import Sampling
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.engine.http.fake_vllm import experts_of

PROMPT = (3, 9, 27, 17, 51)


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


@contextmanager
def fake(tiny, **options):
    with FakeSglang(tiny, FakeSglangOptions(**options)) as server:
        yield server


def talk(server, use, *, seconds=30.0):
    """What `use(dialect, client, facts)` gives."""

    async def main():
        client = ServerClient(Address(server.url), seconds=seconds)
        try:
            dialect, facts = await detect_server(client)
            assert isinstance(dialect, SglangDialect)
            return await use(dialect, client, facts)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


async def whole(dialect, client, facts, request):
    """All chunks."""
    async with aclosing(dialect.stream(client, facts, request)) as chunks:
        return [chunk async for chunk in chunks]


def tokens_of(chunks):
    return np.concatenate([chunk.tokens for chunk in chunks])


def values_of(chunks):
    return np.concatenate([chunk.log_prob for chunk in chunks])


def request(id="a", *, prompt=PROMPT, stop_tokens=(), **sampling):
    chosen = Sampling(**({"max_tokens": 8} | sampling))
    return TokenRequest(id=id, tokens=prompt, sampling=chosen, stop_tokens=stop_tokens)


def forward(tiny, tokens, temperature=1.0):
    """[T] log-probs of the tokens by the model itself."""
    ids = [*PROMPT, *map(int, tokens)]
    with torch.inference_mode():
        values = torch.log_softmax(tiny.model(torch.tensor([ids])).logits[0].double() / temperature, -1)
    return np.array([float(values[at - 1, ids[at]]) for at in range(len(PROMPT), len(ids))])


async def facts_alone(dialect, client, facts):
    return facts


def test_what_a_server_can_do_is_found_by_asking(tiny):
    with fake(tiny) as server:
        facts = talk(server, facts_alone)
    assert facts.server == "sglang 0.0.fake" and facts.model == "tiny" and facts.dtype == "float32"
    assert facts.max_length == 510 and facts.quantization is None
    assert facts.log_probs == "untruncated" and facts.token_ids and facts.scores
    assert facts.weight_updates == ("disk",) and facts.weight_version and facts.version_spans
    assert facts.pause_modes == {"abort", "keep"} and facts.interrupts == {"recompute"}
    assert facts.prefix_cache and facts.cache_salt and facts.sampling_mask
    assert not facts.seeds and not facts.batch_invariant
    assert facts.more["weight transfer"] == "disk, distributed, tensor"


def test_an_older_server_can_do_less(tiny):
    older = {"spans": False, "salts": False, "modes": ("abort",)}
    with fake(tiny, **older, return_original_logprob=True, enable_deterministic_inference=True) as server:
        facts = talk(server, facts_alone)
    assert facts.log_probs == "raw" and facts.seeds and facts.batch_invariant
    assert facts.pause_modes == {"abort"} and not facts.interrupts and facts.weight_updates == ("disk",)
    assert facts.prefix_cache and not facts.cache_salt and not facts.version_spans


@pytest.mark.parametrize("incremental", ["no", "ids"])
def test_the_tokens_that_could_be_sampled_come_with_each_token_when_asked(tiny, incremental):
    cut = Sampling(max_tokens=6, top_k=4, top_p=0.8)
    plain = TokenRequest(id="a", tokens=PROMPT, sampling=cut, chunk_tokens=2)

    async def use(dialect, client, facts):
        return [
            await whole(dialect, client, facts, completion)
            for completion in (plain, replace(plain, id="b", sampling_mask=True))
        ]

    with fake(tiny, incremental=incremental) as server:
        without, outcome = talk(server, use)
    assert all(chunk.sampling_mask is None for chunk in without)
    mask = SamplingMask.joined([chunk.sampling_mask for chunk in outcome])
    mask.check(tokens_of(outcome))
    assert len(mask) == 6 and mask.counts.max() <= 4


@pytest.mark.parametrize("incremental", ["no", "ids", "all"])
@pytest.mark.parametrize("interval", [1, 3])
def test_every_form_of_stream_gives_each_token_once(tiny, incremental, interval):
    async def use(dialect, client, facts):
        asked = TokenRequest(
            id="a", tokens=PROMPT, sampling=Sampling(max_tokens=8, temperature=0.7), chunk_tokens=interval
        )
        return await whole(dialect, client, facts, asked)

    with fake(tiny, incremental=incremental) as server:
        chunks = talk(server, use)
    assert len(tokens_of(chunks)) == 8 and len(chunks) == (8 if interval == 1 else 3)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    np.testing.assert_allclose(values_of(chunks), forward(tiny, tokens_of(chunks), 0.7), atol=1e-4)
    assert chunks[-1].version_spans == (("default", 0, 8),)


def test_every_field_of_the_sampling_is_sent(tiny):
    """A server with defaults of its own samples as it is told."""
    asked = request(temperature=0.0)
    defaults = {"temperature": 5.0, "top_k": 3, "max_new_tokens": 2, "stop": ["a"], "stop_token_ids": list(range(64))}
    defaults |= {"repetition_penalty": 1.9, "ignore_eos": False, "frequency_penalty": 2.0, "min_p": 0.9, "top_p": 0.1}
    with fake(tiny) as plain, fake(tiny, preferred_sampling_params=defaults) as server:
        expected = talk(plain, lambda d, c, f: whole(d, c, f, asked))
        outcome = talk(server, lambda d, c, f: whole(d, c, f, asked))
        sent = [call.body["sampling_params"] for call in server.calls if call.path == "/generate"]
    assert tokens_of(outcome).tolist() == tokens_of(expected).tolist() and len(tokens_of(outcome)) == 8
    assert all(set(defaults) <= set(entry) for entry in sent)


def test_stop_ids_end_a_completion_and_nothing_else_does(tiny):
    greedy = request(temperature=0.0)

    async def use(dialect, client, facts):
        first = tokens_of(await whole(dialect, client, facts, greedy))
        at = next(i for i, token in enumerate(first) if token not in first[:i] and i > 1)
        stopped = await whole(dialect, client, facts, request(temperature=0.0, stop_tokens=(int(first[at]),)))
        return first, at, stopped

    with fake(tiny) as server:
        first, at, stopped = talk(server, use)
    assert tokens_of(stopped).tolist() == first[: at + 1].tolist() and stopped[-1].finish_reason == "stop"


def test_a_stop_at_a_token_that_ends_nothing_here_is_refused(tiny):
    """SGLang's own end of sequence can't be switched off alone."""

    async def use(dialect, client, facts):
        for number in range(40):  # the end is one of 64 tokens
            await whole(dialect, client, facts, request(f"n{number}", max_tokens=40, stop_tokens=(63,)))

    with fake(tiny) as server, pytest.raises(UserError, match="stopped at token 0, which ends no completion here"):
        talk(server, use)


def test_scores_are_those_of_the_given_tokens(tiny):
    tokens = np.array([5, 1, 44], np.int32)
    with fake(tiny) as server:
        outcome = talk(server, lambda d, c, f: d.score(c, f, np.array(PROMPT, np.int32), tokens))
        none = talk(server, lambda d, c, f: d.score(c, f, np.array(PROMPT, np.int32), tokens[:0]))
    np.testing.assert_allclose(outcome, forward(tiny, tokens), atol=1e-4)
    assert outcome.dtype == np.float32 and none.shape == (0,)


@pytest.mark.parametrize("value", [None, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_an_error(tiny, value):
    with fake(tiny) as server:
        pairs = server.input_pairs
        server.input_pairs = lambda body: [*pairs(body)[:-1], [value, body["input_ids"][-1], None]]
        with pytest.raises(ServerError, match="log-prob"):
            talk(server, lambda d, c, f: d.score(c, f, np.array(PROMPT, np.int32), np.array([5, 1], np.int32)))


def test_an_abort_ends_its_request_alone(tiny):
    """`a1` begins `a10`, and an abort at SGLang ends what begins with an id."""

    async def use(dialect, client, facts):
        ids = ("a1", "a10")
        tasks = {
            entry: asyncio.create_task(whole(dialect, client, facts, request(entry, max_tokens=300))) for entry in ids
        }
        while (await dialect.health(client, facts)).running != 2:
            await asyncio.sleep(0.001)
        await dialect.abort(client, facts, ["a1", "unknown"])
        first = await tasks["a1"]
        assert not tasks["a10"].done()
        await dialect.abort(client, facts, [])
        await dialect.abort(client, facts, ["a10"])
        return first, await tasks["a10"]

    with fake(tiny, pace=0.003, holds=("a",)) as server:
        first, second = talk(server, use)
    assert first[-1].finish_reason == second[-1].finish_reason == "abort"
    assert 0 < len(tokens_of(first)) < 300


def test_a_closed_stream_ends_its_request(tiny):
    async def use(dialect, client, facts):
        async with aclosing(dialect.stream(client, facts, request(max_tokens=300))) as chunks:
            await anext(chunks)
        while (await dialect.health(client, facts)).running:
            await asyncio.sleep(0.001)
        return True

    with fake(tiny, pace=0.003) as server:
        assert talk(server, use)


def handover(folder, version=1):
    return WeightHandover(version=version, label=f"run-{version}", folder=folder, how="disk", seconds=30)


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """A folder with other weights."""
    import copy

    folder = tmp_path_factory.mktemp("other")
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(folder)
    return folder


def test_new_weights_while_requests_run(tiny, other):
    """Retracted, so that the flush works and no token is sampled from another version's KV; the spans say which."""

    async def use(dialect, client, facts):
        task = asyncio.create_task(whole(dialect, client, facts, request(max_tokens=200)))
        while (await dialect.health(client, facts)).running != 1:
            await asyncio.sleep(0.001)
        await dialect.pause(client, facts, "keep")
        await dialect.load_weights(client, facts, handover(other))
        await dialect.reset_prefix_cache(client, facts, running=True)
        assert (await dialect.health(client, facts)).weight_version == "run-1"
        await dialect.resume(client, facts)
        return await task

    with fake(tiny, pace=0.003, holds=("a",)) as server:
        chunks = talk(server, use)
        assert server.stale == 0 and not server.died
        loading = next(call.body for call in server.calls if call.path == "/update_weights_from_disk")
    spans = chunks[-1].version_spans
    assert [span[0] for span in spans] == ["default", "run-1"] and spans[0][1] == 0
    assert spans[0][2] == spans[1][1] and spans[1][2] == len(tokens_of(chunks)) == 200
    assert loading["flush_cache"] is False and loading["abort_all_requests"] is False


def test_a_pause_that_aborts_returns_when_nothing_runs(tiny):
    async def use(dialect, client, facts):
        task = asyncio.create_task(whole(dialect, client, facts, request(max_tokens=300)))
        while (await dialect.health(client, facts)).running != 1:
            await asyncio.sleep(0.001)
        await dialect.pause(client, facts, "abort")
        health = await dialect.health(client, facts)
        await dialect.resume(client, facts)
        return health, await task

    with fake(tiny, pace=0.003, holds=("a",)) as server:
        health, chunks = talk(server, use)
        assert [call.body for call in server.calls if call.path == "/pause_generation"] == [{"mode": "abort"}]
    assert (health.running, health.waiting) == (0, 0) and chunks[-1].finish_reason == "abort"


def test_a_flush_that_fails_is_an_error(tiny):
    """As it does while requests run, or are frozen in place."""

    async def use(dialect, client, facts):
        task = asyncio.create_task(whole(dialect, client, facts, request(max_tokens=300)))
        while (await dialect.health(client, facts)).running != 1:
            await asyncio.sleep(0.001)
        with pytest.raises(ServerError, match="the prefix cache was not emptied: requests hold on to it"):
            await dialect.reset_prefix_cache(client, facts, running=False)
        await client.post("/pause_generation", {"mode": "in_place"})
        with pytest.raises(ServerError, match="not emptied"):
            await dialect.reset_prefix_cache(client, facts, running=True)
        await dialect.resume(client, facts)
        await dialect.abort(client, facts, ["a"])
        await task
        await dialect.reset_prefix_cache(client, facts, running=False)

    with fake(tiny, pace=0.003, holds=("a",)) as server:
        talk(server, use)
        assert not server.prefixes


def test_weights_that_do_not_load_are_an_error(tiny, tmp_path):
    async def use(dialect, client, facts):
        with pytest.raises(ServerError, match="update_weights_from_disk: .*no model in"):
            await dialect.load_weights(client, facts, handover(tmp_path))

    with fake(tiny) as server:
        talk(server, use)


def test_a_prompt_that_the_server_cuts_is_refused(tiny):
    long = tuple(1 + i % 60 for i in range(600))
    with (
        fake(tiny, allow_auto_truncate=True) as server,
        pytest.raises(UserError, match="read 511 tokens of a prompt of 600"),
    ):
        talk(server, lambda d, c, f: whole(d, c, f, request(prompt=long)))
    with fake(tiny) as server, pytest.raises(ServerError, match="longer than the context length"):
        talk(server, lambda d, c, f: whole(d, c, f, request(prompt=long)))


def event(tokens=(1, 2), pairs=((-0.5, 1), (-0.25, 2)), total=2, **meta):
    more = {"finish_reason": None, "prompt_tokens": len(PROMPT), "completion_tokens": total} | meta
    return {
        "output_ids": list(tokens),
        "meta_info": more | {"output_token_logprobs": [[*pair, None] for pair in pairs]},
    }


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (event(pairs=((-0.5, 1),)), ServerError, "1 log-probs where 2 tokens are counted"),
        (event(pairs=()), ServerError, "0 log-probs where 2 tokens are counted"),
        (event(tokens=(1, 3)), ServerError, "log-probs are of other tokens"),
        (event(finish_reason={"type": "nap"}), ServerError, "of unexpected form"),
        ({"text": "hello"}, ServerError, "of unexpected form"),
        (event(finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), UserError, "too long"),
        (event(finish_reason={"type": "abort", "status_code": 500, "message": "oom"}), ServerError, "status 500: oom"),
        (event(prompt_tokens=4), UserError, "read 4 tokens of a prompt of 5"),
    ],
)
def test_what_can_not_be_read_is_no_completion(tiny, body, error, message):
    from proxima.engine.http.sglang import _StreamReader

    reader = _StreamReader(ServerClient(Address("http://127.0.0.1:1")), request())
    with pytest.raises(error, match=message):
        reader.chunk(body)


def test_a_log_prob_that_is_missing_is_nan():
    from proxima.engine.http.sglang import _StreamReader

    reader = _StreamReader(ServerClient(Address("http://127.0.0.1:1")), request())
    assert np.isnan(reader.chunk(event(pairs=((None, 1), (-0.25, 2)))).log_prob).tolist() == [True, False]


def test_a_server_is_called_the_same_after_new_weights(tiny, other):
    """Its model path is that of the weights: a replica that was ejected for a moment could not return."""

    async def use(dialect, client, facts):
        await dialect.pause(client, facts, "keep")
        await dialect.load_weights(client, facts, handover(other))
        await dialect.resume(client, facts)
        return facts, await dialect.probe(client)

    with fake(tiny) as server:
        before, after = talk(server, use)
    assert before.model == after.model


@pytest.mark.parametrize("incremental", ["no", "all"])
def test_experts_come_with_the_end_where_they_are_asked_for(tiny, incremental):
    shape = RouteShape(layers=3, mixtures=(0, 2), experts=8, per_token=2)

    async def use(dialect, client, facts):
        assert facts.latest_routes
        asked = TokenRequest(id="x", tokens=PROMPT, sampling=Sampling(max_tokens=6))
        routed = await whole(dialect, client, facts, replace(asked, routes=shape))
        return facts.routed_experts, routed, await whole(dialect, client, facts, asked)

    with fake(tiny, incremental=incremental, enable_return_routed_experts=True) as server:
        with_experts, routed, plain = talk(server, use)
    assert with_experts and all(chunk.routes is None for chunk in [*routed[:-1], *plain])
    fed = [*PROMPT, *tokens_of(routed)[:-1].tolist()]
    assert np.array_equal(routed[-1].routes, experts_of(fed)[:, [0, 2]])
    with fake(tiny) as server:
        with_experts, routed, _ = talk(server, use)
    assert not with_experts and routed[-1].routes is None
