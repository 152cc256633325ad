"""The code in CONTRIBUTING.md and README.md is what it says; tests/cli/test_check.py has its surrogate and engine."""

import json

import torch

from proxima.data import Completion, Prompt
from proxima_peers.verify.verification import verify_record
from tests.docs.printed import fence


def test_reward():
    scope = {"__name__": "contributing"}
    exec(fence("CONTRIBUTING.md", "class Short"), scope)
    spec = scope["Short"](limit=10, weight=0.1)
    prompt = Prompt(uid=0, messages=(), tokens=(1,))
    made = [Completion.of_text(0, 0, "", (5,) * n) for n in (0, 4, 25)]
    assert [score.value for score in spec.score(prompt, made)] == [1.0, 0.6, 0.0]
    assert (spec.weight, spec.label) == (0.1, "short")


def test_readme():
    log_prob = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    scope = {"log_prob": log_prob, "behavior": torch.tensor([[0.5, 0.2]]).log()}
    scope |= {"mask": torch.tensor([[True, True]]), "advantage": torch.tensor([[1.0, -1.0]])}
    exec(fence("README.md", "policy_loss"), scope)
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.5, 0.5]]))  # -A r / 2 where r = 1


def test_golden_record_by_hand():
    (record,) = json.loads(fence("CONTRIBUTING.md", '[{"name"'))
    assert (verify_record(record).status, set(record["expected"])) == ("matched", {"weight", "keep"})
