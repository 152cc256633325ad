"""`proxima check` of classes with one defect each: the cause comes first, with its cure, and no consequence of it."""

import textwrap

import pytest

from proxima.check import LAWS
from proxima.check.engine_laws import ENGINE_LAWS
from proxima.check.outcome_laws import GROUP_ADVANTAGE_LAWS, TOKEN_ADVANTAGE_LAWS
from proxima.check.reward_laws import REWARD_LAWS
from proxima.check.spec_check import DECLARATION
from proxima.cli.main import main

HEAD = """
    import random
    from dataclasses import dataclass
    from typing import ClassVar

    import torch

    from proxima.core import Aggregate, Correction, PolicyBatch, Selection, Surrogate, TokenLoss
    from proxima.core.advantage import Advantage, GroupAdvantage, TokenAdvantage
    from proxima.core.loss import Corrected, Penalty
    from proxima.core.ratio import masked_ratio
    from proxima.data import Completion, Score
    from proxima.engine import Capabilities, EngineSpec, Health
    from proxima.reward import WeightedReward


    @dataclass(frozen=True)
"""


def surrogate(body):
    return (
        f"class Mine(Surrogate):\n        def __call__(self, b):\n            r = masked_ratio(b)\n            {body}"
    )


def returns(value):
    return surrogate(f"return TokenLoss({value}, b.loss_mask, {{}})")


def called(base, signature, body):
    return f"class Mine({base}):\n        def __call__(self, {signature}):\n            {body}"


def scored(body):
    return f"class Mine(WeightedReward):\n        def score_one(self, prompt, completion):\n            {body}"


DENOMINATOR = "\n        def denominator(self, mask, edges):\n            return mask.sum().double()"
ENGINE = "class Mine(EngineSpec):\n        def build(self, setup):\n            "
BROKEN = {  # name → class, the law that fails first, what is told of it, its cure
    "raises": (
        returns("-b.advantages * r"),
        "runs",
        "'PolicyBatch' object has no attribute 'advantages' (",
        "correct the",
    ),
    "tensor": (surrogate("return -r"), "runs", "it returns a Tensor, expected a TokenLoss(", "correct the call"),
    "forgets": (
        surrogate("TokenLoss(-r, b.loss_mask, {})"),
        "runs",
        "it returns None, expected a TokenLoss",
        "correct",
    ),
    "no_call": (
        "class Mine(Surrogate):\n        slope: float = 1",
        "runs",
        "does `__call__` exist",
        "correct the call",
    ),
    "one_number": (returns("(-r).sum()"), "runs", "loss has shape [], expected [1]", "correct the call"),
    "detached": (returns("(-b.masked('advantage') * r).detach()"), "runs", "the loss has no gradient", "correct the"),
    "nan": (returns("torch.log(r - 99)"), "runs", "the loss of token 0 is nan, with log_prob -", "clamp before exp"),
    "zero_by_zero": (
        returns("-b.masked('advantage') * (r - 1) / (r - 1)"),
        "runs",
        "is nan, with log_prob -0.6694",
        "divide",
    ),
    "raw": (
        returns("-b.advantage * r"),
        "masked_nan",
        "-1e+30 at token 0, with log_prob -0.4989, advantage 1e+30",
        "b.masked",
    ),
    "spread": (
        returns("-b.masked('advantage') / b.masked('advantage').abs().max() * r"),
        "masked_nan",
        "nan at token 0",
        "b.masked",
    ),
    "draws": (
        returns("-b.masked('advantage') * r * torch.rand(())"),
        "pure",
        "two calls give different",
        "draw nothing",
    ),
    "in_place": (
        surrogate("b.behavior_log_prob.mul_(0); return TokenLoss(-b.masked('advantage') * r, b.loss_mask, {})"),
        "pure",
        "changed the batch's behavior_log_prob in place",
        "change no tensor",
    ),
    "thawed": (
        "class Other(Surrogate): ...\n\n    @dataclass\n    class Mine(Surrogate):\n        slope: float = 1",
        "declared",
        "frozen=True",
        "CONTRIBUTING.md",
    ),
    "rejects": (
        called("Correction", "b", "raise RuntimeError('oops')"),
        "runs",
        "raised RuntimeError: oops (",
        "correct",
    ),
    "weight_alone": (
        called("Correction", "b", "return b.masked('log_prob')"),
        "runs",
        "it returns a Tensor, expected a Corr",
        "corr",
    ),
    "negative": (
        called("Correction", "b", "return Corrected(-b.masked('advantage').abs(), b.loss_mask, {})"),
        "shape",
        "a weight is negative",
        "keep it at least 0",
    ),
    "float": (
        called("Penalty", "b", "return 1.0"),
        "runs",
        "it returns a float, expected a tensor [1]",
        "correct the call",
    ),
    "leaks": (
        called("Penalty", "b", "return b.log_prob - b.reference_log_prob"),
        "added",
        "not 0 outside the loss",
        "b.masked",
    ),
    "infinite": (
        called("Aggregate", "loss, b", "return loss.sum().double() / 0") + DENOMINATOR,
        "runs",
        "the numerator is",
        "divide",
    ),
    "mean": (
        called("Aggregate", "loss, b", "return loss.mean()") + DENOMINATOR,
        "linear",
        "summed over micro-batches",
        "sums in",
    ),
    "no_kind": (
        called("Advantage", "o", "return o.reward"),
        "declared",
        "subclass proxima.core.advantage.GroupAdv",
        "CONTR",
    ),
    "list": (
        called("GroupAdvantage", "o", "return o.reward.tolist()"),
        "runs",
        "it returns a list, expected a tensor [4]",
        "correct",
    ),
    "one_group": (
        called("GroupAdvantage", "o", "return (o.reward - o.reward.mean()) / o.reward.std()"),
        "values",
        "an advantage is not finite",
        "a group's spread is 0",
    ),
    "key": (
        called("Selection", "o, advantage", "raise KeyError('x')"),
        "runs",
        "raised KeyError: 'x' (",
        "correct the call",
    ),
    "typo": (
        scored("return completion.txt"),
        "one_score_each",
        "'Completion' object has no attribute 'txt'",
        "one finite Score",
    ),
    "nan_score": (
        scored("return Score(value=float('nan'))"),
        "one_score_each",
        "returned nan, expected a finite",
        "one finite",
    ),
    "random_score": (
        scored("return Score(value=random.random())"),
        "determinism",
        "the second time",
        "draw nothing from",
    ),
    "check": (
        scored("return Score(value=1.0)") + "\n        def check(self):\n            raise TypeError('no server')",
        "check",
        "raised TypeError: no server (",
        "a UserError alone",
    ),
    "build": (ENGINE + "raise OSError('no GPU')", "runs", "raised OSError: no GPU (", "every method of"),
    "object": (
        ENGINE + "return object()",
        "runs",
        "which has no generate, publish, pause, resume, abort, health",
        "every method",
    ),
}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(HEAD.rstrip() + "\n    " + source))

    return write


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_comes_first_and_alone(lab, capsys, name):
    source, law, message, cure = BROKEN[name]
    lab(f"broken_{name}", source)
    assert main(["check", f"broken_{name}:Mine"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = (
        number for number, line in enumerate(lines) if line.startswith("FAILED")
    )  # nothing that follows from it
    assert lines[failed].startswith(f"FAILED   {law}: ") and message in lines[failed]
    assert lines[failed + 2].startswith("         cure: ") and cure in lines[failed + 2]
    rest = lines[failed + 3]
    assert (rest.startswith("skipped  not_tried: ") and f"before `{law}` does" in rest) or lines[failed + 3 :] == lines[
        -1:
    ]


def test_independent_defects_are_told_together(lab, capsys):
    lab("two_defects", returns("b.masked('advantage') * r + 1.0 * b.loss_mask * (b.entropy is None)"))
    main(["check", "two_defects:Mine"])
    failed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert {"on_policy:", "needs:"} <= set(failed)


def test_what_raises_again_is_not_told_twice(lab, capsys):
    lab("never_empty", returns("-b.masked('advantage') * r * (1 if len(r) else 1 / 0)"))
    assert main(["check", "never_empty:Mine"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1] for line in lines] == ["micro_batches:", "empty:"]
    assert "raised ZeroDivisionError" in lines[0] and lines[1] == "FAILED   empty: as micro_batches"


def test_two_nans_are_equal():
    import torch

    from proxima.check.laws import require_close, same

    nan, entry = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")])
    require_close(nan, nan.clone(), "x")
    assert same(nan, nan.clone()) and not same(nan, entry)
    with pytest.raises(AssertionError, match="x at 0"):
        require_close(nan, torch.tensor([1.0, 1.0]), "x")


def test_every_law_has_a_cure():
    laws = [DECLARATION, *ENGINE_LAWS, *REWARD_LAWS, *GROUP_ADVANTAGE_LAWS, *TOKEN_ADVANTAGE_LAWS]
    laws += [law for slot in LAWS.values() for law in slot]
    assert [law.name for law in laws if not law.cure] == []
