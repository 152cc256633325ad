"""`proxima check`: the laws on our kinds, and on a stranger's file."""

import importlib
import json

import pytest

from proxima.cli.main import main
from proxima.laws import engine_laws, reward_laws
from proxima.laws.law import check_law
from proxima.laws.spec_check import laws_of
from tests.docs.printed import fence

SOUND = fence("CONTRIBUTING.md", "class SoftClip")


@pytest.mark.slow
def test_a_strangers_surrogate_is_one_file(stranger, capsys):
    stranger("sound_lab", SOUND)
    assert main(["check", "sound_lab:SoftClip", "slope=0.3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "passed   declared" and "passed   by_hand" in lines
    assert lines[-1].startswith("surrogate sound_lab:SoftClip: ") and ", 0 FAILED, " in lines[-1]


@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (("-b.masked", "b.masked"), "on_policy", "gradient at ratio 1"),
        (("(masked_ratio(b) - 1)", "(masked_ratio(b) - 1).detach() * b.log_prob"), "derivative", "central difference"),
        (("b.loss_mask, {})", "b.loss_mask | True, {})"), "shape", "keep is True outside the loss mask"),
        (("_ratio(b) - 1", '_ratio(b) - b.masked("behavior_log_prob").exp()'), "needs", "add what it reads"),
        (("-b.masked(", "-b.loss_mask.sum() * b.masked("), "micro_batches", "summed over micro-batches"),
        (("-b.masked(", "0.1 - b.masked("), "zero_advantage", "advantage 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_a_small_counterexample(stranger, change, law, message):
    before, after = change
    assert before in SOUND
    name = f"broken_{law}"
    stranger(name, SOUND.replace(before, after))
    spec = importlib.import_module(name).SoftClip()
    (result,) = (check_law(entry, spec) for entry in laws_of("surrogate", spec) if entry.name == law)
    assert result.status == "FAILED" and message in result.detail
    assert "counterexample: lengths [" in result.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "law", "message"),
    [
        (('{"loss": 0.0', '{"loss": 0.25'), "by_hand", "loss: 0, expected 0.25"),
        (("torch.tanh(", "torch.sinh("), "extreme_ratios", "the loss is "),
        (
            ("-b.masked(", "-(1 if b.entropy is None else 2) * b.masked("),
            "needs",
            "without entropy the result is another one; add what it reads to needs",
        ),
        (
            ("slope: float = 0.2", "slope: float = 0.2\n    needs: ClassVar = Surrogate.needs | {'entropy'}"),
            "needs_are_read",
            "needs declares entropy, which changes no result; remove it from needs",
        ),
        (
            ("slope: float = 0.2", "slope: float = 0.2\n    exempt_laws: ClassVar = frozenset({'on_policy'})"),
            "on_policy",
            "exempt, but holds: remove the exemption",
        ),
    ],
)
@pytest.mark.usefixtures("few_cases")
def test_what_a_spec_says_of_itself_is_not_believed(stranger, capsys, change, law, message):
    before, after = change
    assert before in SOUND
    stranger(f"boasting_{law}", SOUND.replace(before, after))
    assert main(["check", "--json", f"boasting_{law}:SoftClip"]) == 1
    results = {r["law"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert results[law]["status"] == "FAILED" and message in results[law]["detail"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_cases")
def test_an_exempt_law_is_run(capsys):
    assert main(["check", "dro"]) == 0
    assert "skipped  scale: exempt, and indeed fails: loss at 4 times the advantage" in capsys.readouterr().out


RECKLESS = """
@dataclass(frozen=True, kw_only=True)
class Reckless(WeightedReward):
    def score_one(self, prompt, completion):
        return Score(value=float(completion.text[0] == "4"))
"""


@pytest.mark.slow
def test_a_strangers_reward(stranger, capsys):
    stranger("reward_lab", fence("CONTRIBUTING.md", "class Short") + RECKLESS)
    assert main(["check", "reward_lab:Short", "limit=32"]) == 0
    assert "reward reward_lab:Short: 5 passed, 0 FAILED, 1 skipped" in capsys.readouterr().out
    assert main(["check", "reward_lab:Reckless"]) == 1
    out = capsys.readouterr().out
    assert "FAILED   one_score_each: no score for '' (0 characters): reckless: IndexError" in out
    assert "so a completion has no score, or another's" in out


@pytest.mark.slow
@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("kind", ["ppo_clip", "grpo", "prune", "second_moment", "k3", "gsm8k"])
def test_our_kinds(kind, capsys):
    assert main(["check", kind]) == 0
    assert "FAILED " not in capsys.readouterr().out.replace("0 FAILED", "")


def test_a_strangers_engine(stranger, capsys):
    sound = fence("CONTRIBUTING.md", "class Scripted")
    stranger("scripted_lab", sound)
    assert main(["check", "scripted_lab:Scripted"]) == 0
    assert "engine scripted_lab:Scripted: 7 passed, 0 FAILED, 11 skipped" in capsys.readouterr().out
    stale = sound.replace("policy_version=self.version", "policy_version=0")
    stranger("stale_lab", stale.replace("tokens=self.tokens,", "tokens=[5, len(requests)],"))
    assert main(["check", "stale_lab:Scripted"]) == 1
    output = capsys.readouterr().out
    assert "FAILED   versions: tokens carry versions {" in output
    assert "FAILED   determinism: prompt 0, sample 0 differs when it is alone" in output


@pytest.mark.slow
def test_our_engine(capsys, monkeypatch):
    """Of its laws two, one of which compares it with the model that it was given: tests/laws has them all."""
    two = [law for law in engine_laws.ENGINE_LAWS if law.name in ("greedy", "lengths")]
    monkeypatch.setattr(engine_laws, "ENGINE_LAWS", two)
    assert main(["check", "local", "dtype=float32"]) == 0
    assert "engine local: 2 passed, 0 FAILED, 0 skipped" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_check_that_could_try_nothing_is_no_success(flags, capsys, monkeypatch):
    one = [law for law in reward_laws.JUDGE_LAWS if law.name == "one_score_each"]
    monkeypatch.setattr(reward_laws, "JUDGE_LAWS", one)
    assert main(["check", "judge", "url=http://127.0.0.1:9/v1", "model=none", *flags]) == 2
    printed = capsys.readouterr()
    assert "127.0.0.1:9" in printed.out
    assert printed.err.startswith("error: reward judge: no law could be tried; see above")


@pytest.mark.slow
@pytest.mark.usefixtures("few_cases")
def test_the_slot_may_stand_before_the_kind(capsys):
    assert main(["check", "aggregate", "token_mean"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("aggregate token_mean: ")
