"""Turns of a conversation: what they begin with is run once. What is kept changes no bit, and the parts that a prompt
is run in nothing but the rounding."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from proxima.data.flow import Prompt
from proxima.engine.local.kv_cache import PrefixCache
from proxima.engine.protocol import Request, WeightUpdate
from tests.engine.helpers import agree, behavior, checked_leaders, engine, requests, run, trainer_log_prob
from tests.model.rows import ids, loaded

DECODERS = [("llama", "fast"), ("qwen3", "general"), ("gpt2", "general"), ("qwen2", "recompute")]


def first_turns(*sizes, **settings) -> list[Request]:
    return [replace(r, shared=(len(r.prompt.tokens),)) for r in requests(*sizes, **settings)]


def next_turns(asked, given, *, observed: int = 5) -> list[Request]:
    """Each conversation with some tokens of an observation, other ones in each."""
    again = []
    for i, (request, completion) in enumerate(zip(asked, given, strict=True)):
        tokens = np.concatenate([request.prompt.tokens, completion.tokens, ids(observed, 31 * i + 1)])
        prompt = replace(request.prompt, tokens=tokens)
        shared = (*request.shared, len(tokens)) if request.shared else ()
        again.append(replace(request, turn=request.turn + 1, prompt=prompt, shared=shared))
    return again


def prefilled(engine) -> list[int]:
    """Tokens of each prefill from now on."""
    counts, decoder = [], engine.scheduler.decoder
    run_prefill = decoder.prefill

    def prefill(prompts, past=()):
        own = past or [None] * len(prompts)
        counts.extend(len(p) - (0 if old is None else old.shape[3]) for p, old in zip(prompts, own, strict=True))
        return run_prefill(prompts, past)

    decoder.prefill = prefill
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize(("kind", "decoder"), DECODERS)
def test_three_turns_agree_with_the_trainer_and_with_whole_prefills(kind, decoder, opens):
    """What all prompts open with is run once."""
    kept, whole = engine(kind, decoder), engine(kind, decoder)
    asked, fresh = first_turns(3, 2, max_tokens=7), [3, 8, 13]
    if opens:
        asked, fresh = with_opening(asked), [23, 28, 33] if decoder == "recompute" else [20, *fresh]
    for _ in range(3):
        counts = prefilled(kept)
        given = run(kept, asked)
        other = run(whole, [replace(request, shared=()) for request in without_opening(asked)])
        agree(given, other)
        torch.testing.assert_close(behavior(given), trainer_log_prob(kind, asked, given), rtol=0, atol=2e-5)
        assert counts == fresh
        before, asked = asked, next_turns(asked, given)
        pairs = zip(asked, [None if decoder == "recompute" else request.shared[-1] for request in before], strict=True)
        fresh = [len(request.prompt.tokens[start:]) for request, start in pairs]  # the turn, and what answers it


def run_tokens(asked) -> int:
    """What is fed where nothing is kept: the same parts once, but for the last of each prompt."""
    parts = set()
    for i, request in enumerate(asked):
        tokens = request.prompt.tokens
        for start, end in pairwise((0, *request.shared)):
            parts.add((tokens[:end].tobytes(), end - start, i if end == len(tokens) else None))
    return sum(length for _, length, _ in parts)


def with_opening(asked, length: int = 20) -> list[Request]:
    """The same tokens before every prompt."""
    prompts = [(r.prompt, np.concatenate([ids(length, 5), r.prompt.tokens])) for r in asked]
    opened = [replace(prompt, tokens=tokens, shared_prefix=length) for prompt, tokens in prompts]
    shared = [(len(tokens),) if r.shared else () for r, (_, tokens) in zip(asked, prompts, strict=True)]
    return [replace(r, prompt=prompt, shared=own) for r, prompt, own in zip(asked, opened, shared, strict=True)]


def without_opening(asked) -> list[Request]:
    return [replace(request, prompt=replace(request.prompt, shared_prefix=0)) for request in asked]


def test_turns_behind_an_opening_keep_it_and_their_last_context():
    """Beside each conversation's last context, the opening, and each group's first prompt."""
    local, asked = engine(slots=16), with_opening(first_turns(3, 4, max_tokens=7))
    for turn in range(3):
        given = run(local, asked)
        kept = [len(lengths) for lengths, _ in local.scheduler.prefixes.cached]
        assert sorted(kept) == sorted([1, *[2] * 3, *([turn + 2] * 12 if turn else [])])
        asked = next_turns(asked, given)


@pytest.mark.slow
def test_a_prefill_hands_out_no_second_cache():
    local, asked = engine(slots=64, prefill_tokens=256, max_length=256), requests(64, 1, max_tokens=20)
    made, run_prefill = [], local.scheduler.prefixes.prefill

    def prefill(decoder, prompts):
        hidden, kv = run_prefill(decoder, prompts)
        made.append((len(kv), sum(own.shape[3] for own in kv)))
        return hidden, kv

    local.scheduler.prefixes.prefill = prefill
    run(local, with_opening(asked, 200))
    cache = local.scheduler.slots * local.scheduler.cache.capacity
    assert max(positions for _, positions in made) <= cache // 8
    assert max(prompts for prompts, _ in made) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "dtype"), [("fast", torch.float32), ("fast", torch.bfloat16), ("general", torch.bfloat16)]
)
def test_who_else_begins_so_changes_no_bit(decoder, dtype):
    crowd, alone = engine(decoder=decoder, dtype=dtype), engine(decoder=decoder, dtype=dtype)
    asked = with_opening(requests(3, 2, max_tokens=5))
    given = run(crowd, asked)
    for request, together in zip(asked, given, strict=True):
        alone.scheduler.prefixes.clear()
        (entry,) = run(alone, [request])
        assert torch.equal(behavior([entry]), behavior([together]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_alike_have_a_leader(dtype):
    """Of a prompt's completions the first that runs; of those after their first turn, and of prompts, one with as many
    shared tokens, or with the opening; while others end and enter."""
    local = engine(dtype=dtype)
    counts, asked = checked_leaders(local), with_opening(requests(3, 7))
    settings = [replace(r.sampling, max_tokens=3 + r.sample) for r in asked]
    asked = [replace(r, sampling=own, shared=(len(r.prompt.tokens),)) for r, own in zip(asked, settings, strict=True)]
    first = run(local, asked)
    assert counts[0] == (0, *[23] * 6, 20)
    assert {20, 23, 28, 33} <= {common for own in counts for common in own}
    counts.clear()
    run(local, next_turns(asked, first))
    assert counts[0] == (0, *[23] * 6, 20)
    counts.clear()
    run(local, without_opening(requests(8, 1)))
    assert not any(map(any, counts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "dtype"), [("fast", torch.float32), ("fast", torch.bfloat16), ("general", torch.bfloat16)]
)
def test_what_is_kept_changes_no_bit(decoder, dtype):
    """Everything, nothing, what one context has room for; in other company. In bfloat16 it is within rounding of the
    trainer's."""
    kept, lost, small = (engine(decoder=decoder, dtype=dtype) for _ in range(3))
    lost.scheduler.prefixes.trim = lambda most: PrefixCache.trim(lost.scheduler.prefixes, 0)
    small.scheduler.prefixes.trim = lambda most: PrefixCache.trim(small.scheduler.prefixes, 60)
    asked = first_turns(3, 2, max_tokens=7)
    for _ in range(3):
        counts = prefilled(lost)
        given = run(kept, asked)
        assert run(lost, asked) == given
        others = {c.key: c for i in (3, 0) for c in run(small, asked[i : i + 3])}
        assert [others[request.key] for request in asked] == given
        fed = asked if asked[0].turn else asked[::2]
        assert run_tokens(fed) <= sum(counts) <= sum(len(request.prompt.tokens) for request in fed)
        far = (behavior(given) - trainer_log_prob("llama", asked, given, dtype=dtype)).abs()
        assert far.mean() < 0.02 and far.max() < 0.15
        asked = next_turns(asked, given)


def test_a_conversation_that_was_rewritten_is_run_whole():
    local, asked = engine(), first_turns(2, 2, max_tokens=6)
    again = next_turns(asked, run(local, asked))
    tokens = again[0].prompt.tokens.copy()
    tokens[1] += 1
    again[0] = replace(again[0], prompt=replace(again[0].prompt, tokens=tokens), shared=(len(tokens),))
    counts = prefilled(local)
    given = run(local, again)
    assert counts == [len(tokens), 11, 11, 11]
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", again, given), rtol=0, atol=2e-5)


def test_new_weights_end_what_was_kept():
    local, asked = engine(seed=0), first_turns(2, 2, max_tokens=6)
    again = next_turns(asked, run(local, asked))
    asyncio.run(local.publish(WeightUpdate(version=1, module=loaded("llama", 1).model)))
    counts = prefilled(local)
    given = run(local, again)
    assert sum(counts) == run_tokens(again)
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", again, given, seed=1), rtol=0, atol=2e-5)


def positions(prefixes) -> int:
    return sum(kv.shape[3] for kv in prefixes.cached.values())


def test_what_was_not_used_for_longest_goes_first():
    scheduler = engine().scheduler
    prompts = [Prompt(uid=n, messages=(), tokens=ids(10, n)) for n in range(3)]
    prefixes = scheduler.prefixes
    prefixes.prefill(scheduler.decoder.prefill, [(prompt, (4, 10)) for prompt in prompts])
    assert positions(prefixes) == 3 * 14
    assert prefixes.find(np.int32(ids(12, 0)), (4, 10))[0] == 2, "used"
    assert prefixes.find(np.int32(ids(10, 0)), (4, 10))[0] == 1, "a hidden state of the last token is needed"
    prefixes.trim(20)
    assert [prefixes.find(np.int32(ids(12, n)), (4, 10))[0] for n in range(3)] == [2, 0, 0]
    assert positions(prefixes) == 14
    prefixes.clear()
    assert positions(prefixes) == 0 and prefixes.missing(prompts[0], (4, 10)) == 10


def later_turns() -> list[Request]:
    asked = requests(1, 4, max_tokens=4)
    return next_turns(asked, run(engine(), asked))


def turns_of_one_episode() -> list[Request]:
    first, other = requests(2, 1, max_tokens=4)
    return [replace(first, turn=1), replace(other, prompt=replace(other.prompt, uid=first.prompt.uid), turn=2)]


@pytest.mark.parametrize("made", [later_turns, turns_of_one_episode])
def test_prompts_of_one_uid_have_their_own_tokens_in_one_call(made):
    together = run(engine(), asked := made())
    agree(together, [run(engine(), [request])[0] for request in asked])


@pytest.mark.parametrize("shared", [(2, 2, 5), (2, 5, 5), (5, 2), (0, 2, 5), (2, 5, 10_000)])
def test_lengths_that_repeat_or_are_none_count_once_or_not(shared):
    """An agent that asks again after the same messages names their length twice."""
    asked, local, once = requests(2, 2, max_tokens=4), engine(), engine()
    given = run(once, [replace(request, shared=(2, 5)) for request in asked])
    for _ in range(2):
        assert run(local, [replace(request, shared=shared) for request in asked]) == given
    assert positions(local.scheduler.prefixes) == positions(once.scheduler.prefixes)
