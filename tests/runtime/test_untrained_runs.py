"""A run in which no update had a gradient ends as untrained, says why, and offers no resume."""

import pytest

from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.watch.step_notes import why_untrained
from proxima.training.stack import TrainStack
from tests.runtime.offline import tiny_dpo, tiny_sft
from tests.runtime.tiny_run import NO_EVAL, go, recipe, steps_of, summary_of

EVEN = {"kind": "tests.runtime.tiny_run:Even"}
ALIKE = {"reward": [EVEN | {"constant": 1}]}  # every completion has the same reward
FAILING = {"reward": [EVEN | {"fail_on": 1}], "runtime__max_unscored_steps": 0, "runtime__reward_trial": "off"}
GRPO = {"preset": "grpo", "skip_zero_advantage": True}
NO_TOKEN = {"kind": "importance", "bound": "clip", "lower": 1e6, "upper": 2e6}
DROPPED = [{"kind": "drop_uniform_groups", "metric": "reward"}]

CASES = {
    "no group differs": (ALIKE | {"algorithm": GRPO}, r"every advantage was 0 \(mean reward 0.25\)"),
    "no forward pass is skipped": (
        ALIKE | {"algorithm": GRPO | {"skip_zero_advantage": False}, "train__on_zero_gradient": "step"},
        "the gradient was 0",
    ),
    "all is dropped": (ALIKE | {"algorithm": GRPO | {"selection": DROPPED}}, r"nothing was left to train on \(16 "),
    "nothing is scored": (FAILING | {"algorithm": GRPO}, r"nothing was left to train on \(16 invalid\)"),
    "all is rejected": (
        {"algorithm": GRPO | {"correction": NO_TOKEN, "proximal": "recompute"}},
        "algorithm.correction rejected every token",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_trained_nothing_is_untrained(name, tiny_model, tmp_path, lent_servers):
    changes, why = CASES[name]
    tree = recipe(tiny_model("llama"), train__steps=2, **NO_EVAL, **changes)
    for resume in (False, True):  # it ends so again, and does not turn into a finished run
        with pytest.raises(RunEnded, match=f"^no step of 2 trained anything; in the last one, {why}"):
            go(tmp_path / "run", tree, resume=resume)
        summary = summary_of(tmp_path / "run")
        assert (summary["status"], summary["steps"], summary["resumable"]) == ("untrained", 2, False)
        assert summary["error"].startswith("no step of 2 trained anything; in the last one, ")  # no name of a class
    assert not any(step.get("grad_norm") for step in steps_of(tmp_path / "run"))


def test_one_gradient_in_a_run_is_enough(tiny_model, tmp_path, lent_servers):
    changes = {"reward": [EVEN | {"constant": 2}], "train__prompts_per_step": 1, "algorithm": GRPO}
    assert go(tmp_path / "run", recipe(tiny_model("llama"), **NO_EVAL, **changes)).status == "done"
    assert [step["grad_norm"] > 0 for step in steps_of(tmp_path / "run")] == [False, True, False]


@pytest.mark.parametrize("tiny", [tiny_sft, tiny_dpo])
def test_a_fixed_data_set_without_a_gradient_trains_nothing(tiny, tiny_model, tmp_path, monkeypatch):
    step = TrainStack._step

    def without_gradient(self):
        self.optimizer.zero_grad(set_to_none=True)
        return step(self)

    monkeypatch.setattr(TrainStack, "_step", without_gradient)
    tree = tiny.recipe(tiny_model("llama"), tmp_path, eval={"task": None}, train__steps=2)
    with pytest.raises(RunEnded, match="^no step of 2 trained anything; in the last one, the gradient was 0: its exam"):
        go(tmp_path / "run", tree)
    assert summary_of(tmp_path / "run")["status"] == "untrained"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"updates": 0, "prompts_used": 4}, "only the critic was trained; lower critic.value_warmup_steps"),
        ({"updates": 0, "prompts_used": 0, "dropped/invalid": 3}, "nothing was left to train on (3 invalid); the we"),
        ({"updates": 1, "tokens/trained": 9, "masked_fraction": 1.0}, "algorithm.surrogate masked every token; widen"),
        ({"updates": 1, "tokens/trained": 9, "masked_fraction": 0.5}, "the gradient was 0"),
    ],
)
def test_the_reason_is_read_from_the_record(record, why):
    assert why_untrained(record).startswith(why)
