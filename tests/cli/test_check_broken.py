"""`proxima check` of classes with one defect each: the cause comes first, with its cure, and no consequence of it."""

from pathlib import Path

import pytest
import yaml

from proxima.cli.main import main
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.laws.outcome_laws import TOKEN_ADVANTAGE_LAWS
from proxima.laws.reward_laws import REWARD_LAWS
from proxima.laws.spec_check import DECLARATION, SLOTS

HEAD = """import random
from dataclasses import dataclass
from typing import ClassVar

import torch

from proxima.core import Aggregate, Correction, PolicyBatch, Selection, Surrogate, TokenLoss
from proxima.core.advantage.protocol import Advantage, GroupAdvantage, TokenAdvantage
from proxima.core.loss import Corrected, Penalty
from proxima.core.ratio import masked_ratio
from proxima.data.flow import Completion, Score
from proxima.engine.protocol import Capabilities, EngineSpec, Health
from proxima.reward.base import WeightedReward


@dataclass(frozen=True)
"""


def returns(value):
    """A surrogate of that loss."""
    return f"""{HEAD}class Mine(Surrogate):
    def __call__(self, b):
        r = masked_ratio(b)
        return TokenLoss({value}, b.loss_mask, {{}})
"""


BROKEN = yaml.safe_load(Path(__file__).with_name("broken.yaml").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_comes_first_and_alone(stranger, capsys, name):
    source, law, message, cure = BROKEN[name].values()
    stranger(f"broken_{name}", HEAD + source.lstrip())
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


@pytest.mark.slow
@pytest.mark.usefixtures("few_cases")
def test_independent_defects_are_told_together(stranger, capsys):
    stranger("two_defects", returns("b.masked('advantage') * r + 1.0 * b.loss_mask * (b.entropy is None)"))
    main(["check", "two_defects:Mine"])
    failed = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert {"on_policy:", "needs:"} <= set(failed)


@pytest.mark.slow
def test_what_raises_again_is_not_told_twice(stranger, capsys):
    stranger("never_empty", returns("-b.masked('advantage') * r * (1 if len(r) else 1 / 0)"))
    assert main(["check", "never_empty:Mine"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1] for line in lines] == ["micro_batches:", "empty:"]
    assert "raised ZeroDivisionError" in lines[0] and lines[1] == "FAILED   empty: as micro_batches"


def test_two_nans_are_equal():
    import torch

    from proxima.laws.law import require_close, same

    nan, entry = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")])
    require_close(nan, nan.clone(), "x")
    assert same(nan, nan.clone()) and not same(nan, entry)
    with pytest.raises(AssertionError, match="x at 0"):
        require_close(nan, torch.tensor([1.0, 1.0]), "x")


def test_every_law_has_a_cure():
    laws = [DECLARATION, *ENGINE_LAWS, *REWARD_LAWS, *TOKEN_ADVANTAGE_LAWS]
    laws += [law for _, of_slot in SLOTS.values() for law in of_slot]
    assert [law.name for law in laws if not law.cure] == []
