"""The code in CONTRIBUTING.md and README.md is what it says; tests/cli/test_check.py has its surrogate and engine."""

import asyncio
import json

import numpy as np

from proxima.data.flow import Completion, Prompt
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, ScoreRequest
from proxima_peers.verify.verification import verify_record
from tests.docs.printed import fence
from tests.tiny import tiny_tokenizer


def test_reward():
    scope = {"__name__": "contributing"}
    exec(fence("CONTRIBUTING.md", "class Short"), scope)
    spec = scope["Short"](limit=10, weight=0.1)
    prompt = Prompt(uid=0, messages=(), tokens=(1,))
    made = [Completion.of_text(0, 0, "", (5,) * n) for n in (0, 4, 25)]
    assert [score.value for score in spec.score(prompt, made)] == [1.0, 0.6, 0.0]
    assert (spec.weight, spec.label) == (0.1, "short")


def test_engine():
    """What no law asks of it."""
    scope = {"__name__": "contributing"}
    exec(fence("CONTRIBUTING.md", "class Scripted"), scope)
    engine = scope["Scripted"]("7").build(EngineSetup(model_path="-", tokenizer=tiny_tokenizer(), load_weights=None))
    prompt = Prompt(uid=3, messages=(), tokens=(1,))
    request = Request(prompt=prompt, sample=2, sampling=Sampling(temperature=0.5), turn=1)
    (only,) = asyncio.run(collect(engine, [request]))
    assert (only.prompt_uid, only.sample, only.turn, only.temperature) == (3, 2, 1, 0.5)
    scored = [ScoreRequest(prompt_tokens=(1,), tokens=tokens) for tokens in (only.tokens, only.tokens + 1)]
    assert [x.tolist() for x in asyncio.run(engine.score(scored))] == [[0.0], [-np.inf]]


def test_golden_record_by_hand():
    (record,) = json.loads(fence("CONTRIBUTING.md", '[{"name"'))
    assert (verify_record(record).status, set(record["expected"])) == ("matched", {"weight", "keep"})
