"""Speculative decoding: the completions are those of plain decoding, to the bit, whatever the drafts are."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from proxima.data import FieldError
from proxima.engine import Local, LocalEngine, LocalProcess, ProcessEngine, Request, Sampling, WeightUpdate
from proxima.engine.local import collect
from proxima.engine.speculation import NgramDrafter, SpeculativeScheduler
from tests.engine.helpers import engine, prompt, repetitive, run, steps, untruncated
from tests.engine.test_interrupt import SEEDS, teacher_forced
from tests.engine.test_kept_prefixes import next_turns
from tests.engine.test_local import wide
from tests.model.families import make
from tests.model.rows import loaded


def drafter_that_knows(given, asked, draw, monkeypatch):
    """Drafts are then parts of what comes, of any length, some with a wrong token anywhere."""
    texts = [tuple(r.prompt.tokens) + tuple(c.tokens) for r, c in zip(asked, given, strict=True)]

    def draft(self, room):
        so_far = tuple(self.tokens)
        fitting = [text[len(so_far) :] for text in texts if text[: len(so_far)] == so_far]
        length = draw.randint(0, min(room, self.most))
        values = list(draw.choice(fitting)[:length]) if fitting else []
        return [token if draw.random() < 0.8 else draw.randint(0, 258) for token in values]

    monkeypatch.setattr(NgramDrafter, "draft", draft)


SAMPLINGS = [
    Sampling(max_tokens=12),
    Sampling(max_tokens=20, temperature=0.7, stop=("a", "é!", "xyz")),
    Sampling(max_tokens=17, top_k=5, top_p=0.9),
    Sampling(max_tokens=1, min_p=0.05),
    Sampling(max_tokens=15, temperature=0.0),
    Sampling(max_tokens=30, temperature=1.3, top_k=40, stop=("\n",)),
]


@pytest.fixture(autouse=True)
def every_draft_is_run(monkeypatch):
    monkeypatch.setattr(SpeculativeScheduler, "_worth_verifying", lambda self, drafted: drafted > 0)


@pytest.mark.parametrize(
    ("kind", "decoder", "dtype", "slots", "most", "reported"),
    [
        ("llama", "fast", torch.float32, 4, 3, {}),
        ("llama", "fast", torch.bfloat16, 12, 1, {"top_k_log_probs": 4, "sampling_mask": True}),
        ("qwen3", "general", torch.float32, 32, 9, {"sampling_mask": True}),
        ("qwen3", "general", torch.bfloat16, 4, 3, {}),
        ("gpt2", "general", torch.float32, 12, 1, {"top_k_log_probs": 4, "sampling_mask": True}),
        ("gpt2", "general", torch.bfloat16, 32, 9, {"sampling_mask": True}),
    ],
)
def test_every_draft_gives_the_same_completions(kind, decoder, dtype, slots, most, reported, monkeypatch):
    """Prompts, samplings, lengths and drafts at random."""
    draw = random.Random(0)
    prompts = [prompt(i, draw.randint(1, 30)) for i in range(6)]
    asked = [
        Request(prompt=p, sample=s, sampling=draw.choice(SAMPLINGS), seed=draw.randint(0, 9))
        for p in prompts
        for s in range(4)
    ]
    settings = {"slots": slots, "max_length": 80, **reported}
    plain = run(engine(kind, decoder, dtype, **settings), asked)
    drafter_that_knows(plain, asked, draw, monkeypatch)
    local = engine(kind, decoder, dtype, num_speculative_tokens=most, **settings)
    assert run(local, asked) == plain
    counts = local.scheduler.detail["speculation"]
    assert 0 < counts["accepted"] < counts["drafted"]
    made = sum(len(c.tokens) for c in plain)
    assert local.scheduler.generated_tokens == made == counts["steps"] + counts["accepted"] + len(asked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_real_sizes_too(dtype, monkeypatch):
    """With the kernels of the machine, where it has any."""
    model = wide("llama")
    asked = [
        Request(prompt=prompt(i, 3 + 38 * i), sample=s, sampling=Sampling(max_tokens=20), seed=3)
        for i in range(3)
        for s in range(3)
    ]
    plain = run(LocalEngine(model, Local(slots=16, dtype=dtype)), asked)
    drafter_that_knows(plain, asked, random.Random(1), monkeypatch)
    engine = LocalEngine(model, Local(slots=8, dtype=dtype, num_speculative_tokens=5))
    assert run(engine, asked) == plain
    assert engine.scheduler.accepted > 40


def test_text_that_repeats_itself_takes_fewer_steps():
    asked = repetitive(samples=1, temperature=0.0, max_tokens=100)
    plain = run(engine("qwen3"), asked)
    local = engine("qwen3", num_speculative_tokens=8)
    assert run(local, asked) == plain
    health = asyncio.run(local.health())
    counts = health.detail["speculation"]
    assert counts["accepted"] > 0.5 * counts["drafted"] and counts["steps"] < 0.8 * health.tokens


def test_turns_continue_from_kept_keys_and_values():
    def turns(local):
        first = [replace(r, shared=(len(r.prompt.tokens),)) for r in repetitive(2, 2)]
        given = run(local, first)
        return given, run(local, next_turns(first, given))

    assert turns(engine(num_speculative_tokens=6)) == turns(engine())


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
async def test_weights_published_midway(interrupt):
    """Tokens say which weights sampled them, with the log-probs of these; a prompt may be aborted."""
    result, asked = engine(num_speculative_tokens=6, interrupt=interrupt), repetitive(5, 4, max_tokens=80)
    task = asyncio.ensure_future(collect(result, asked))
    running = []
    for version, seed in list(enumerate(SEEDS))[1:]:
        await steps(result, 2)
        await result.pause()
        running += await result.in_flight()
        await result.publish(WeightUpdate(version=version, module=loaded("llama", seed).model))
        await result.resume()
    await result.abort(4)
    given = await task
    final = {c.key: c for c in given}
    for part in running:
        assert part.tokens.tolist() == final[part.key].tokens[: len(part.tokens)].tolist()
        assert part.policy_version.tolist() == final[part.key].policy_version[: len(part.tokens)].tolist()
    assert running and result.scheduler.accepted > 20
    assert [c.finish_reason == "abort" for c in given] == [False] * 16 + [True] * 4
    assert any(len(set(c.policy_version)) > 1 for c in given)
    assert all(list(c.policy_version) == sorted(c.policy_version) for c in given)
    if interrupt == "recompute":
        torch.testing.assert_close(untruncated(given), teacher_forced(asked, given), rtol=0, atol=1e-4)


def test_a_drafter_knows_what_followed():
    drafter = NgramDrafter([1, 2, 3, 4, 5, 9, 1, 2, 3], most=4)
    assert list(drafter.draft(9)) == [4]
    drafter.append(4)
    assert list(drafter.draft(9)) == [5, 9] and list(drafter.draft(1)) == [5] and not drafter.draft(0)


def test_right_drafts_grow_and_wrong_ones_pause():
    text, drafter, lengths = [5, 6, 7] * 40, NgramDrafter([5, 6, 7] * 3, most=8), []
    for _ in range(5):
        draft = drafter.draft(100)
        lengths.append(len(draft))
        for token in text[len(drafter.tokens) :][: len(draft) + 1]:
            drafter.append(token)
    assert lengths == [1, 2, 4, 8, 8]
    drafted = []
    for i in range(200):
        drafter.append((6, 6, 6, 1000 + i)[i % 4])  # the same three, and never the same after them
        drafted.append(bool(drafter.draft(100)))
    assert 0 < sum(drafted) < 20


def test_a_model_whose_decoder_keeps_nothing_is_refused():
    message = "engine.num_speculative_tokens=4 must be 0: this model .*, and each token of a draft would cost a pass"
    for build in (LocalEngine, ProcessEngine):
        spec = {LocalEngine: Local, ProcessEngine: LocalProcess}[build](num_speculative_tokens=4)
        with pytest.raises(FieldError, match=message):
            build(make("Mamba"), spec)
