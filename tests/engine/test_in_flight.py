"""What an engine says of the completions that nobody has got yet: no token is missing, at any moment."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from proxima.check import check_law
from proxima.check.engine_case import EngineUnderTest, tiny_model
from proxima.check.engine_laws import ENGINE_LAWS
from proxima.engine import ENGINES, EngineSetup
from proxima.engine.executor import Executor
from proxima.engine.local import Local, LocalEngine
from proxima.engine.protocol import WeightUpdate
from proxima.model.compute_thread import ComputeThread
from tests.engine.helpers import engine, prompt, requests, run
from tests.model.rows import loaded

LAW = next(law for law in ENGINE_LAWS if law.name == "in_flight")


@pytest.mark.parametrize(
    "kind",
    [  # servers have to run: `proxima engine check`
        pytest.param(kind, marks=[pytest.mark.slow] if kind == "local_process" else [])
        for kind, spec in ENGINES.items()
        if spec.needs_weights
    ],
)
def test_every_engine_keeps_the_law(kind, warm_processes):
    spec = ENGINES[kind](slots=8, dtype="float32")
    result = check_law(LAW, EngineUnderTest(spec, EngineSetup.of(tiny_model())))
    assert result.status == "passed", result


def watched(engine, asked, moments):
    """At each moment how many tokens were sampled, what is in flight and what was yielded to slow callers; and the
    completions."""

    async def go():
        made = {}

        async def collect(part):
            async for completion in engine.generate(part):
                made[completion.key] = completion
                for _ in range(5):
                    await asyncio.sleep(0)

        def look():
            return engine.scheduler.generated_tokens, engine._in_flight(), dict(made)

        tasks = [asyncio.create_task(collect(part)) for part in asked]
        seen = []
        while not all(task.done() for task in tasks):
            seen.append(await engine.compute.run(look))
            for number, moment in moments:
                if number == len(seen):
                    await moment()
        await asyncio.gather(*tasks)
        assert not engine._in_flight() and not engine._callers
        return seen, made

    return asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.parametrize("interrupt", ["recompute", "keep", "finish"])
def test_the_tokens_in_flight_and_yielded_are_all_that_were_sampled_with_their_versions(interrupt):
    local = engine(slots=8, interrupt=interrupt)
    update = WeightUpdate(version=1, module=loaded("llama", 1).model)
    asked = [requests(3, 4, max_tokens=24), requests(2, 4, first=9, max_tokens=3, temperature=0.7)]
    seen, made = watched(local, asked, [(3, lambda: local.publish(update))])
    waited = 0
    for generated, flying, yielded in seen:
        tokens = {c.key: len(c.tokens) for c in yielded.values()} | {
            completion.key: len(completion.tokens) for completion in flying
        }
        assert sum(tokens.values()) == generated
        for completion in flying:
            final = made[completion.key]
            count = len(completion.tokens)
            waited += count == len(final.tokens)
            assert completion.tokens.tolist() == final.tokens[:count].tolist()
            assert completion.policy_version.tolist() == final.policy_version[:count].tolist()
            assert completion.temperature == final.temperature
            length = len(completion.prompt_tokens)
            assert completion.prompt_tokens.tolist() == prompt(completion.prompt_uid, length).tokens.tolist()
    assert waited > 3  # ended, and not taken by their callers
    spans = {len(set(completion.policy_version)) for _, flying, _ in seen for completion in flying}
    assert spans == ({1} if interrupt == "finish" else {1, 2})


def test_asking_changes_nothing_and_an_abandoned_caller_leaves_nothing():
    asked = requests(3, 3, max_tokens=30)
    local = engine(slots=8, interrupt="keep")

    async def go():
        passed_on = Executor(local)
        stream = local.generate(asked)
        first = await anext(stream)
        assert {completion.key for completion in await passed_on.in_flight()} >= {(0, 0, 0), (0, 1, 0)} - {first.key}
        await stream.aclose()
        await local.compute.run(int)
        return await passed_on.in_flight()

    assert asyncio.run(go()) == []
    _, made = watched(local, [asked], [])
    assert list(made.values()) == sorted(run(engine(slots=8), asked), key=lambda c: list(made).index(c.key))


def test_with_the_decoding_in_another_thread():
    compute = ComputeThread()

    async def go():
        engine = LocalEngine(loaded("llama"), Local(slots=8, dtype="float32"), compute=compute)
        assert engine.capabilities.in_flight
        made, seen = {}, []

        async def collect():
            async for completion in engine.generate(requests(2, 3, max_tokens=20)):
                made[completion.key] = completion

        task = asyncio.create_task(collect())
        while not task.done():
            flying = await engine.in_flight()
            seen.append({**{entry.key: entry for entry in flying}, **made})
            await asyncio.sleep(0)
        await task
        for before, after in pairwise(seen):
            for key, entry in before.items():
                assert np.array_equal(after[key].tokens[: len(entry.tokens)], entry.tokens)
        return len(seen)

    assert compute.serve(go()) > 1
