import shlex

import pytest

from proxima.config import check, resolve
from proxima.config.validate import to_do
from proxima.data import UserError
from proxima.lab.plan import plan_recipe, read_devices
from proxima.lab.plan.proposals import proposals

RECIPE = "qwen3_30b_cppo"


def test_the_words_give_the_plan():
    """Each proposal can be pasted, is accepted, and is planned with the seconds it was ranked by."""
    devices = read_devices("16xH100-80G")
    found = proposals(resolve(RECIPE, root=None), devices)
    synchronous = [p.plan.seconds for p in found if not p.plan.load.lag]
    assert synchronous == sorted(synchronous) and len(found) > 2
    for proposal in found:
        words = shlex.split(" ".join(proposal.words))
        resolved = resolve(RECIPE, words, root=None)
        left = to_do(resolved)
        assert not [problem for problem in check(resolved) if problem not in left and "vllm" not in str(problem)]
        again = plan_recipe(resolved, devices)
        assert again.layout == proposal.plan.layout
        assert again.seconds == pytest.approx(proposal.plan.seconds)
        assert again.memory.fits
    assert found[-1].plan.load.lag == 1 and found[-1].plan.seconds < synchronous[0]


def test_devices_that_are_too_few():
    with pytest.raises(UserError, match=r"no layout of Qwen/Qwen3-30B-A3B-Base fits 2xL4-24G; take more"):
        proposals(resolve(RECIPE, root=None), read_devices("2xL4-24G"))
