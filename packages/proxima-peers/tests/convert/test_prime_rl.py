"""prime-rl's losses by the version that a file was written for, and every default reported."""

import pytest

from proxima.config import resolve
from proxima.core.correction.importance import Icepop
from proxima.core.penalty import LogRatioSq
from proxima.core.surrogate.clip import Reinforce
from proxima.core.surrogate.dppo import Dppo
from proxima.core.surrogate.tv_band import TvBand

from .conftest import names

BASE = {"max_steps": 20, "orchestrator.batch_size": 64, "orchestrator.group_size": 16}
BASE |= {"orchestrator.train.sampling.max_completion_tokens": 100}
L = "trainer.loss."


def behavior(coefficient):
    return LogRatioSq(coefficient, towards="behavior")


@pytest.mark.parametrize(
    ("options", "surrogate", "penalties"),
    [
        ({}, TvBand(0.3), []),
        ({L + "type": "ipo"}, TvBand(0.3), []),
        ({L + "eps": 0.1, L + "kl_tau": 0.002}, TvBand(0.1), [behavior(0.002)]),
        ({L + "type": "ipo", L + "ipo_threshold": 0.1}, TvBand(0.1), [behavior(0.001)]),
        ({L + "type": "default"}, Dppo(delta=0.2, delta_low=0.2), [behavior(0.001)]),
        ({L + "dppo_mask_low": 0.1, L + "kl_tau": 0}, Dppo(delta=0.2, delta_low=0.1), []),
        ({L + "type": "icepop", L + "ratio_low": 0.3}, Reinforce(), []),
    ],
)
def test_a_loss_is_that_of_its_version(converted, options, surrogate, penalties):
    done = converted("prime_rl", BASE | options)
    config = resolve(done.recipe, root=None).config
    algorithm = config.algorithm
    assert (algorithm.surrogate, algorithm.penalties, algorithm.proximal) == (surrogate, penalties, "behavior")
    icepop = (Icepop(upper=5.0, lower=0.3, towards="current"),) if "icepop" in options.values() else ()
    assert algorithm.correction == icepop and (algorithm.advantage.scale, done.unknown) == ("none", [])
    assert (config.train.prompts_per_step, config.train.completions_per_prompt, config.train.steps) == (4, 16, 20)


def test_every_default_is_named_with_its_version(converted):
    done = converted("prime_rl", BASE)
    assert names(done.assumed) >= {
        "algorithm.surrogate.kind=tv_band (trainer.loss.type)",
        "algorithm.surrogate.epsilon=0.3 (trainer.loss.eps)",
        "algorithm.penalty=[] (trainer.loss.kl_tau)",
    }
    assert {option.why for option in done.assumed} == {"prime-rl 559b4477, its losses of 2026-09-18"}
    assert "no loss over pairs" in done.text


def test_what_has_no_equivalent_is_listed(converted):
    options = {L + "adv_tau": 0.5, "trainer.scheduler.type": "linear", "trainer.scheduler.decay_steps": 5}
    listed = names(converted("prime_rl", BASE | options).unsupported)
    assert listed == {"trainer.loss.adv_tau", "trainer.scheduler.decay_steps", "orchestrator.max_off_policy_steps"}
    own = {L + "type": "custom", L + "import_path": "mine.loss", "orchestrator.algo.type": "max_rl"}
    missing = names(converted("prime_rl", BASE | own).missing)
    assert {"trainer.loss.import_path", "orchestrator.algo.type"} <= missing
