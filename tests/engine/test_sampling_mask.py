"""The tokens that could be sampled, from the local engine: those of a plain truncation, with every token; nothing where
nothing is truncated; the same through a process, a pause and other requests."""

import asyncio

import numpy as np
import pytest
import torch

from proxima.check import check_law
from proxima.check.engine_case import EngineUnderTest, tiny_model
from proxima.check.engine_laws import ENGINE_LAWS
from proxima.data import Prompt, SamplingMask, Trajectory
from proxima.data.random import completion_uniforms
from proxima.engine import EngineSetup, Local, LocalEngine, LocalProcess, ProcessEngine, Request, Sampling
from proxima.engine.local import collect
from proxima.engine.mask_table import MaskTable
from proxima.engine.sampler import sample_tokens
from proxima.model import Policy, load
from tests.engine.test_interrupt import SEEDS, published_midway
from tests.engine.test_sampler import CASES, brute, settings
from tests.model.rows import loaded as of_seed

V = 12


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_set_is_what_brute_force_keeps(case):
    logits = 1.5 * torch.randn(20, V, generator=torch.Generator().manual_seed(3))
    uniform = torch.rand(20, generator=torch.Generator().manual_seed(4))
    drawn = sample_tokens(logits, settings(20, **case), uniform, masks=True)
    truncated = case.keys() & {"top_k", "top_p", "min_p"}
    expected = [[v for v, p in enumerate(brute(row.tolist(), **case)) if p > 0] for row in logits]
    sets = torch.split(drawn.mask_ids, drawn.mask_counts.tolist())
    assert [mask_set.tolist() for mask_set in sets] == (expected if truncated else [[]] * 20)
    plain = sample_tokens(logits, settings(20, **case), uniform)
    assert plain.mask_ids is plain.mask_counts is None
    for name in ("token", "sampled_log_prob", "untruncated_log_prob"):
        assert torch.equal(getattr(drawn, name), getattr(plain, name))


def test_rows_that_are_greedy_or_whole_have_none():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    rows = settings(3, temperature=[0.0, 1.0, 1.0], top_p=[0.5, 1.0, 0.5])
    drawn = sample_tokens(logits, rows, torch.zeros(3), masks=True)
    assert drawn.mask_counts.tolist()[:2] == [0, 0] and drawn.mask_counts[2] > 0


def test_the_table_puts_the_sets_of_each_line_together():
    draw, table, wanted = np.random.default_rng(0), MaskTable(5), {line: [] for line in (4, 1, 3)}
    for steps in (1, 3, 40):
        counts = draw.integers(1, 6, (steps, 3))
        ids = []
        for row in counts:
            for line, count in zip(wanted, row, strict=True):
                ids_of_row = np.sort(draw.choice(100, count, replace=False)).astype(np.int32)
                wanted[line].append(ids_of_row.tolist())
                ids.append(ids_of_row)
        table.append(np.array(list(wanted)), np.concatenate(ids), counts)
    for line, sets in wanted.items():
        mask = table.read(line)
        assert [mask.part(t, t + 1).ids.tolist() for t in range(len(mask))] == sets
    table.clear(4)
    assert len(table.read(4)) == 0 and len(table.read(1)) == 44


SAMPLING = Sampling(max_tokens=20, temperature=0.8, top_p=0.7, top_k=40)


def requests(sampling=SAMPLING, prompts=3, samples=3):
    made_prompts = [Prompt(uid=i, messages=(), tokens=(5 + i, 17, 42)) for i in range(prompts)]
    return [Request(prompt=p, sample=s, sampling=sampling, seed=3) for p in made_prompts for s in range(samples)]


@pytest.fixture
def loaded(tiny_model):
    return load(str(tiny_model("llama")), device="cpu")


def engine(loaded, **more):
    return LocalEngine(loaded, Local(dtype="float32", slots=8, sampling_mask=True, **more))


def made_by(engine, wanted):
    return asyncio.run(collect(engine, wanted))


def test_the_sampled_log_prob_is_that_of_the_set(loaded):
    """Against a plain forward in float64: log-softmax over the set, which is what top-k and top-p keep."""
    for request, c in zip(requests(), made_by(engine(loaded), requests()), strict=True):
        ids = torch.tensor([[*request.prompt.tokens, *c.tokens]])
        with torch.no_grad():
            logits = loaded.model(ids).logits[0].double()[len(request.prompt.tokens) - 1 : -1] / 0.8
        assert len(c.sampling_mask) == len(c.tokens)
        for t, token in enumerate(c.tokens):
            own = torch.tensor(c.sampling_mask.part(t, t + 1).ids, dtype=torch.long)
            expected = logits[t, token] - logits[t, own].logsumexp(0)
            assert c.sampled_log_prob[t] == pytest.approx(float(expected), abs=2e-5)
            kept = [v for v, p in enumerate(brute(logits[t].tolist(), top_k=40, top_p=0.7)) if p > 0]
            assert len(set(kept) ^ set(own.tolist())) <= 1  # the edge may round the other way
        assert c.sampling_mask.counts.min() >= 1 and c.sampling_mask.counts.max() <= 40


def test_only_truncated_sampling_has_them_and_only_when_asked(loaded):
    whole, greedy = Sampling(max_tokens=4), Sampling(max_tokens=4, temperature=0.0, top_p=0.5)
    made = made_by(engine(loaded), [*requests(whole, 1, 2), *requests(greedy, 2, 1)[1:]])
    assert [c.sampling_mask for c in made] == [None] * 3
    assert engine(loaded).capabilities.sampling_mask and "sampling_mask" in engine(loaded).spec.provides
    plain = LocalEngine(loaded, Local(dtype="float32", slots=8))
    assert not plain.capabilities.sampling_mask and "sampling_mask" not in plain.spec.provides
    with_mask, without = (made_by(entry, requests()) for entry in (engine(loaded), plain))
    for a, b in zip(with_mask, without, strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.sampled_log_prob, b.sampled_log_prob)
        assert b.sampling_mask is None and plain.scheduler.table.masks is None


def test_lines_that_are_used_again_and_other_requests_change_nothing(loaded):
    """More requests than slots, of several kinds: each completion has the set that it has alone."""
    kinds = (SAMPLING, Sampling(max_tokens=7), Sampling(max_tokens=9, min_p=0.2, stop=("zz",)))
    wanted = [
        Request(prompt=r.prompt, sample=r.sample, sampling=kinds[r.sample % 3], seed=3) for r in requests(None, 6, 4)
    ]
    together = made_by(engine(loaded), wanted)
    for request, c in zip(wanted, together, strict=True):
        assert (c.sampling_mask is None) == (not request.sampling.truncates)
    for i in (0, 2, 9, 23):
        assert made_by(engine(loaded), [wanted[i]])[0] == together[i]


def test_an_aborted_completion_has_the_sets_of_its_tokens(loaded):
    async def go():
        running, completions = engine(loaded), []

        async def gather():
            completions.extend([c async for c in running.generate(requests(Sampling(max_tokens=200, top_p=0.9), 1, 2))])

        task = asyncio.create_task(gather())
        while not any(len(entry.tokens) for entry in await running.in_flight()):
            await asyncio.sleep(0)
        await running.abort(0)
        await task
        return completions

    for c in asyncio.run(go()):
        assert c.finish_reason == "abort" and 0 < len(c.tokens) == len(c.sampling_mask)


def test_a_process_gives_the_same(loaded, warm_processes):
    process = ProcessEngine(loaded, LocalProcess(dtype="float32", slots=8, sampling_mask=True, threads=1))
    try:
        assert made_by(process, requests()) == made_by(engine(loaded), requests())
    finally:
        process.close()


def test_the_set_does_not_depend_on_the_draw():
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1)).expand(50, V)
    uniform = torch.from_numpy(completion_uniforms(1, 2, 3, 50))
    drawn = sample_tokens(logits, settings(50, top_p=0.8), uniform, masks=True)
    sets = {tuple(mask_set.tolist()) for mask_set in torch.split(drawn.mask_ids, drawn.mask_counts.tolist())}
    assert len(sets) == 1 and set(drawn.token.tolist()) <= set(*sets)


LAW = next(law for law in ENGINE_LAWS if law.name == "sampling_masks")


@pytest.mark.parametrize("on", [True, False])
def test_the_law_of_engines_that_give_them(on):
    spec = Local(slots=8, dtype="float32", sampling_mask=on)
    result = check_law(LAW, EngineUnderTest(spec, EngineSetup.of(tiny_model())))
    assert result.status == ("passed" if on else "skipped"), result


def test_an_engine_whose_sets_are_too_wide_breaks_it(monkeypatch):
    monkeypatch.setattr(
        MaskTable, "read", lambda table, line: SamplingMask.of_sets([range(64)] * int(table._used[1, line]))
    )
    case = EngineUnderTest(Local(slots=8, dtype="float32", sampling_mask=True), EngineSetup.of(tiny_model()))
    result = check_law(LAW, case)
    assert result.status == "FAILED" and "a set of 64 tokens, over top_k=6" in str(result)


def test_each_set_is_of_the_weights_that_sampled_its_token(monkeypatch):
    """New weights twice while completions run: over its set and under its version, each log-prob is the trainer's."""
    monkeypatch.setattr("proxima.engine.local.STEPS_PER_TURN", 1)
    sampling = Sampling(max_tokens=24, top_p=0.8, temperature=0.9)
    asked = [Request(prompt=r.prompt, sample=r.sample, sampling=sampling, seed=5) for r in requests(None, 2, 4)]
    made = published_midway("recompute", asked, sampling_mask=True)
    versions = np.concatenate([c.policy_version for c in made])
    assert len(set(versions.tolist())) > 1
    prompts = {r.prompt.uid: r.prompt for r in asked}
    items = [
        Trajectory.of(prompts[c.prompt_uid], c, group=c.prompt_uid, advantage=0.0, behavior="sampled") for c in made
    ]
    with torch.no_grad():
        policies = [Policy(of_seed("llama", seed)) for seed in SEEDS]
        under = torch.stack([policy(policy.pack(items)).log_prob for policy in policies]).numpy()
    log_probs = np.concatenate([c.sampled_log_prob for c in made])
    np.testing.assert_allclose(log_probs, under[versions, np.arange(len(log_probs))], rtol=0, atol=5e-5)
