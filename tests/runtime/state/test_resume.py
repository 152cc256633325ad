"""Interrupted and resumed: weights, moments, metrics, samples and journal as if nothing had happened."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from proxima.config import resolve
from proxima.data import UserError
from proxima.runtime.launch.run import train
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.train.checkpoint import checkpoints
from tests.runtime.interruptions import PLACES, STEPS, Died, die_at, start, start_and_hold, stop_at
from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, summary_of, traces

SETTINGS = {"train__steps": STEPS, "train__updates_per_step": 2, "train__epochs_per_step": 2}


def tree(model, **changes):
    return recipe(model, **(SETTINGS | changes))


@pytest.fixture(scope="module")
def unbroken_run(tiny_model, tmp_path_factory):
    """The folder of a finished run; read-only by agreement."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    go(folder, tree(tiny_model("llama")))
    return folder


@pytest.fixture(scope="module")
def unbroken(unbroken_run):
    return traces(unbroken_run)


@pytest.fixture(scope="module")
def one_step(tiny_model, tmp_path_factory):
    """The folder of a run of one step; read-only by agreement."""
    folder = tmp_path_factory.mktemp("one-step") / "run"
    go(folder, tree(tiny_model("llama"), train__steps=1, eval__every=0, eval__before=False, eval__after=False))
    return folder


def matrix(shift):
    """Every place with every interval of checkpoints; fast tests take each place once."""
    return [
        pytest.param(place, every, marks=[] if (i + shift) % 3 == every else [pytest.mark.slow])
        for i, place in enumerate(PLACES)
        for every in (0, 1, 2)
    ]


def at_first_score_of(step, act, monkeypatch):
    """Act once, when the first completion of a step is scored: others of it are still being generated."""
    acted = []

    def hook(prompt, completion):
        if not acted and 4 * (step - 1) <= prompt.uid < 4 * step:
            acted.append(1)
            act()

    monkeypatch.setattr("tests.runtime.tiny_run.HOOK", hook)


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("place", "every"), matrix(0))
def test_ctrl_c_then_resume_is_as_if_unbroken(place, every, unbroken, tiny_model, tmp_path):
    config = tree(tiny_model("llama"), checkpoint__every=every)
    event, matches = PLACES[place]
    summary = go(tmp_path / "run", config, observer=stop_at(event, matches))
    assert summary.status == "stopped"
    run = RunFolder(tmp_path / "run")
    if summary.steps:
        assert checkpoints(run.checkpoints)[-1].step == summary.steps
    again = go(tmp_path / "run", config, resume=True)
    assert (again.status, again.steps) == ("done", STEPS)
    assert_same(traces(tmp_path / "run"), unbroken)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_that_is_stopped_midway_is_given_up_whole(step, unbroken, tiny_model, tmp_path, monkeypatch):
    """And its prompts are drawn again: the checkpoint's cursor is behind the last finished step."""
    config = tree(tiny_model("llama"), checkpoint__every=0)
    at_first_score_of(step, press, monkeypatch)
    summary = go(tmp_path / "run", config)
    run = RunFolder(tmp_path / "run")
    assert (summary.status, summary.steps) == ("stopped", step - 1)
    assert [(c.step, c.facts["cursor"]["cursor"]["drawn"]) for c in checkpoints(run.checkpoints)] == [
        (step - 1, 4 * (step - 1))
    ][: step - 1]
    with Journal(run.journal) as journal:
        counts = journal.counts()
        assert counts.get("consumed", 0) == 4 * (step - 1) and sum(counts.values()) == 4 * step
    go(tmp_path / "run", config, resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)


@pytest.mark.parametrize(("place", "every"), matrix(1))
def test_death_then_resume_is_as_if_unbroken(place, every, unbroken, tiny_model, tmp_path):
    """No checkpoint is written on the way out: the run goes on from the last one, or from the beginning."""
    config = tree(tiny_model("llama"), checkpoint__every=every)
    with pytest.raises(Died):
        go(tmp_path / "run", config, observer=die_at(*PLACES[place]))
    assert go(tmp_path / "run", config, resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), unbroken)


def test_many_interruptions(unbroken, tiny_model, tmp_path):
    config = tree(tiny_model("llama"))
    summary = go(tmp_path / "run", config, observer=stop_at(*PLACES["while evaluating before"]))
    seen = []
    for _ in range(12):
        if summary.status == "done":
            break
        seen.append(summary.steps)
        summary = go(tmp_path / "run", config, resume=True, observer=stop_at("step", lambda record, sample: True))
    assert summary.status == "done" and seen == sorted(seen) and len(seen) >= 4
    assert_same(traces(tmp_path / "run"), unbroken)


def test_resume_of_a_finished_run_changes_nothing(unbroken_run, unbroken, tiny_model, tmp_path):
    config = tree(tiny_model("llama"))
    shutil.copytree(unbroken_run, tmp_path / "run")
    watcher = Watcher()
    summary = go(tmp_path / "run", config, resume=True, observer=watcher)
    assert (summary.status, summary.steps) == ("done", STEPS) and not watcher.records
    assert_same(traces(tmp_path / "run"), unbroken)


def test_resume_without_a_run_begins_one(unbroken, tiny_model, tmp_path):
    go(tmp_path / "run", tree(tiny_model("llama")), resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)


def test_more_steps_than_at_first(tiny_model, tmp_path):
    """The number of steps may change; with a constant learning rate the longer run is the one that asked for them at
    once."""
    settings = {"train__schedule": "constant", "eval__after": False, "eval__every": 0}
    go(tmp_path / "long", tree(tiny_model("llama"), **settings))
    go(tmp_path / "run", tree(tiny_model("llama"), **settings, train__steps=2))
    assert go(tmp_path / "run", tree(tiny_model("llama"), **settings), resume=True).steps == STEPS
    assert_same(traces(tmp_path / "run"), traces(tmp_path / "long"))


def test_a_torn_checkpoint_is_passed_over(unbroken, tiny_model, tmp_path):
    config = tree(tiny_model("llama"))
    with pytest.raises(Died):
        go(tmp_path / "run", config, observer=die_at(*PLACES["after step 3"]))
    run = RunFolder(tmp_path / "run")
    shutil.copytree(run.checkpoint(2), run.checkpoints / ".000003.part")
    (run.checkpoint(2) / "state.json").write_text('{"format": 1, ')
    with run.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 4, "ti')
    go(tmp_path / "run", config, resume=True)
    resumed = traces(tmp_path / "run")
    assert_same(resumed, unbroken)
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize("content", ['{"format": 1, ', "null", "[]", "{}"])
def test_a_damaged_last_checkpoint_is_written_again(content, unbroken_run, unbroken, tiny_model, tmp_path):
    config = tree(tiny_model("llama"))
    shutil.copytree(unbroken_run, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    (run.checkpoint(STEPS) / "state.json").write_text(content)
    shutil.copytree(run.checkpoint(STEPS - 1), run.checkpoints / "000001 copy")
    config["checkpoint"] = {"every": 1, "keep_last": 0, "keep_best": True}
    go(tmp_path / "run", config, resume=True)
    assert_same(traces(tmp_path / "run"), unbroken)


def test_damaged_weights_without_a_checkpoint_before_are_one_line(tiny_model, tmp_path):
    config = recipe(tiny_model("llama"), train__steps=1)
    go(tmp_path / "run", config)
    next((RunFolder(tmp_path / "run").checkpoint(1) / "model").glob("*.safetensors")).write_bytes(b"torn")
    with pytest.raises(UserError, match="000001: model/model.safetensors is damaged, and no checkpoint before it is"):
        go(tmp_path / "run", config, resume=True)


def test_time_goes_on(tiny_model, tmp_path):
    config = tree(tiny_model("llama"))
    go(tmp_path / "run", config, observer=stop_at(*PLACES["after step 1"]))
    before = RunFolder(tmp_path / "run").elapsed()
    summary = go(tmp_path / "run", config, resume=True)
    times = [r["time"] for r in RunFolder(tmp_path / "run").read_metrics()]
    assert times == sorted(times) and summary.seconds >= times[-1] > before > 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train__optimizer__lr": 1e-4}, "train.optimizer.lr=0.0001"),
        ({"seed": 4}, "seed=4"),
        ({"train__completions_per_prompt": 8}, "train.completions_per_prompt=8"),
        ({"sampling__temperature": 0.5}, "sampling.temperature=0.5"),
        ({"algorithm": {"preset": "cppo", "surrogate": {"delta": 0.3}}}, "algorithm.surrogate.delta=0.3"),
        ({"algorithm": {"preset": "grpo"}}, "algorithm."),
        ({"reward": [{"kind": "length"}]}, "reward="),
        ({"engine__dtype": "bfloat16"}, "engine.dtype='bfloat16'"),
    ],
)
def test_resume_of_another_run_is_refused(changes, field, one_step, tiny_model):
    before = RunFolder(one_step).metrics.read_bytes()
    other = tree(tiny_model("llama"), train__steps=1, eval__every=0, **changes)
    with pytest.raises(
        ValueError, match="differs from .*; resume with that value, or start another run with folder=PATH"
    ) as caught:
        go(one_step, other, resume=True)
    assert str(caught.value).startswith(field)
    lines = str(caught.value).splitlines()
    assert (
        len({line.partition(": the run")[0] for line in lines}) == len(lines)
        and str(caught.value).count("; resume") == 1
    )
    assert RunFolder(one_step).metrics.read_bytes() == before


def test_a_refusal_lists_all_differences_and_says_which_can_be_accepted(one_step, tiny_model):
    other = {"train__optimizer__lr": 1e-4, "sampling__temperature": 0.5, "seed": 4, "train__completions_per_prompt": 2}
    resolved = resolve({**tree(tiny_model("llama"), train__steps=1, eval__every=0, **other), "folder": str(one_step)})
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


def test_an_accepted_change_is_reported_from_then_on(tiny_model, tmp_path):
    folder = tmp_path / "run"
    go(folder, tree(tiny_model("llama"), train__steps=1, eval__every=0))
    changes = {"algorithm": {"preset": "grpo"}, "train__optimizer__lr": 1e-4, "reward": [{"kind": "length"}]}
    other = resolve({**tree(tiny_model("llama"), train__steps=2, eval__every=0, **changes), "folder": str(folder)})
    watcher = Watcher()
    summary = train(other.config, resolved=other, observer=watcher, resume=True, accept_changes=True)
    assert (summary.status, summary.steps, summary.algorithm) == ("done", 2, "grpo")
    warnings = [text for text in watcher.warnings if text.startswith("resumed after step 1 with other settings: ")]
    assert len(warnings) == 1 and "train.optimizer.lr=0.0001 (was 0.003)" in warnings[0]
    (entry,) = summary_of(folder)["changes"]
    assert entry["step"] == 1
    assert {"field": "train.optimizer.lr", "before": 3e-3, "now": 1e-4} in entry["changes"]
    assert "delta: " not in RunFolder(folder).config.read_text()
    again = Watcher()
    train(other.config, resolved=other, observer=again, resume=True)  # it is this run now
    assert warnings[0] in again.warnings and len(summary_of(folder)["changes"]) == 1


def test_resume_with_another_model_is_refused_before_weights_are_loaded(tiny_model, tmp_path, monkeypatch):
    go(tmp_path / "run", tree(tiny_model("llama"), train__steps=1, eval__every=0))
    monkeypatch.setattr("proxima.model.model_source.load", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(
        ValueError, match=r"^model.path=.*qwen2-0' differs from .*llama-0', with which the run in .* was started"
    ):
        go(tmp_path / "run", tree(tiny_model("qwen2"), train__steps=1, eval__every=0), resume=True)


def test_another_spelling_of_the_models_path_is_the_same_model(tiny_model, tmp_path, monkeypatch):
    model = tiny_model("llama")
    go(tmp_path / "run", tree(model, train__steps=1, eval__every=0))
    monkeypatch.chdir(model.parent)
    assert go(tmp_path / "run", tree(model.name, train__steps=2, eval__every=0), resume=True).steps == 2


def test_what_only_changes_how_long_or_how_watched_may_differ(tiny_model, tmp_path):
    go(tmp_path / "run", tree(tiny_model("llama"), train__steps=1))
    free = {
        "train__steps": 2,
        "eval__limit": 3,
        "checkpoint__keep_last": 1,
        "runtime__reward_timeout": 3.0,
        "engine__prefill_tokens": 64,
    }
    assert go(tmp_path / "run", tree(tiny_model("llama"), **free), resume=True).steps == 2


def test_an_infinite_field_can_be_resumed(tiny_model, tmp_path):
    config = tree(
        tiny_model("llama"),
        train__steps=1,
        eval__every=0,
        algorithm={"preset": "drpo", "surrogate": {"epsilon": float("inf")}},
    )
    go(tmp_path / "run", config)
    config["train"]["steps"] = 2
    assert go(tmp_path / "run", config, resume=True).steps == 2


# ---- real processes --------------------------------------------------------------------------------------------------


def held_tree(model, folder: Path):
    """A recipe whose rewards wait where the file `hold` says; the folder it is in."""
    return tree(model, reward=[{"kind": "tests.runtime.tiny_run:Even", "hold": str(folder / "hold")}])


def test_kill_9_in_a_real_process(unbroken, tiny_model, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(held_tree(tiny_model("llama"), tmp_path)))
    folder = tmp_path / "run"
    for step in (2, 3):
        process = start_and_hold(folder, 4 * (step - 1) + 1, "--resume")
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL and not (folder / "summary.json").exists()
        assert [r["step"] for r in RunFolder(folder).read_metrics() if r["kind"] == "train"][-1] == step - 1
    (tmp_path / "hold").unlink()
    process = start(folder, "--resume")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert summary_of(folder)["status"] == "done"
    assert_same(traces(folder), unbroken)


def test_ctrl_c_in_a_real_process(unbroken, tiny_model, tmp_path):
    config = held_tree(tiny_model("llama"), tmp_path)
    config["checkpoint"]["every"] = 0
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    process = start_and_hold(folder, 9)
    process.send_signal(signal.SIGINT)
    (tmp_path / "hold").unlink()
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = summary_of(folder)
    assert summary["status"] == "stopped" and [c.step for c in checkpoints(folder / "checkpoints")] == [
        summary["steps"]
    ]
    go(folder, config, resume=True)
    assert_same(traces(folder), unbroken)


def test_a_folder_in_use_is_refused(tiny_model, tmp_path):
    held = RunFolder(tmp_path / "run")
    held.begin()
    with pytest.raises(ValueError, match="is in use by another process"):
        go(tmp_path / "run", tree(tiny_model("llama")), resume=True)
    held.release()


def test_a_folder_that_is_deleted_under_a_run_is_said(tiny_model, tmp_path):
    watcher = Watcher(lambda event, *facts: shutil.rmtree(tmp_path / "run") if event == "step" else None)
    with pytest.raises(
        UserError, match="run was moved or deleted during the run; resume it where it is now .* or start it again"
    ):
        go(tmp_path / "run", tree(tiny_model("llama")), observer=watcher)


def test_a_folder_that_is_moved_under_a_run_is_said_and_resumes_where_it_is(unbroken, tiny_model, tmp_path):
    def move(event, *facts):
        if event == "step" and facts[0]["step"] == 2:
            (tmp_path / "run").rename(tmp_path / "moved")

    config = tree(tiny_model("llama"), checkpoint__every=1)
    with pytest.raises(UserError, match="run was moved or deleted during the run; resume it where it is now"):
        go(tmp_path / "run", config, observer=Watcher(move))
    assert not (tmp_path / "run").exists()
    assert go(tmp_path / "moved", config, resume=True).status == "done"
    assert_same(traces(tmp_path / "moved"), unbroken)


def test_rollouts_that_are_deleted_under_a_run_cost_nothing_else(tiny_model, tmp_path):
    def delete(event, *facts):
        if event == "step" and facts[0]["step"] == 2:
            shutil.rmtree(tmp_path / "run" / "rollouts")

    assert go(tmp_path / "run", tree(tiny_model("llama")), observer=Watcher(delete)).status == "done"
    assert sorted(file.name for file in (tmp_path / "run" / "rollouts").iterdir()) == [
        "000003.parquet",
        "000004.parquet",
    ]


def test_a_journal_that_is_deleted_under_a_run_is_said(tiny_model, tmp_path):
    journal = tmp_path / "run" / "run.sqlite"
    watcher = Watcher(lambda event, *facts: journal.unlink() if event == "step" and facts[0]["step"] == 2 else None)
    with pytest.raises(UserError, match="run.sqlite was deleted during the run; resume the run"):
        go(tmp_path / "run", tree(tiny_model("llama"), checkpoint__every=1), observer=watcher)
    assert go(tmp_path / "run", tree(tiny_model("llama"), checkpoint__every=1), resume=True).status == "done"
    assert [r["step"] for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "train"] == [1, 2, 3, 4]


def test_a_second_ctrl_c_ends_at_once(unbroken, tiny_model, tmp_path, monkeypatch):
    """While the first one's checkpoint is being written: half of it is nobody's checkpoint, and the run can be
    resumed."""
    config = tree(tiny_model("llama"), checkpoint__every=0)
    at_first_score_of(3, press, monkeypatch)

    def again(event, *facts):
        if event == "progress" and facts[0] == "checkpoint":
            press()

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "run", config, observer=Watcher(again))
    assert checkpoints(RunFolder(tmp_path / "run").checkpoints) == []
    watcher = Watcher()
    assert go(tmp_path / "run", config, observer=watcher, resume=True).status == "done"
    assert watcher.warnings[0].startswith(
        "resuming from the start, because no checkpoint exists: 2 finished steps are repeated"
    )
    assert_same(traces(tmp_path / "run"), unbroken)


def test_another_length_under_a_falling_learning_rate_is_pointed_out(tiny_model, tmp_path):
    watcher = Watcher()
    go(tmp_path / "run", recipe(tiny_model("llama"), train__steps=1), observer=watcher)
    assert not any("train.steps" in text for text in watcher.warnings)
    go(tmp_path / "run", recipe(tiny_model("llama"), train__steps=2), resume=True, observer=watcher)
    (warning,) = [text for text in watcher.warnings if "train.steps" in text]
    assert warning.startswith(
        "train.steps=2, and the run was started with 1: from here on the cosine learning rate falls towards step 2"
    )
    steady = {"train__schedule": "constant"}
    quiet = Watcher()
    go(tmp_path / "steady", recipe(tiny_model("llama"), train__steps=1, **steady), observer=quiet)
    go(tmp_path / "steady", recipe(tiny_model("llama"), train__steps=2, **steady), resume=True, observer=quiet)
    assert not any("train.steps" in text for text in quiet.warnings)
