"""NaN and infinity end a run with a line that says so; the last good checkpoint stays, and a resume is exact."""

import pytest
import torch
from safetensors.torch import load_file

from proxima.api.local_answers import generate, local_engine
from proxima.config.resolution import resolve
from proxima.core.advantage.group import Grpo
from proxima.data import NotFiniteError
from proxima.engine.protocol import Sampling
from proxima.runtime.launch.run import train
from proxima.runtime.loop.training_loop import RunEnded
from proxima.training.batch_builder import BatchBuilder
from proxima.training.stack import TrainStack
from proxima.view.log_lines import closing_line
from proxima.view.run_views import warnings_about
from tests.model.rows import same
from tests.runtime.tiny_run import NO_EVAL, assert_same, go, recipe, saved_in, steps_of, summary_of, traces


def test_nothing_is_drawn_from_logits_that_are_not_finite(tiny_model, monkeypatch):
    monkeypatch.setattr("proxima.api.local_answers.load", lambda path, **how: poisoned(path, **how))
    place = local_engine(str(tiny_model("llama")), "bfloat16", "auto", print)
    for temperature in (0.0, 1.0):
        with pytest.raises(NotFiniteError, match="probabilities are NaN where a token is drawn"):
            generate(*place, ["1 + 1"], sampling=Sampling(temperature=temperature, max_tokens=3))


def poisoned(path, **how):
    from proxima.model.load import load

    loaded = load(path, **how)
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(float("inf"))
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "what"),
    [
        (1, "the norm of the weights rose from [0-9.]+ to [0-9.e+]+ in update 1"),
        (3e38, "the weights are NaN, infinite"),
    ],
)
def test_a_diverging_run_ends_as_failed(lr, what, tiny_model, tmp_path):
    """A finite but huge step ends it too: such a run would go on to its end with a model of noise."""
    tree = recipe(tiny_model("llama"), train__optimizer__lr=lr, train__warmup_steps=0, train__schedule="constant")
    said = f"^step 1: {what}.*; there is no checkpoint to resume from. Training diverges: start another"
    with pytest.raises(RunEnded, match=said):
        go(tmp_path / "run", tree)
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed" and "--resume" not in closing_line(summary, None)
    assert saved_in(tmp_path / "run") == []


def test_a_run_that_diverges_after_a_checkpoint_resumes_with_a_lower_rate(tiny_model, tmp_path):
    """The command of the message works; the same settings would compute the same step again."""
    steps = {"train__warmup_steps": 0, "train__schedule": "constant", "checkpoint__every": 1}
    folder = tmp_path / "run"
    go(folder, recipe(tiny_model("llama"), **steps, train__steps=1))
    rising = resolve(
        {**recipe(tiny_model("llama"), **steps, train__optimizer__lr=1e3), "folder": str(folder)}, root=None
    )
    said = r"^step 2: the norm .*; the checkpoint of step 1 is finite. Resume from it with a lower train.optimizer.lr "
    for _ in range(2):
        with pytest.raises(RunEnded, match=said + r"or .*\(--resume --accept-changes train.optimizer.lr=LR\)"):
            train(rising.config, resolved=rising, resume=True, accept_changes=True)
    lower = resolve({**recipe(tiny_model("llama"), **steps), "folder": str(folder)}, root=None)
    assert train(lower.config, resolved=lower, resume=True, accept_changes=True).status == "done"


def test_weights_that_give_nan_are_not_resumed_from(tiny_model, tmp_path, monkeypatch):
    """Nothing has moved them since their checkpoint, so a resume would end at the same place."""

    def fails(self, *arguments):
        raise NotFiniteError("the model's probabilities are NaN where a token is drawn")

    go(tmp_path / "run", recipe(tiny_model("llama"), train__steps=1, **NO_EVAL))
    monkeypatch.setattr(BatchBuilder, "step_batch", fails)
    said = "^step 2: .*; the checkpoint of step 1 has these weights, and a resume would end here again. Training div"
    with pytest.raises(RunEnded, match=said):
        go(tmp_path / "run", recipe(tiny_model("llama"), train__steps=2, **NO_EVAL), resume=True)
    assert "--resume" not in closing_line(summary_of(tmp_path / "run"), None)


@pytest.mark.slow
def test_weights_that_triple_over_several_updates_have_not_exploded(tiny_model, tmp_path, monkeypatch):
    inner = TrainStack._step

    def grown(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(2.0)
        return inner(self)

    monkeypatch.setattr(TrainStack, "_step", grown)
    changes = {"train__updates_per_step": 2, "train__steps": 1, **NO_EVAL}
    assert go(tmp_path / "run", recipe(tiny_model("llama"), **changes)).status == "done"


@pytest.mark.slow
def test_the_last_good_checkpoint_stays_and_a_resume_is_exact(runs, tmp_path, monkeypatch):
    """Four times in one run, each time in another place; it has four updates a step."""
    inner, update = TrainStack._step, TrainStack.update

    def damaged(self, *arguments, **options):
        if self.updates == 2 * 4 and place == "weights before the update":
            with torch.no_grad():
                self.parameters[1].view(-1)[7] = float("nan")
        return update(self, *arguments, **options)

    def broken(self):
        last = self.updates == 2 * 4 + 3  # the last update of step 3
        if last and place == "gradient":
            self.parameters[0].grad[0, 0] = float("nan")
        if last and place == "second moment":  # its weight would never move again
            self.optimizer.state[self.parameters[0]]["exp_avg_sq"][0, 0] = float("inf")
        norm = inner(self)
        if last and place == "weights":
            with torch.no_grad():
                self.parameters[1].view(-1)[7] = float("inf")
        return norm

    for place in ("gradient", "weights", "weights before the update", "second moment"):
        with monkeypatch.context() as patch:
            patch.setattr(TrainStack, "_step", broken)
            patch.setattr(TrainStack, "update", damaged)
            # a checkpoint that can't be written ends the step that was just done
            step = 4 if place == "second moment" else 3
            with pytest.raises(RunEnded, match=f"^step {step}: .*; the checkpoint of step 2 is finite. Resume"):
                runs.go("policy", tmp_path / "run", resume=True)
        assert [checkpoint.step for checkpoint in saved_in(tmp_path / "run")] == [1, 2]
    assert runs.go("policy", tmp_path / "run", resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), runs.traces("policy"))


@pytest.mark.slow
def test_an_advantage_that_is_not_finite_ends_the_run(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(Grpo, "__call__", lambda self, o: torch.full_like(o.reward, float("nan")))
    with pytest.raises(RunEnded, match="^step 1: Grpo gives 16 completions an advantage of NaN or infinity; "):
        go(tmp_path / "run", recipe(tiny_model("llama")))


@pytest.mark.slow
def test_a_huge_reward_costs_its_completion(tiny_model, tmp_path, lent_servers):
    (tmp_path / "mine.py").write_text(
        "def huge(p, c):\n    return 1e39 if sum(c.tokens) % 5 == 0 else float(sum(c.tokens) % 2)\n"
    )
    reward = [{"kind": "function", "path": f"{tmp_path}/mine.py:huge"}]
    assert go(tmp_path / "run", recipe(tiny_model("llama"), reward=reward, train__steps=1, **NO_EVAL)).status == "done"
    (step,) = steps_of(tmp_path / "run")
    assert 0 < step["reward/invalid"] < step["completions"] and step["grad_norm"] > 0


@pytest.mark.slow
def test_a_gradient_of_zero_moves_the_weights_by_momentum_or_not_at_all(tiny_model, tmp_path):
    """Prompts 0 and 2 score the same for every completion. Step 1 has no momentum yet, step 3 has that of step 2.
    Whether their forward passes are skipped changes no bit."""
    made, said = {}, {}
    for action, forwards in (("step", "true"), ("step", "false"), ("skip", "true")):
        changes = {
            "algorithm": {"preset": "grpo", "skip_zero_advantage": forwards == "true"},
            "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 2}],
            "train__prompts_per_step": 1,
            "train__schedule": "constant",
            "train__on_zero_gradient": action,
            **NO_EVAL,
        }
        folder = tmp_path / f"{action}-{forwards}"
        go(folder, recipe(tiny_model("llama"), **changes))
        saved = saved_in(folder)
        made[action, forwards] = [load_file(next(checkpoint.model.glob("*.safetensors"))) for checkpoint in saved]
        steps = steps_of(folder)
        assert [r["grad_norm"] > 0 for r in steps] == [False, True, False]
        assert [(r["policy_version"], r["updates"]) for r in steps] == [(1, 1), (2, 1), (3, 1)]
        assert [r["skipped_zero_advantage"] for r in steps] == ([4, 0, 4] if forwards == "true" else [0, 0, 0])
        assert [r.get("updates/skipped", 0) for r in steps] == ([1, 0, 1] if action == "skip" else [0, 0, 0])
        said[action] = warnings_about(steps[2])
    assert all(map(same, made["step", "true"], made["step", "false"]))
    start = load_file(next(tiny_model("llama").glob("*.safetensors")))
    name = "model.layers.0.mlp.up_proj.weight"
    first, second, third = (weights[name] for weights in made["skip", "true"])
    assert torch.equal(first, start[name]) and not torch.equal(second, first) and torch.equal(third, second)
    assert not torch.equal(made["step", "true"][2][name], made["step", "true"][1][name])
    assert "taught nothing and the weights are unchanged" in said["skip"][0]
