"""Turns of a conversation: the prefix of earlier ones is run once, and nothing but the rounding may tell."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.engine.cache import KeptTurns
from proxima.engine.protocol import Request, WeightUpdate
from tests.engine.helpers import behavior, engine, requests, run, trainer_log_prob
from tests.engine.test_decoders import PAIRS
from tests.model.rows import ids, loaded


def next_turns(asked, given, *, observed: int = 5) -> list[Request]:
    """Each conversation with some tokens of an observation, other ones in each."""
    return [
        replace(
            request,
            turn=request.turn + 1,
            prompt=replace(
                request.prompt,
                tokens=np.concatenate([request.prompt.tokens, completion.tokens, ids(observed, 31 * i + 1)]),
            ),
        )
        for i, (request, completion) in enumerate(zip(asked, given, strict=True))
    ]


def by_request(given, asked):
    found = {completion.key: completion for completion in given}
    return [found[request.key] for request in asked]


def prefilled(found) -> list[int]:
    """Tokens of each prefill from now on."""
    counts, decoder = [], found.scheduler.decoder
    run_prefill = decoder.prefill

    def prefill(prompts, past=()):
        own = past or [None] * len(prompts)
        counts.extend(len(p) - (0 if old is None else old.shape[3]) for p, old in zip(prompts, own, strict=True))
        return run_prefill(prompts, past)

    decoder.prefill = prefill
    return counts


@pytest.mark.parametrize(("kind", "decoder"), PAIRS)
def test_three_turns_agree_with_the_trainer_and_with_whole_prefills(kind, decoder):
    kept, whole = engine(kind, decoder), engine(kind, decoder)
    asked = [replace(request, continues=True) for request in requests(3, 4, max_tokens=7)]
    for turn in range(3):
        counts = prefilled(kept)
        given = by_request(run(kept, asked), asked)
        other = by_request(run(whole, [replace(request, continues=False) for request in asked]), asked)
        assert [c.tokens.tolist() for c in given] == [c.tokens.tolist() for c in other]
        torch.testing.assert_close(behavior(given), behavior(other), rtol=0, atol=1e-5)
        torch.testing.assert_close(behavior(given), trainer_log_prob(kind, asked, given), rtol=0, atol=2e-5)
        assert counts == ([3, 8, 13] if turn == 0 else [6] * 12)  # the token that was not fed, and the observation
        asked = next_turns(asked, given)


def test_bf16_stays_within_rounding_of_the_trainer():
    found, asked = engine(dtype=torch.bfloat16), [replace(r, continues=True) for r in requests(max_tokens=9)]
    for _ in range(3):
        given = by_request(run(found, asked), asked)
        far = (behavior(given) - trainer_log_prob("llama", asked, given, dtype=torch.bfloat16)).abs()
        assert far.mean() < 0.02 and far.max() < 0.15
        asked = next_turns(asked, given)


def test_a_conversation_that_was_rewritten_is_run_whole():
    found, asked = engine(), [replace(r, continues=True) for r in requests(2, 2, max_tokens=6)]
    again = next_turns(asked, by_request(run(found, asked), asked))
    tokens = again[0].prompt.tokens.copy()
    tokens[1] += 1
    again[0] = replace(again[0], prompt=replace(again[0].prompt, tokens=tokens))
    counts = prefilled(found)
    given = by_request(run(found, again), again)
    assert counts == [len(tokens), 6, 6, 6]
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", again, given), rtol=0, atol=2e-5)


def test_new_weights_end_what_was_kept():
    import asyncio

    found, asked = engine(seed=0), [replace(r, continues=True) for r in requests(2, 2, max_tokens=6)]
    again = next_turns(asked, by_request(run(found, asked), asked))
    asyncio.run(found.publish(WeightUpdate(version=1, module=loaded("llama", 1).model)))
    counts = prefilled(found)
    given = by_request(run(found, again), again)
    assert counts == [len(request.prompt.tokens) for request in again]
    torch.testing.assert_close(behavior(given), trainer_log_prob("llama", again, given, seed=1), rtol=0, atol=2e-5)


def test_what_nobody_comes_back_for_is_dropped_oldest_first():
    turns, asked = KeptTurns(2), requests(3, 1)
    for request in asked:
        turns.keep(request, ids(4, 1), torch.zeros(1))
    again = [
        replace(r, turn=1, prompt=replace(r.prompt, tokens=np.concatenate([r.prompt.tokens, ids(6, 1)]))) for r in asked
    ]
    assert [turns.take(request) is None for request in again] == [True, False, False]
    assert turns.take(again[1]) is None, "taken once"


def test_later_turns_of_one_prompt_have_their_own_tokens_in_one_call():
    found, asked = engine(), requests(1, 4, max_tokens=4)
    again = next_turns(asked, by_request(run(found, asked), asked))
    together = by_request(run(engine(), again), again)
    alone = [run(engine(), [request])[0] for request in again]
    assert [c.tokens.tolist() for c in together] == [c.tokens.tolist() for c in alone]
