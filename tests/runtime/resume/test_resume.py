"""What a resume takes up, repeats, restores, warns of and refuses; tests/runtime/test_resumed_runs.py compares with
unbroken runs."""

import os
import re
import shutil
import signal

import pytest
import yaml

from proxima.config.resolution import resolve
from proxima.data import FieldErrors, UserError
from proxima.runtime.launch.run import train
from proxima.runtime.resume.changes import check_resume
from proxima.runtime.resume.rewind import RestoredJournal
from proxima.runtime.state.folder import RunFolder
from tests.runtime.interruptions import press, start_and_hold
from tests.runtime.runs import LORA
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, saved_in, steps_of, summary_of, traces

STEPS = 4  # of the run called "policy"
SHORT = {"train__steps": 1, "eval__every": 0, "eval__before": False, "eval__after": False}
TWO_STEPS = SHORT | {"train__steps": 2}


@pytest.fixture(scope="module")
def one_step(runs, tmp_path_factory):
    """The folder of a run of one step; read-only by agreement."""
    folder = tmp_path_factory.mktemp("one-step") / "run"
    runs.go("policy", folder, **SHORT)
    return folder


@pytest.fixture
def copy(one_step, tmp_path):
    return shutil.copytree(one_step, tmp_path / "run")


def at_first_score_of(step, act, monkeypatch):
    """Act once, when the first completion of a step is scored: others of it are still being generated."""
    acted = []

    def hook(prompt, completion):
        if not acted and 4 * (step - 1) <= prompt.uid < 4 * step:
            acted.append(1)
            act()

    monkeypatch.setattr("tests.runtime.tiny_run.HOOK", hook)


def test_what_a_kill_between_writing_and_deleting_left_goes(runs, tmp_path):
    folder = shutil.copytree(runs.finished("policy"), tmp_path / "run") / "checkpoints"
    (folder / ".000001.old.part").mkdir()
    runs.go("policy", tmp_path / "run", resume=True, checkpoint__keep_last=1)
    assert [place.name for place in folder.iterdir()] == ["000004"]


@pytest.mark.slow
def test_before_the_first_step_no_checkpoint_is_promised(runs, tmp_path, monkeypatch):
    for step, promise in ((1, "there is a checkpoint only if step 1 can end"), (2, "a checkpoint is written first")):
        watcher = Watcher()
        at_first_score_of(step, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
        summary = runs.go("policy", tmp_path / str(step), observer=watcher, **TWO_STEPS, checkpoint__every=0)
        assert (summary.status, summary.steps) == ("stopped", step - 1)
        (said,) = [text for text in watcher.warnings if text.startswith("stopping: ")]
        assert said.startswith(f"stopping: {promise}; send SIGTERM again to quit now")


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_with_a_checkpoint_unless_nohup(ignored, runs, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        at_first_score_of(2, lambda: os.kill(os.getpid(), signal.SIGHUP), monkeypatch)
        summary = runs.go("policy", tmp_path / "run", **TWO_STEPS, checkpoint__every=0)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    saved = [checkpoint.step for checkpoint in saved_in(tmp_path / "run")]
    assert (summary.status, saved) == (("done", [2]) if ignored else ("stopped", [1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy", "sft"])
def test_resume_of_a_finished_run_changes_nothing_and_loads_no_model(name, runs, tmp_path, monkeypatch):
    folder = shutil.copytree(runs.finished(name), tmp_path / "run")
    watcher = Watcher()
    monkeypatch.setattr("proxima.runtime.launch.run.load_models", lambda *_: pytest.fail("a model was loaded"))
    assert runs.go(name, folder, resume=True, observer=watcher).steps == STEPS
    before, after = summary_of(runs.finished(name)), summary_of(folder)
    assert after.pop("peak_memory_bytes") >= before.pop("peak_memory_bytes")
    assert after == before | {"folder": str(folder)}
    assert watcher.records == []
    assert_same(traces(folder), runs.traces(name))


@pytest.mark.slow
def test_a_finished_run_whose_summary_a_kill_prevented_has_one_again(runs, tmp_path):
    folder = shutil.copytree(runs.finished("policy"), tmp_path / "run")
    (folder / "summary.json").unlink()
    runs.go("policy", folder, resume=True)
    assert summary_of(folder)["eval"] == summary_of(runs.finished("policy"))["eval"]


@pytest.mark.slow
def test_an_evaluation_that_a_finished_run_lacks_is_made(copy, runs):
    assert not summary_of(copy)["eval"]
    runs.go("policy", copy, resume=True, **SHORT | {"eval__every": 1})
    assert summary_of(copy)["eval"]


def refusal(runs, name, changes):
    """The lines that refuse a resume of a run with changes."""
    with RestoredJournal(":memory:") as journal:
        check_resume(journal, resolve(runs.tree(name), root=None).config)
        with pytest.raises(FieldErrors, match="differs from .*; resume with that value, or start another") as caught:
            check_resume(journal, resolve(runs.tree(name, **changes), root=None).config)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("policy", {"algorithm": {"preset": "cppo", "surrogate": {"delta": 0.3}}}, "algorithm.surrogate.delta=0.3"),
        ("policy", {"reward": [{"kind": "length"}]}, "reward="),
        ("policy", {"engine__dtype": "bfloat16"}, "engine.dtype='bfloat16'"),
        ("policy", {"engine__weights": "int8"}, "engine.weights='int8'"),
        ("policy", {"runtime__max_lag": 5}, "runtime.max_lag=5 differs from 1, with which the run in "),
        ("adapter", {"model__lora": LORA | {"rank": 8}}, "model.lora.rank=8"),
        ("adapter", {"model__lora": None}, "model.lora"),
        ("sft", {"sft__loss_on": "all_turns"}, "sft.loss_on='all_turns'"),
    ],
)
def test_another_run_is_refused(name, changes, said, runs):
    lines = refusal(runs, name, changes)
    assert lines[0].startswith(said) and "".join(lines).count("; resume") == 1
    assert len({line.partition(": the run")[0] for line in lines}) == len(lines)


@pytest.mark.slow
def test_another_algorithm_is_one_line_that_says_so(runs):
    algorithm, seed = refusal(runs, "policy", {"algorithm": {"preset": "grpo"}, "seed": 4})
    assert algorithm.startswith("algorithm.surrogate.kind='ppo_clip' differs from 'cppo', with which the run in ")
    assert re.search(r"it is another algorithm, and \d+ more fields differ \(.*, …\); resume with", algorithm)
    assert seed.startswith("seed=4 differs from 3")


@pytest.mark.slow
def test_a_refusal_lists_all_differences_and_says_which_can_be_accepted(one_step, runs):
    other = {"train__optimizer__lr": 1e-4, "sampling__temperature": 0.5, "seed": 4, "train__completions_per_prompt": 2}
    resolved = resolve({**runs.tree("policy", train__steps=1, eval__every=0, **other), "folder": str(one_step)})
    before = RunFolder(one_step).metrics.read_bytes()
    with pytest.raises(ValueError, match="differs") as caught, resolved.locating():
        train(resolved.config, resolved=resolved, resume=True)
    lines = str(caught.value).splitlines()
    assert sorted(line.split("=")[0] for line in lines) == sorted(key.replace("__", ".") for key in other)
    acceptable = [line for line in lines if line.startswith(("train.optimizer", "sampling"))]
    assert [line for line in lines if "--accept-changes" in line] == acceptable[-1:]  # a shared remedy is said once
    assert "seed=4" in "".join(lines) and "the order of the data and all draws come from it" in "".join(lines)
    with pytest.raises(ValueError, match="differs") as caught:
        train(resolved.config, resolved=resolved, resume=True, accept_changes=True)
    assert {error.field for error in caught.value.errors} == {"seed", "train.completions_per_prompt"}
    assert RunFolder(one_step).metrics.read_bytes() == before


@pytest.mark.slow
def test_an_accepted_change_is_reported_from_then_on(copy, runs):
    changes = {"algorithm": {"preset": "grpo"}, "train__optimizer__lr": 1e-4, "reward": [{"kind": "length"}]}
    other = resolve({**runs.tree("policy", **TWO_STEPS, **changes), "folder": str(copy)})
    watcher = Watcher()
    summary = train(other.config, resolved=other, observer=watcher, resume=True, accept_changes=True)
    assert (summary.status, summary.steps, summary.algorithm) == ("done", 2, "grpo")
    warnings = [text for text in watcher.warnings if text.startswith("resumed after step 1 with other settings: ")]
    assert len(warnings) == 1 and "train.optimizer.lr=0.0001 (was 0.003)" in warnings[0]
    (entry,) = summary_of(copy)["changes"]
    assert entry["step"] == 1
    assert {"field": "train.optimizer.lr", "before": 3e-3, "now": 1e-4} in entry["changes"]
    assert "delta: " not in RunFolder(copy).config.read_text()
    again = Watcher()
    train(other.config, resolved=other, observer=again, resume=True)  # it is this run now
    assert warnings[0] in again.warnings and len(summary_of(copy)["changes"]) == 1


@pytest.mark.slow
def test_resume_with_another_model_is_refused_before_weights_are_loaded(one_step, runs, tiny_model, monkeypatch):
    monkeypatch.setattr("proxima.model.model_source.load", lambda *a, **k: pytest.fail("weights were loaded"))
    said = r"^model.path=.*qwen2-0' differs from .*llama-0', with which the run in .* was started"
    with pytest.raises(ValueError, match=said):
        runs.go("policy", one_step, resume=True, model__path=str(tiny_model("qwen2")), **SHORT)


@pytest.mark.slow
def test_another_spelling_of_the_models_path_is_the_same_model(copy, runs, tiny_model, monkeypatch):
    monkeypatch.chdir(tiny_model("llama").parent)
    tree = runs.tree("policy", **TWO_STEPS, model__path="llama-0")
    assert go(copy, tree, resume=True).steps == 2


@pytest.mark.slow
def test_what_only_changes_how_long_or_how_watched_may_differ(copy, runs):
    """With a learning rate that falls towards the end, another end is pointed out."""
    watcher = Watcher()
    free = {
        "train__steps": 2,
        "eval__limit": 3,
        "checkpoint__keep_last": 1,
        "runtime__reward_timeout": 3.0,
        "engine__prefill_tokens": 64,
    }
    assert runs.go("policy", copy, resume=True, observer=watcher, **free).steps == 2
    said = "train.steps=2, and the run was started with 1: from here on the cosine learning rate falls towards step 2"
    assert [text.startswith(said) for text in watcher.warnings if "train.steps" in text] == [True]


@pytest.mark.slow
def test_an_infinite_field_can_be_resumed(runs, tmp_path):
    algorithm = {"preset": "drpo", "surrogate": {"epsilon": float("inf")}}
    config = resolve(runs.tree("policy", algorithm=algorithm)).config
    for _ in range(2):
        with RestoredJournal(tmp_path / "run.sqlite") as journal:
            assert check_resume(journal, config) == []


@pytest.mark.slow
def test_kill_9_in_a_real_process(runs, tmp_path):
    held = runs.tree("policy", reward=[{"kind": "tests.runtime.tiny_run:Even", "hold": str(tmp_path / "hold")}])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(held))
    folder = tmp_path / "run"
    process = start_and_hold(folder, 9, "--resume")  # a prompt of the third step
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (folder / "summary.json").exists()
    assert steps_of(folder)[-1]["step"] == 2
    (tmp_path / "hold").unlink()
    assert go(folder, held, resume=True).status == "done"
    assert_same(traces(folder), runs.traces("policy"))


def of_two_steps(act, at):
    """How a run of two steps is begun in which something happens at a step, before its checkpoint."""
    watcher = Watcher(lambda event, *facts: act() if event == "step" and facts[0]["step"] == at else None)
    return TWO_STEPS | {"observer": watcher}


@pytest.mark.slow
def test_a_folder_moved_during_a_run_is_reported_and_resumes_there(runs, tmp_path):
    moving = of_two_steps(lambda: os.rename(tmp_path / "run", tmp_path / "moved"), at=2)
    with pytest.raises(UserError, match="run was moved or deleted .*; resume it where it is now .* or start it again"):
        runs.go("policy", tmp_path / "run", **moving)
    assert not (tmp_path / "run").exists()
    watcher = Watcher()
    assert runs.go("policy", tmp_path / "moved", resume=True, observer=watcher, **TWO_STEPS).status == "done"
    assert [record["step"] for record in watcher.records] == [2]


@pytest.mark.slow
def test_rollouts_that_are_deleted_under_a_run_cost_nothing_else(runs, tmp_path):
    rollouts = tmp_path / "run" / "rollouts"
    deleting = of_two_steps(lambda: shutil.rmtree(rollouts), at=1)
    assert runs.go("policy", tmp_path / "run", **deleting).status == "done"
    assert os.listdir(rollouts) == ["000002.parquet"]


@pytest.mark.slow
def test_a_journal_that_is_deleted_under_a_run_is_said(runs, tmp_path):
    deleting = of_two_steps((tmp_path / "run" / "run.sqlite").unlink, at=1)
    with pytest.raises(UserError, match="run.sqlite was deleted during the run; resume the run"):
        runs.go("policy", tmp_path / "run", **deleting)
    assert runs.go("policy", tmp_path / "run", resume=True, **TWO_STEPS).status == "done"
    assert [r["step"] for r in steps_of(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(runs, tmp_path, monkeypatch):
    """While the first one's checkpoint is being written: half of it is nobody's checkpoint, and the run can be
    resumed."""
    settings = TWO_STEPS | {"checkpoint__every": 0}
    at_first_score_of(2, press, monkeypatch)

    def again(event, *facts):
        if event == "progress" and facts[0] == "checkpoint":
            press()

    with pytest.raises(KeyboardInterrupt):
        runs.go("policy", tmp_path / "run", observer=Watcher(again), **settings)
    assert saved_in(tmp_path / "run") == []
    watcher = Watcher()
    assert runs.go("policy", tmp_path / "run", observer=watcher, resume=True, **settings).status == "done"
    said = "resuming from the start, because no checkpoint exists: 1 finished step is repeated"
    assert watcher.warnings[0].startswith(said)
    assert [r["step"] for r in steps_of(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_more_steps_than_at_first(tiny_model, tmp_path):
    """With a constant learning rate the longer run is the one that asked for them at once."""
    watcher = Watcher()
    for steps in (1, 2):
        tree = recipe(tiny_model("llama"), **SHORT | {"train__steps": steps, "train__schedule": "constant"})
        go(tmp_path / "run", tree, resume=True, observer=watcher)
    assert not any("train.steps" in text for text in watcher.warnings)
    go(tmp_path / "long", tree)
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "long"))
