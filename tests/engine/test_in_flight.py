"""What an engine says of the completions that nobody has got yet: no token is missing, at any moment."""

import asyncio

import pytest

from proxima.engine.protocol import WeightUpdate
from tests.engine.helpers import engine, prompt, requests
from tests.model.rows import loaded


async def watched(engine, asked, update=None):
    """At each moment how many tokens were sampled, what is in flight and what was yielded to slow callers; and the
    completions. The update comes after the third moment."""
    seen, made = [], {}

    async def collect_slowly(part):
        async for completion in engine.generate(part):
            made[completion.key] = completion
            for _ in range(5):
                await asyncio.sleep(0)

    def look():
        return engine.scheduler.generated_tokens, engine._in_flight(), dict(made)

    tasks = [asyncio.create_task(collect_slowly(part)) for part in asked]
    while not all(task.done() for task in tasks):
        seen.append(await engine.compute.run(look))
        if update and len(seen) == 3:
            await engine.publish(update)
    await asyncio.gather(*tasks)
    assert not engine._in_flight() and not engine._callers
    return seen, made


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["recompute", "keep", "finish"])
async def test_tokens_in_flight_and_yielded_are_all_that_were_sampled(interrupt):
    local, waited = engine(interrupt=interrupt), 0
    asked = [requests(3, 4, max_tokens=24), requests(2, 4, first=9, max_tokens=3, temperature=0.7)]
    seen, made = await watched(local, asked, WeightUpdate(version=1, module=loaded("llama", 1).model))
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
            assert completion.prompt_tokens.tolist() == prompt(completion.key[0], length).tokens.tolist()
    assert waited > 3  # ended, and not taken by their callers
    spans = {len(set(completion.policy_version)) for _, flying, _ in seen for completion in flying}
    assert spans == ({1} if interrupt == "finish" else {1, 2})
