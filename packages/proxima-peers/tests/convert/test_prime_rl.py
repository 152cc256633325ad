"""prime-rl's losses by the version that a file was written for, and every default reported."""

import pytest

from proxima.config import ConfigError, resolve
from proxima.core.correction.importance import Icepop
from proxima.core.penalty import LogRatioSq
from proxima.core.surrogate.clip import Reinforce
from proxima.core.surrogate.dppo import Dppo
from proxima.core.surrogate.tv_band import TvBand
from proxima_peers.convert.conversion import convert

BASE = """
max_steps = 20
[orchestrator]
batch_size = 64
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 100
"""


@pytest.fixture
def converted(tmp_path):
    def run(text, base=BASE):
        file = tmp_path / "rl.toml"
        file.write_text(base + text)
        done = convert(file, "prime_rl")
        return done, resolve(done.recipe, root=None).config

    return run


def behavior(coefficient):
    return LogRatioSq(coefficient, towards="behavior")


@pytest.mark.parametrize(
    ("text", "surrogate", "penalties"),
    [
        ("", TvBand(0.3), []),
        ("[trainer.loss]\ntype = 'ipo'", TvBand(0.3), []),
        ("[trainer.loss]\neps = 0.1\nkl_tau = 0.002", TvBand(0.1), [behavior(0.002)]),
        ("[trainer.loss]\ntype = 'ipo'\nipo_threshold = 0.1", TvBand(0.1), [behavior(0.001)]),
        ("[trainer.loss]\ntype = 'default'", Dppo(delta=0.2, delta_low=0.2), [behavior(0.001)]),
        ("[trainer.loss]\ndppo_mask_low = 0.1\nkl_tau = 0", Dppo(delta=0.2, delta_low=0.1), []),
        ("[trainer.loss]\ntype = 'icepop'\nratio_low = 0.3", Reinforce(), []),
    ],
)
def test_a_loss_is_that_of_its_version(converted, text, surrogate, penalties):
    done, config = converted(text)
    algorithm = config.algorithm
    assert (algorithm.surrogate, algorithm.penalties, algorithm.proximal) == (surrogate, penalties, "behavior")
    icepop = (Icepop(upper=5.0, lower=0.3, towards="current"),) if "icepop" in text else ()
    assert algorithm.correction == icepop and (algorithm.advantage.scale, done.unknown) == ("none", [])
    assert (config.train.prompts_per_step, config.train.completions_per_prompt, config.train.steps) == (4, 16, 20)


def test_every_default_is_named_with_its_version(converted):
    done, _ = converted("")
    assumed = {option.name for option in done.assumed}
    assert assumed >= {
        "algorithm.surrogate.kind=tv_band (trainer.loss.type)",
        "algorithm.surrogate.epsilon=0.3 (trainer.loss.eps)",
        "algorithm.penalty=[] (trainer.loss.kl_tau)",
    }
    assert {option.why for option in done.assumed} == {"prime-rl 559b4477, its losses of 2026-09-18"}
    assert "no loss over pairs" in done.text


def test_what_has_no_equivalent_is_listed(converted):
    done, _ = converted("[trainer.loss]\nadv_tau = 0.5\n[trainer.scheduler]\ntype = 'linear'\ndecay_steps = 5")
    listed = {option.name for option in done.unsupported}
    assert listed == {"trainer.loss.adv_tau", "trainer.scheduler.decay_steps", "orchestrator.max_off_policy_steps"}
    own = "[trainer.loss]\ntype = 'custom'\nimport_path = 'mine.loss'\n[orchestrator.algo]\ntype = 'max_rl'"
    missing = {option.name for option in converted(own)[0].missing}
    assert {"trainer.loss.import_path", "orchestrator.algo.type"} <= missing


def test_what_is_not_toml_is_refused(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text("max_steps = = 3")
    with pytest.raises(ConfigError, match="not TOML"):
        convert(file, "prime_rl")
