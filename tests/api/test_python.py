"""`proxima.train`, `evaluate` and `load_run`: what a script or a notebook gets."""

import asyncio
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import proxima
from proxima.core import Cppo
from proxima.view.microscope.trend import metric_meanings
from tests.refusals import refused
from tests.runtime.tiny_run import Even, recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return proxima.train(recipe(tiny_model("llama"), folder=str(folder)), {"train.steps": 2}, quiet=True)


@pytest.mark.slow
def test_importing_the_package_loads_nothing_else():
    script = "import sys, proxima; print(sorted({'torch', 'pandas', 'transformers', 'proxima.api'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"


def test_what_a_notebook_looks_up():
    import inspect

    from proxima import evaluate, train

    assert train is proxima.train and inspect.isfunction(train)
    settings = ["recipe", "overrides", "resume", "overwrite", "accept_changes", "quiet"]
    assert list(inspect.signature(train).parameters) == settings
    assert "task" in inspect.signature(evaluate).parameters
    assert {"train", "evaluate", "load_run", "UserError"} <= set(dir(proxima))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = proxima.trian


@pytest.mark.slow
def test_what_a_run_lacks_is_said(run):
    assert "has no rollouts of step 7; it has those of steps 1 to 2" in refused(run.rollouts, [1, 7])[0]
    assert "has no column 'rewards'; did you mean 'reward'" in refused(run.rollouts, columns=["step", "rewards"])[0]
    (line,) = refused(run.answers, held_out="unknown")
    assert line.startswith("held_out=unknown: ") and "has no held-out set of that name; leave it out" in line


@pytest.mark.slow
def test_a_run_in_tables(run):
    assert run.status == "done" and run.config["train"]["steps"] == 2
    assert repr(run).startswith(f"<run {run.folder}  done: 2 steps in ")
    assert list(run.metrics.index) == [1, 2]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert list(run.metrics["reward/mean"]) == [r["reward/mean"] for r in lines if r["kind"] == "train"]
    assert list(run.evaluations["label"]) == ["before", "after"] and list(run.evaluations.index) == [0, 2]
    assert [name for name, (group, said) in metric_meanings(run.metrics).items() if group == "Other" or not said] == []
    rollouts = run.rollouts()
    assert list(rollouts["step"]) == [1] * 16 + [2] * 16
    assert rollouts["reward"].iloc[:16].mean() == pytest.approx(run.metrics.loc[1, "reward/mean"])
    assert rollouts["parts"].iloc[0] == {"even": rollouts["reward"].iloc[0]}
    assert list(run.rollouts([2], ["step", "text"]).columns) == ["step", "text"]
    assert len(run.rollouts([2])) == 16
    assert len(run.answers()) == 10
    assert (run.model() / "config.json").is_file() and run.model(1).parent.name == "000001"
    assert run.report.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_the_report_of_a_killed_run_is_written_when_it_is_asked_for(run):
    run.report.unlink()
    assert run.report.is_file()


@pytest.mark.slow
def test_a_run_is_loaded_from_its_folder(run, tmp_path):
    assert proxima.load_run(run.folder) == run
    with pytest.raises(proxima.UserError, match="is not a run; give the folder that `proxima train` printed"):
        proxima.load_run(tmp_path)


@pytest.mark.slow
def test_a_tilde_is_the_home_folder(run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    shutil.copytree(run.folder, home / "run")
    assert proxima.load_run("~/run").folder == home / "run"
    done = proxima.evaluate("~/run", None, ["eval.limit=1"], out="~/answers", quiet=True)
    assert done.folder == home / "answers" and (home / "answers" / "result.json").is_file()
    with pytest.raises(proxima.UserError, match="^home/recipe.yaml: no such recipe"):  # relative to the current folder
        proxima.train("~/recipe.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.slow
def test_inside_a_running_event_loop(tiny_model, tmp_path, capsys):
    """As in Jupyter, where every cell is run by one."""

    async def cell():
        tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"), train__steps=1)
        run = proxima.train(tree)
        tokens = proxima.evaluate(run.folder, max_tokens=4, limit=3, out=tmp_path / "found")
        await asyncio.sleep(0)  # the loop is as it was
        return run, tokens

    run, tokens = asyncio.run(cell())
    assert run.status == "done" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    out = capsys.readouterr().out
    assert "done: 1 step in " in out and "arithmetic" in out
    assert list(tokens.figures["figure"])[:2] == ["accuracy", "reward/mean"]
    assert tokens.result["suites"]["arithmetic"]["questions"] == 3
    assert list(tokens.answers["set"]) == ["arithmetic"] * 3
    assert tokens.answers["length"].max() <= 4
    assert repr(tokens) == f"<evaluation {tmp_path / 'found'}  arithmetic accuracy {tokens.figures['value'][0]:.3f}>"


def test_errors_are_exceptions_and_name_the_overrides(tiny_model, tmp_path):
    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"))
    misspelt = "train.setps=3 (overrides): 'train' has no field 'setps'; did you mean 'steps'?"
    assert refused(proxima.train, tree, {"train.setps": 3}) == [misspelt]
    assert refused(proxima.train, tree, ["train.steps=0"]) == ["train.steps=0 (overrides): must be >= 1"]
    assert "must be a list of 'key=value' texts, or a mapping" in refused(proxima.train, tree, "train.steps=0")[0]
    assert "resume and --overwrite exclude" in refused(proxima.train, tree, resume=True, overwrite=True)[0]
    model, rate = tiny_model("llama"), {"train.optimizer.lr": 1}
    assert "a recipe or --task must name the questions" in refused(proxima.evaluate, model)[0]
    assert "lr: --task has its own questions" in refused(proxima.evaluate, model, task="gsm8k", overrides=rate)[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_fails_raises(tiny_model, tmp_path):
    how = {"runtime__max_unscored_steps": 1, "runtime__reward_trial": "off"}
    broken = recipe(tiny_model("llama"), folder=str(tmp_path / "run"), **how)
    with pytest.raises(proxima.RunEnded, match="no completion of the last 1 steps has a score"):
        proxima.train(broken, {"reward": [Even(fail_on=1)]}, quiet=True)
    assert proxima.load_run(tmp_path / "run").status == "failed"


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint_and_a_resume_ends_as_an_unbroken_run(tiny_model, tmp_path, run, monkeypatch):
    from tests.runtime import tiny_run
    from tests.runtime.tiny_run import assert_same, traces

    def interrupt(prompt, completion):
        if (prompt.uid, completion.sample) == (4, 0):  # of the second step
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tiny_run, "HOOK", interrupt)
    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"), train__steps=2)
    told = r"stopped after step 1 with a checkpoint; proxima.train\(.*resume=True"
    with pytest.raises(KeyboardInterrupt, match=told):
        proxima.train(tree, quiet=True)
    stopped = proxima.load_run(tmp_path / "run")
    assert stopped.status == "stopped" and list(stopped.metrics.index) == [1]
    monkeypatch.setattr(tiny_run, "HOOK", None)
    again = proxima.train(tmp_path / "run", resume=True, quiet=True)
    assert again == stopped and again.status == "done"
    assert_same(traces(again.folder), traces(run.folder))


@pytest.mark.slow
def test_specs_classes_and_functions_in_recipes(tiny_model, tmp_path, monkeypatch):
    module = "def score(prompt, completion):\n    return len(completion.text) / 10\n"
    (tmp_path / "my_reward_of_this_test.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    from my_reward_of_this_test import score

    tree = recipe(tiny_model("llama"), folder=str(tmp_path / "run"), train__steps=1, reward=score)
    run = proxima.train(tree, {"algorithm.surrogate": Cppo(delta=0.125)}, quiet=True)
    surrogate = run.config["algorithm"]["surrogate"]
    assert (surrogate["kind"], surrogate["delta"], surrogate["w_min"]) == ("cppo", 0.125, 0.8)
    (reward,) = run.config["reward"]
    assert (reward["kind"], reward["path"]) == ("function", "my_reward_of_this_test:score")
    rollouts = run.rollouts(columns=["text", "reward"])
    assert list(rollouts["reward"]) == [len(text) / 10 for text in rollouts["text"]]
    again = recipe(tiny_model("llama"), folder=str(tmp_path / "class"), train__steps=1)
    result = proxima.train(again, {"reward": [{"kind": Even, "weight": 2}], "eval.every": 0}, quiet=True)
    assert result.config["reward"][0].items() >= {"kind": "tests.runtime.tiny_run:Even", "weight": 2}.items()


def test_what_only_the_notebook_knows_is_refused(tmp_path, capsys):
    """Worker processes and a resume import it again."""
    script = """
        import proxima
        def score(prompt, completion):
            return 1.0
        function = {"kind": "function", "path": lambda p, c: 1.0}
        for overrides in ({"reward": score}, {"reward": function}, {"seed": object()}):
            try:
                proxima.train("anything.yaml", overrides)
            except proxima.UserError as error:
                print(error)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "reward: score is defined in the notebook, script or function that is running, where worker"
    )
    assert "%%writefile my_code.py" in first and second.startswith("path: <lambda> is defined in")
    assert third.startswith("seed: a object can't stand in a recipe; give a number")
