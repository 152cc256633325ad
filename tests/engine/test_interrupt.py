"""New weights while completions run: what `interrupt` makes of them, and under which weights each token was drawn."""

import asyncio
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import WeightUpdate
from tests.engine.helpers import (
    checked_leaders,
    copied,
    engine,
    prompt,
    requests,
    run,
    steps,
    trainer_log_prob,
    untruncated,
)

pytestmark = pytest.mark.slow

SEEDS = (0, 11, 12)  # of the weights, by version


@pytest.fixture(autouse=True)
def one_step_at_a_time(monkeypatch):
    monkeypatch.setattr("proxima.engine.local.local_engine.STEPS_PER_TURN", 1)


def published_midway(interrupt, asked, *, between=5, kind="llama", **settings):
    """Completions, in the order of the requests, of an engine that gets the weights of SEEDS one after the other."""

    async def go():
        local = engine(kind, slots=8, interrupt=interrupt, **settings)
        task = asyncio.ensure_future(collect(local, asked))
        for version, seed in list(enumerate(SEEDS))[1:]:
            await steps(local, between)
            await local.pause()
            await local.publish(WeightUpdate(version=version, module=copied(kind, seed).model))
            await local.resume()
            assert (await local.health()).version == version
        return await task

    return asyncio.run(go())


def teacher_forced(asked, made, kind="llama"):
    """[tokens] under the weights that sampled each token, over its whole prefix."""
    version = torch.tensor([v for c in made for v in c.policy_version])
    return torch.stack([trainer_log_prob(kind, asked, made, seed=s) for s in SEEDS]).gather(0, version[None])[0]


def with_kept_kv(asked, made):
    """[tokens] Hugging Face's own cache: each position's KV is of the weights that read it."""
    models, model = [copied("llama", seed).model for seed in SEEDS], []
    for request, completion in zip(asked, made, strict=True):
        cache, fed = DynamicCache(), torch.tensor(request.prompt.tokens, dtype=torch.long)
        for token, version in zip(completion.tokens.tolist(), completion.policy_version.tolist(), strict=True):
            with torch.no_grad():
                logits = models[version](fed[None], past_key_values=cache, use_cache=True).logits[0, -1]
            model.append(logits.log_softmax(0)[token])
            fed = torch.tensor([token])
    return torch.stack(model)


ASKED = requests(4, 3, max_tokens=18, top_k=200)


@pytest.mark.parametrize(("kind", "decoder"), [("llama", "fast"), ("gpt2", "general"), ("llama", "recompute")])
def test_recompute_reads_nothing_of_an_earlier_version(kind, decoder):
    """Neither for the tokens that come nor for prompts that wait; tokens that are there keep their log-probs."""
    made = published_midway("recompute", ASKED, kind=kind, decoder=decoder)
    assert any(set(c.policy_version) == {0, 1, 2} for c in made)
    assert all(list(c.policy_version) == sorted(c.policy_version) for c in made)
    torch.testing.assert_close(untruncated(made), teacher_forced(ASKED, made, kind), rtol=0, atol=1e-5)
    first = trainer_log_prob(kind, ASKED, made)
    assert (first - untruncated(made)).abs().mean() > 0.1, "the versions differ"


def test_keep_reads_the_kv_as_it_was_computed_and_no_other():
    made = published_midway("keep", ASKED)
    assert any(set(c.policy_version) == {0, 1, 2} for c in made)
    torch.testing.assert_close(untruncated(made), with_kept_kv(ASKED, made), rtol=0, atol=1e-5)
    assert (teacher_forced(ASKED, made) - untruncated(made)).abs().max() > 0.1


def test_finish_ends_what_runs_before_the_update():
    asked = requests(4, 5, max_tokens=10, top_k=200)
    made = published_midway("finish", asked)
    assert {len(set(c.policy_version)) for c in made} == {1} and {c.policy_version[0] for c in made} == {0, 1, 2}
    alone = [run(engine(seed=seed, slots=8), asked) for seed in SEEDS]
    for i, completion in enumerate(made):
        version = int(completion.policy_version[0])
        assert completion == replace(alone[version][i], policy_version=version)


CALLS = st.tuples(
    st.integers(0, 9), st.sampled_from(["publish", "keep", "wait", "abort_all", "resume", "abort", "ask"])
)


@settings(max_examples=20)
@example("finish", [(5, "keep"), (0, "abort"), (0, "publish")])
@example("keep", [(5, "keep"), (0, "abort_all")])
@given(st.sampled_from(["recompute", "keep", "finish"]), st.lists(CALLS, max_size=8))
def test_any_schedule_gives_each_request_one_true_completion(interrupt, schedule):
    asyncio.run(follow(interrupt, schedule, *undisturbed()))


@cache
def undisturbed():
    """Requests, and their completions if nobody interrupts them."""
    asked = [replace(r, prompt=prompt(r.prompt.uid, 4)) for r in requests(3, 6, max_tokens=10, top_p=0.9)]
    return asked, run(engine(slots=8, sampling_mask=True), asked)


async def follow(interrupt, schedule, asked, undisturbed):
    """After each call, what it promises holds."""
    stopped, paused = set(), False
    local, arrived, version = engine(slots=8, interrupt=interrupt, sampling_mask=True), [], 0
    scheduler, _ = local.scheduler, checked_leaders(local)

    async def gather():
        async for completion in local.generate(asked):
            arrived.append(completion)

    def left():
        return [entry.prompt.uid for entry in scheduler.waiting] + [r.request.prompt.uid for r in scheduler.running]

    task = asyncio.ensure_future(gather())
    await steps(local, 1)
    for wait, call in schedule:
        await steps(local, wait)
        waiting = (await local.health()).waiting
        if call == "publish" and version < 2:
            version += 1
            await local.publish(WeightUpdate(version=version, module=copied("llama", SEEDS[version]).model))
        elif call in ("keep", "wait", "abort_all"):
            await local.pause(call.removesuffix("_all"))
            paused = True
            health = await local.health()
            assert call != "wait" or (health.running, health.waiting) == (0, waiting)
        elif call == "resume":
            await local.resume()
            paused = False
        elif call == "ask":
            await local.in_flight()  # writes the tokens so far, and changes nothing
        elif call == "abort":
            await local.abort(1)
            await local.abort(99)
            stopped.add(1)
            assert 1 not in left()
        if call == "abort_all":
            assert not left()
            stopped |= {0, 1, 2}
        if paused:  # nothing is sampled, and what has ended arrives all the same
            sampled = scheduler.generated_tokens
            await steps(local, 9)
            assert scheduler.generated_tokens == sampled
            health = await local.health()
            assert len(arrived) == len(asked) - health.running - health.waiting
    await local.resume()
    assert (await local.health()).version == version
    await task
    made = {c.key: c for c in arrived}
    assert len(arrived) == len(made) == len(asked)
    ordered = [made[r.key] for r in asked]
    for c, whole in zip(ordered, undisturbed, strict=True):
        assert c.finish_reason != "abort" or c.prompt_uid in stopped
        assert not len(c.tokens) or len(c.sampling_mask) == len(c.tokens)
        if not version:
            assert c.tokens.tolist() == whole.tokens[: len(c.tokens)].tolist()
            assert c.finish_reason == "abort" or c == whole
    assert all(list(c.policy_version) == sorted(c.policy_version) for c in ordered)
    assert interrupt != "finish" or all(len(set(c.policy_version)) <= 1 for c in ordered)
    pairs = [(r, c) for r, c in zip(asked, ordered, strict=True) if len(c.tokens)]
    if pairs:
        some, theirs = [list(side) for side in zip(*pairs, strict=True)]
        expected = (with_kept_kv if interrupt == "keep" else teacher_forced)(some, theirs)
        torch.testing.assert_close(untruncated(theirs), expected, rtol=0, atol=1e-5)
