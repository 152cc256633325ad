"""The code in CONTRIBUTING.md and README.md is what it says, and works."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.core import PolicyBatch, TokenMean, policy_loss
from proxima.data import Completion, Prompt
from proxima.engine import EngineSetup, Request, Sampling, ScoreRequest, WeightUpdate
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(name: str) -> type:
    """The class `name` of the code block that defines it."""
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"class {name}" in b)
    scope: dict = {"__name__": "contributing"}
    exec(compile(code, f"CONTRIBUTING.md:{name}", "exec"), scope)
    return scope[name]


def test_surrogate():
    cls = block("SoftClip")
    log_prob = torch.tensor([[0.5, 0.25, 0.9]]).log().requires_grad_()
    batch = PolicyBatch.from_padded(
        torch.tensor([[True, True, False]]),
        log_prob=log_prob,
        behavior_log_prob=torch.tensor([[0.4, 0.5, float("nan")]]).log(),
        advantage=torch.tensor([[2.0, -1.0, float("nan")]]),
    )
    loss = policy_loss(batch, surrogate=cls(slope=0.5), aggregate=TokenMean())
    # r = 1.25 and 0.5: -(2 * .5 tanh(.5) - 1 * .5 tanh(-1)) / 2
    assert loss.value.item() == pytest.approx(-(0.46211716 + 0.5 * 0.76159416) / 2, rel=1e-6)
    loss.value.backward()
    # d loss / d log pi = -A r sech^2((r - 1) / slope) / 2; the masked token gets none
    expected = [-2 * 1.25 * (1 - 0.46211716**2) / 2, 0.5 * (1 - 0.76159416**2) / 2, 0.0]
    torch.testing.assert_close(log_prob.grad, torch.tensor([expected]), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"slope=0 must be > 0"):
        cls(slope=0)


def test_reward():
    spec = block("Short")(limit=10, weight=0.1)
    prompt = Prompt(uid=0, messages=(), tokens=(1,))
    made = [Completion.of_text(0, 0, "", (5,) * n) for n in (0, 4, 25)]
    assert [score.value for score in spec.score(prompt, made)] == [1.0, 0.6, 0.0]
    assert (spec.weight, spec.label) == (0.1, "short")


def test_engine():
    weights = {"load_weights": lambda: pytest.fail("needs no weights")}
    setup = EngineSetup(model_path="-", tokenizer=tiny_tokenizer(), **weights)
    spec = block("Scripted")("7")
    engine = spec.build(setup)
    assert spec.provides == {"behavior_log_prob", "policy_version"} and not spec.needs_weights
    prompt = Prompt(uid=3, messages=(), tokens=(1,))
    request = Request(prompt=prompt, sample=2, sampling=Sampling(temperature=0.5), turn=1)

    async def answers():
        await engine.publish(WeightUpdate(version=4, module=torch.nn.Identity()))
        assert (await engine.health()).version == 4
        return [c async for c in engine.generate([request])]

    (only,) = asyncio.run(answers())
    assert (only.prompt_uid, only.sample, only.turn, only.text, only.temperature) == (3, 2, 1, "7", 0.5)
    assert tiny_tokenizer().decode(only.tokens) == "7" and only.policy_version.tolist() == [4]
    scored = [ScoreRequest(prompt_tokens=(1,), tokens=tokens) for tokens in (only.tokens, only.tokens + 1)]
    assert [x.tolist() for x in asyncio.run(engine.score(scored))] == [[0.0], [-np.inf]]


def test_readme():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    log_prob = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    scope = {"log_prob": log_prob, "behavior": torch.tensor([[0.5, 0.2]]).log()}
    exec(code, scope | {"mask": torch.tensor([[True, True]]), "advantage": torch.tensor([[1.0, -1.0]])})
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.5, 0.5]]))  # -A r / 2 where r = 1


def test_golden_record_by_hand():
    from proxima_peers.verify.verification import verify_record

    (text,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    (record,) = json.loads(text)
    assert (verify_record(record).status, set(record["expected"])) == ("matched", {"weight", "keep"})
