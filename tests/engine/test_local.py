"""The local engine's scheduler: queue, stops, publish, abort, pause, and that a completion depends on nothing but its
own request."""

import asyncio
import re
from contextlib import aclosing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from proxima.data import FieldError, UserError
from proxima.engine.local.decoder import Matrix, cached_attention, reach_mask, reach_of
from proxima.engine.local.general_decoder import SteadyRows
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.process.process_engine import LocalProcess
from proxima.engine.protocol import EngineSetup, Request, Sampling, ScoreRequest, WeightUpdate
from proxima.model.pretrained import LoadedModel
from tests.engine.helpers import agree, behavior, engine, prompt, requests, run, steps, threads, trainer_log_prob
from tests.engine.test_kept_prefixes import prefilled
from tests.model.rows import loaded
from tests.tiny import CONTEXT, tiny_tokenizer

# ---- independence ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decoder", "dtype"),
    [("llama", "fast", torch.float32), ("qwen2", "fast", torch.bfloat16), ("gpt2", "general", torch.bfloat16)],
)
def test_a_completion_does_not_know_its_neighbours(kind, decoder, dtype):
    """Alone, among many, in other slots, in another order, with other samples of its prompt: the same tokens, the same
    bits."""
    asked = requests(6, 5, temperature=1.1, max_tokens=10)
    crowd = run(engine(kind, decoder, slots=64, dtype=dtype), asked)
    assert run(engine(kind, decoder, slots=8, dtype=dtype, prefill_tokens=10), asked) == crowd
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = run(engine(kind, decoder, slots=16, dtype=dtype), [asked[i] for i in order])
    assert shuffled == [crowd[i] for i in order]
    local = engine(kind, decoder, slots=8, dtype=dtype)
    assert [run(local, [request])[0] for request in asked[::7]] == crowd[::7]


COMMON = {"initializer_range": 0.05, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3}  # of 64, as in the 135M model
LLAMA = LlamaConfig(**COMMON, **HEADS, hidden_size=576, intermediate_size=1536, vocab_size=4099)
GPT2 = GPT2Config(**COMMON, n_embd=768, n_head=12, n_layer=2, n_positions=512, vocab_size=1031)


@cache
def wide(kind: str) -> LoadedModel:
    """Sizes at which matrix products are cut into blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (LlamaForCausalLM(LLAMA) if kind == "llama" else GPT2LMHeadModel(GPT2)).eval()
    return LoadedModel(model=model, tokenizer=tiny_tokenizer(), path="wide")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decoder", "dtype"),
    [("llama", "fast", "float32"), ("llama", "fast", "bfloat16"), ("gpt2", "general", "bfloat16")],
)
def test_at_real_sizes_too(kind, decoder, dtype):
    engine = wide(kind)
    asked = [
        Request(prompt=prompt(i, 3 + 13 * i), sample=s, sampling=Sampling(max_tokens=4), seed=3)
        for i in range(5)
        for s in range(5)
    ]
    crowd = run(LocalEngine(engine, Local(slots=40, dtype=dtype, decoder=decoder)), asked)
    few = LocalEngine(engine, Local(slots=8, dtype=dtype, decoder=decoder))
    for some in (slice(3, 4), slice(17, 18), slice(22, 25)):
        assert run(few, asked[some]) == crowd[some]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [60, 300])
@pytest.mark.parametrize("group", [1, 3])
def test_a_long_neighbour_does_not_move_the_split_of_a_sum(group, length, dtype):
    query, key, value = (torch.randn(8, heads, 512, 64).to(dtype) for heads in (3 * group, 3, 3))
    position = torch.full((8,), length - 1)

    def attention(reach: int) -> torch.Tensor:
        mask = reach_mask(position, reach)
        return cached_attention(query[:, :, 0], key[:, :, :reach], value[:, :, :reach], mask, None)

    shortest = attention(reach_of(int(position.max()) + 1, 512))
    assert all(torch.equal(attention(reach), shortest) for reach in (320, 384, 448, 512))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_any_number_of_rows_has_the_same_bits(dtype):
    """As the tokens of an expert are."""
    with threads(2):
        matrix, rows = Matrix(torch.randn(32, 96), None, dtype), torch.randn(64, 96).to(dtype)
        assert all(torch.equal(matrix(rows[:count]), matrix(rows)[:count]) for count in range(1, 65))


def test_a_processor_on_which_onednn_packs_no_bf16(monkeypatch):
    """With AVX2 alone, oneDNN refuses to pack a matrix in bf16."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight, rows = torch.randn(32, 96).bfloat16(), torch.randn(4, 96).bfloat16()
    matrix = Matrix(weight, None, torch.bfloat16)
    assert not matrix.packed
    torch.testing.assert_close(matrix(rows), rows @ weight.T)


def test_steady_rows_keep_the_arguments_of_a_product():
    bias, x, weight = torch.randn(16), torch.randn(5, 24), torch.randn(24, 16)
    with SteadyRows(torch.float32):
        scaled = torch.addmm(bias, x, weight, beta=2.0)
    torch.testing.assert_close(scaled, x @ weight + 2 * bias)


@pytest.mark.slow
def test_seeds_prompts_samples_and_turns_decide_the_draws():
    asked = requests(2, 3, temperature=1.5)
    first, again = (run(engine(), asked) for _ in range(2))
    assert first == again and len({tuple(c.tokens) for c in first}) == len(first)
    other_seed, second_turn = ([replace(r, **change) for r in asked] for change in ({"seed": 2}, {"turn": 1}))
    other_uid = [replace(r, prompt=replace(r.prompt, uid=r.prompt.uid + 50)) for r in asked]
    for others in (other_seed, second_turn, other_uid):
        pairs = zip(first, run(engine(), others), strict=True)
        assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs)
    both = run(engine(), [second_turn[0], asked[0]])
    assert both == [*run(engine(), second_turn[:1]), first[0]] and both[0].turn == 1


# ---- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "prefill_tokens"), [(1, 1), (8, 2048), (16, 20), (200, 2048)])
def test_every_request_gets_one_answer_however_few_the_slots(slots, prefill_tokens):
    asked = [
        replace(r, sampling=replace(r.sampling, max_tokens=1 + (7 * i) % 23)) for i, r in enumerate(requests(5, 7))
    ]
    local = engine(slots=slots, prefill_tokens=prefill_tokens)
    given = run(local, asked)
    assert [(c.prompt_uid, c.sample) for c in given] == [(r.prompt.uid, r.sample) for r in asked]
    assert all(len(c.tokens) <= r.sampling.max_tokens for r, c in zip(asked, given, strict=True))
    assert local.scheduler.generated_tokens == sum(len(c.tokens) for c in given)
    assert not local.scheduler.running and not local.scheduler.waiting
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", asked, given), rtol=0, atol=1e-5)


def test_a_group_larger_than_the_slots_runs_its_prompt_once():
    local, asked = engine(slots=8), requests(1, 30, max_tokens=6)
    counts = prefilled(local)
    given = run(local, asked)
    assert len(given) == 30 and counts == [3]
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", asked, given), rtol=0, atol=1e-5)


async def test_completions_stream_as_soon_as_they_end():
    short, *long = requests(1, 3, top_k=1, max_tokens=30)
    local, short = engine(), replace(short, sampling=replace(short.sampling, max_tokens=1))
    async with aclosing(local.generate([short, *long])) as stream:
        assert (await anext(stream)).sample == 0
        lengths = [int(local.scheduler.table.length[running.line]) for running in local.scheduler.running]
    assert lengths in ([1, 1], [2, 2])


def undisturbed(asked):
    return collect(engine(), asked)


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch):
    monkeypatch.setattr("proxima.engine.local.local_engine.STEPS_PER_TURN", 1)


@pytest.mark.slow
async def test_a_completion_does_not_wait_for_the_turns_of_other_callers(monkeypatch):
    monkeypatch.setattr("proxima.engine.local.local_engine.STEPS_PER_TURN", 8)
    local = engine(slots=8)

    async def at_the_end(uid, most):
        assert await collect(local, requests(1, 1, first=uid, max_tokens=most))
        return local.scheduler.generated_tokens

    *_, short = await asyncio.gather(*(at_the_end(uid, 120) for uid in range(7)), at_the_end(7, 10))
    assert short <= 8 * (10 + 2 * 8)  # by turns, each of the others would decode 8 steps in between


# ---- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_max_tokens_and_stop_tokens():
    asked = requests(3, 8, max_tokens=40, temperature=1.5)
    given = run(engine(), asked)
    stops = [c for c in given if c.finish_reason == "stop"]
    assert 0 < len(stops) < len(given)
    for c in given:
        assert c.finish_reason in ("stop", "length")
        assert (c.tokens[-1] == 0) == (c.finish_reason == "stop") and 0 not in c.tokens[:-1]
        assert c.finish_reason == "stop" or len(c.tokens) == 40
        assert "<|im_end|>" not in c.text and c.temperature == 1.5 and set(c.policy_version) == {0}
        assert c.text == tiny_tokenizer().decode(c.tokens).removesuffix("<|im_end|>")


@pytest.mark.slow
def test_several_stop_tokens():
    model = loaded("llama")
    model.model.generation_config.eos_token_id = [0, 50, 51, 52, 53, 54, 55]
    given = run(LocalEngine(model, Local(dtype="float32")), requests(2, 8, max_tokens=60, temperature=2.0))
    ended = {c.tokens[-1] for c in given if c.finish_reason == "stop"}
    assert len(ended) > 2 and ended <= {0, 50, 51, 52, 53, 54, 55}


@pytest.mark.slow
def test_the_earliest_stop_string_ends_the_completion_and_its_text():
    """One token a byte, so a stop string of three letters spans three tokens."""
    asked = requests(1, 2, max_tokens=40, temperature=1.3)
    free, decode = run(engine(), asked), tiny_tokenizer().decode
    text = free[0].text
    stops = text[14:16], text[12:15]
    given = run(engine(), [replace(r, sampling=replace(r.sampling, stop=(*stops, "no such text"))) for r in asked])
    end = min(text.find(stop) + len(stop) for stop in stops)
    assert given[0].text == text[:end] and given[0].stopped_by in stops and given[0].finish_reason == "stop"
    assert any(stop in decode(given[0].tokens) for stop in stops)
    assert not any(stop in decode(given[0].tokens[:-1]) for stop in stops)
    for completion, other in zip(given, free, strict=True):
        count = len(completion.tokens)
        assert completion.tokens.tolist() == other.tokens[:count].tolist()
        assert completion.sampled_log_prob.tolist() == other.sampled_log_prob[:count].tolist()


def test_the_context_is_never_exceeded():
    asked = [
        Request(prompt=prompt(i, CONTEXT - 1 - i), sample=0, sampling=Sampling(max_tokens=50), seed=1) for i in range(6)
    ]
    given = run(engine("gpt2"), asked)  # learned positions: one too far would raise
    for r, c in zip(asked, given, strict=True):
        room = CONTEXT - len(r.prompt.tokens)
        assert c.finish_reason == "stop" or (c.finish_reason == "length" and len(c.tokens) == room)
    assert len(given[0].tokens) == 1
    torch.testing.assert_close(behavior(given), trainer_log_prob("gpt2", asked, given), rtol=0, atol=1e-5)
    short = run(engine(max_length=10), requests(1, 4))
    assert all(len(c.tokens) <= 7 and (c.finish_reason == "stop" or len(c.tokens) == 7) for c in short)


def test_a_prompt_without_room_is_refused_and_the_engine_continues():
    local = engine(max_length=8)
    with pytest.raises(ValueError, match=r"prompt 1 has 8 tokens; the limit, one new token included, is 8\."):
        run(local, requests(2, 2))
    assert not local.scheduler.waiting and not local.scheduler.running
    assert len(run(local, requests(1, 2))) == 2


@pytest.mark.slow
def test_an_empty_prompt_is_refused_and_other_requests_are_unharmed():
    local, asked = engine(slots=8), requests(3, 4)
    empty = Request(prompt=replace(prompt(9), tokens=np.empty(0, np.int32)), sample=0, sampling=Sampling())

    async def both():
        return await asyncio.gather(collect(local, asked), collect(local, [empty]), return_exceptions=True)

    given, error = asyncio.run(both())
    assert str(error) == "prompt 9 has no tokens; nothing predicts the first one." and isinstance(error, UserError)
    assert given == run(engine(slots=8), asked)


# ---- abort, pause, publish -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_publishing_the_same_weights_changes_nothing():
    local, asked = engine(), requests(2, 4)
    task = asyncio.ensure_future(collect(local, asked))
    for _ in range(9):
        await steps(local, 1)
        await local.publish(WeightUpdate(version=3, module=loaded("llama").model))
    agree(await task, await undisturbed(asked))


# ---- several callers -------------------------------------------------------------------------------------------------


SAME = [replace(r, sampling=replace(r.sampling, max_tokens=30 if r.sample else 3)) for r in requests(1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staying", "leaves", "after"),
    [
        *((requests(2, 3, first=10, max_tokens=30), requests(3, 5, max_tokens=30), after) for after in (0, 3)),
        (SAME, SAME, 0),
    ],
    ids=["at once", "later", "the same requests"],
)
async def test_a_caller_that_leaves_takes_its_own_requests_along_and_no_others(staying, leaves, after):
    local = engine(slots=8)
    other = asyncio.ensure_future(collect(local, staying))
    leaving = local.generate(leaves)
    for _ in range(1 + after):
        await anext(leaving)
    await leaving.aclose()
    await steps(local, 1)
    uids = {row.request.prompt.uid for row in local.scheduler.running}
    uids |= {entry.prompt.uid for entry in local.scheduler.waiting}
    assert uids <= {request.prompt.uid for request in staying}
    assert await other == await undisturbed(staying)
    assert not local.scheduler.running and not local.scheduler.waiting and not local._callers


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "field", "value", "says"),
    [
        (Local, "slots", 0, "in [1, 65536]"),
        (Local, "dtype", "float16", "auto, bfloat16 or float32"),
        (Local, "prefill_tokens", 0, ">= 1"),
        (Local, "interrupt", "stop", "recompute, keep or finish"),
        (LocalProcess, "threads", -1, "in [0, 1024]"),
        (LocalProcess, "restarts", -1, ">= 0; 0 gives up at once"),
        (LocalProcess, "timeout", 0.0, "> 0 seconds"),
    ],
)
def test_a_field_is_checked(spec, field, value, says):
    with pytest.raises(FieldError, match=re.escape(f"{field}={value!r} must be {says}")):
        spec(**{field: value})


def test_the_spec_builds():
    spec = Local(slots=9, dtype="float32", decoder="general", prefill_tokens=7)
    built = spec.build(EngineSetup.of(loaded("llama"), max_length=100)).scheduler
    assert (built.slots, built.max_length, built.prefill_tokens) == (16, 100, 7)
    assert Local().build(EngineSetup.of(loaded("llama"), max_length=10**6)).scheduler.max_length == CONTEXT


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 1.0), ("max_tokens", 0)],
)
def test_sampling_checks_its_fields(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r} must be"):
        Sampling(**{field: value})
    with pytest.raises(ValueError, match="must hold no empty string"):
        Sampling(stop=("a", ""))
    with pytest.raises(ValueError, match="ScoreRequest.prompt_tokens: empty"):
        ScoreRequest(prompt_tokens=(), tokens=(1,))


# ---- score, pause modes, turns ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decoder", "prefill_tokens"),
    [("llama", "fast", 1), ("qwen3", "general", 60), ("gpt2", "general", 4096), ("llama", "recompute", 4096)],
)
def test_scores_are_the_trainers_log_probs(kind, decoder, prefill_tokens):
    asked = requests(3, 3, temperature=0.7)
    local = engine(kind, decoder, prefill_tokens=prefill_tokens)
    given = run(local, asked)
    wanted = [
        ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens, temperature=c.temperature)
        for r, c in zip(asked, given, strict=True)
    ]
    wanted.insert(1, ScoreRequest(prompt_tokens=(5, 6), tokens=()))
    scored = asyncio.run(local.score(wanted))
    assert local.capabilities.score and scored.pop(1).shape == (0,) and scored[0].dtype == "float32"
    expected = trainer_log_prob(kind, asked, given)
    torch.testing.assert_close(torch.from_numpy(np.concatenate(scored)), expected, rtol=0, atol=2e-5)


def test_a_completion_holds_few_bytes_per_token():
    free, cut = run(engine(), requests(1, 1))[0], run(engine(), requests(1, 1, top_k=5))[0]
    assert free.untruncated_log_prob is free.sampled_log_prob and free.policy_version.base.size == 1
    assert cut.untruncated_log_prob is not cut.sampled_log_prob and cut.top_k is None
    assert free.tokens.base is None  # its own memory, not a view of the table
