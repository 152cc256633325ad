"""Runs of DPO: resumed to the bit, with reference log-probs that are computed once, and what they refuse."""

import os
import shutil
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import proxima
from proxima.config.resolution import resolve
from proxima.config.sections.preference import PreferenceConfig
from proxima.data import UserError
from proxima.training.offline import preference_method
from tests.campaigns import campaign
from tests.prepare.published import write_jsonl
from tests.runtime.tiny_run import Watcher, evals_of, go, steps_of, timeless


@pytest.fixture
def tree(runs):
    return partial(runs.tree, "dpo")


@pytest.mark.slow
def test_a_run_learns_what_is_preferred(runs):
    folder = runs.finished("dpo")
    steps, evals = steps_of(folder), evals_of(folder)
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)  # the policy is the reference
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["rewards/margins"] > 0.05 and steps[-1]["loss"] < 0.68
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"}
    assert names <= steps[0].keys()
    before, after = evals[0], evals[-1]
    assert (before["accuracy"], before["rewards/margins"]) == (0.5, 0.0)  # nothing but ties, half right
    assert before["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert after["accuracy"] > 0.5 and after["rewards/margins"] > 0 and after["loss"] < before["loss"]
    assert after["accuracy/low"] <= after["accuracy"] <= after["accuracy/high"]
    assert (after["answers"], after["questions"], before["correct"]) == (6, 3, 0)
    assert after["correct"] == round(6 * after["accuracy"])
    assert 0 <= before["log_prob_accuracy"] <= 1 and before["logps/chosen"] < 0


@pytest.mark.slow
def test_the_reference_is_computed_once_and_a_damaged_file_again(tree, tmp_path, monkeypatch):
    computed = []
    compute = preference_method.PreferenceMethod._reference

    def counted(self, trajectories, *others):
        computed.append(len(trajectories))
        return compute(self, trajectories, *others)

    monkeypatch.setattr(preference_method.PreferenceMethod, "_reference", counted)
    cache = tmp_path / "cache"

    def losses(folder, **changes):
        short = {"train__steps": 2, "eval__after": False} | changes
        go(tmp_path / folder, tree(preference__cache=str(cache), **short))
        return [timeless(r) for r in steps_of(tmp_path / folder)]

    first = losses("first")
    assert computed == [16, 12] and len(list(cache.iterdir())) == 2
    assert losses("second") == first and computed == [16, 12]  # reused
    file = max(cache.iterdir(), key=lambda f: f.stat().st_size)
    save_file({"log_prob": load_file(file)["log_prob"] + 1}, file)
    assert losses("third") == first and computed == [16, 12, 16]  # checked on reading
    losses("other", preference__loss=[{"kind": "hinge"}])
    assert computed == [16, 12, 16]  # another loss, the same reference
    losses("fewer", train__steps=1)
    assert computed == [16, 12, 16, 8]  # of the rows that the run comes to
    shutil.rmtree(cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preference",
    [{"loss": ["ipo", "sft"], "weights": [1.0, 0.2]}, {"loss": [{"kind": "sigmoid"}], "reference": "none"}],
)
def test_other_losses_and_conventions(preference, tree, tmp_path):
    small = {"train__steps": 2, "train__tokens_per_micro_batch": 60}
    go(tmp_path / "run", tree(preference=preference | {"cache": None}, **small))
    steps, evals = steps_of(tmp_path / "run"), evals_of(tmp_path / "run")
    assert all(np.isfinite(r["loss"]) for r in steps) and steps[-1]["grad_norm"] > 0
    assert evals[-1]["rewards/margins"] > evals[0]["rewards/margins"]
    if preference.get("reference") == "none":
        assert evals[0]["rewards/chosen"] == pytest.approx(0.1 * evals[0]["logps/chosen"], rel=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", {"kind": "sigmoid"}])
def test_one_loss_needs_no_list(loss, tree):
    """As in `reward: number`, in a section that no preset lies under."""
    single, listed = (resolve(tree(preference={"loss": x}), root=PreferenceConfig) for x in (loss, [loss]))
    assert single.config.preference == listed.config.preference and len(single.config.preference.loss) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "has_kl"), [("kto", True), ("kto without an anchor", False)])
def test_kto_on_labeled_completions(name, has_kl, runs):
    folder = runs.finished(name)
    steps, evals = steps_of(folder), evals_of(folder)
    assert ("kl" in steps[0]) is has_kl
    assert (evals[0]["accuracy"], evals[0]["accuracy/low"], evals[0]["accuracy/high"]) == (0.5, 0.5, 0.5)
    assert evals[-1]["rewards/chosen"] - evals[-1]["rewards/rejected"] > 0


@pytest.mark.slow
def test_the_reference_of_an_adapter_is_the_base(runs):
    assert steps_of(runs.finished("dpo of an adapter"))[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_kto_without_another_prompt_is_refused(tree, tmp_path):
    rows = [{"question": "1?", "completion": text, "label": text == "a"} for text in "ab"]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="row 0: no row with another .*, or set preference.loss.0.anchor=zero"):
        go(tmp_path / "run", tree(preference__loss=["kto"], task__path=str(file)))


@pytest.mark.slow
def test_the_partner_of_a_row_is_the_next_in_the_data_in_any_run(tree, tmp_path):
    """Two steps draw four of the ten rows; a longer run trains these with the same partners, most of which are drawn
    later with this seed."""
    changes = {"preference__loss": ["kto"], "train__schedule": "constant", "train__examples_per_step": 2}
    changes |= {"eval__task": None, "eval__every": 0, "seed": 9}
    go(tmp_path / "short", tree(**changes, train__steps=2))
    go(tmp_path / "long", tree(**changes, train__steps=5))
    short, long = (steps_of(tmp_path / name)[:2] for name in ("short", "long"))
    assert [r["kl"] for r in short] == pytest.approx([r["kl"] for r in long], rel=1e-4, abs=1e-6)
    assert [r["loss"] for r in short] == pytest.approx([r["loss"] for r in long], rel=1e-5)
    assert abs(short[1]["kl"]) > 1e-4


def test_an_impossible_cache_is_refused_before_the_reference_is_run(tree, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="preference.cache='.*file/cache' can't be written: Not a directory; name"):
        go(tmp_path / "run", tree(preference__cache=str(tmp_path / "file" / "cache")))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_held_out_rows_of_kto_need_no_other_prompt(tree, tmp_path):
    """The anchor is of the loss alone. One row has no accuracy, which is said, and is no ground to keep a best one."""
    watcher, settings = Watcher(), {"preference__loss": ["kto"], "eval__limit": 1}
    assert go(tmp_path / "run", tree(**settings), observer=watcher).status == "done"
    why = "all 1 held-out completions are good: an accuracy needs bad ones too"
    assert f"{why}; raise eval.limit, or name other rows in eval.task" in watcher.warnings
    said = f"checkpoint.keep_best=[Tt]rue.* has no metric to compare checkpoints by: {why}"
    with pytest.raises(UserError, match=said):
        go(tmp_path / "best", tree(**settings, checkpoint__keep_best=True))
    assert not (tmp_path / "best").exists()


@pytest.mark.slow
def test_a_model_that_is_changed_in_place_has_another_reference(tree, tiny_model, tmp_path):
    """In the same process, with the size and the time that the file had."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    changes = {"model__path": str(model), "preference__cache": str(tmp_path / "cache"), "train__steps": 1}
    go(tmp_path / "first", tree(**changes))
    file = model / "model.safetensors"
    before = file.stat()
    save_file({name: -value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    go(tmp_path / "second", tree(**changes))
    step, *_ = steps_of(tmp_path / "second")
    assert abs(step["rewards/chosen"]) < 1e-4 and len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "sigmoid",
        *campaign("tests/runtime/offline/test_dpo_run.py::test_before_the_first_step_no_item_has_a_reward", ["kto"]),
    ],
)
def test_before_the_first_step_no_item_has_a_reward(loss, tree, tmp_path):
    """Reference and policy run the same forward passes: rounding makes no accuracy, whatever run filled the cache."""
    sides = {"chosen": "right ", "rejected": "wrong "}
    rows = [
        {"question": f"question {a // 2} " * (a % 4 + 1), "completion": "z" * (a + 1), "label": a % 2}
        | {name: text * ((a + len(name)) % 7 + 1) for name, text in sides.items()}
        for a in range(50)
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    for budget, chunk in ((2000, 512), (400, 3)):
        changes = {"task__path": str(file), "eval__task__path": str(file), "train__tokens_per_micro_batch": budget}
        changes["model__log_prob_chunk"] = chunk
        folder = tmp_path / f"{budget}-{chunk}"
        go(folder, tree(preference__loss=[loss], train__steps=1, eval__after=False, **changes))
        (before,) = evals_of(folder)
        assert before["accuracy"] == 0.5 and before["rewards/chosen"] == before["rewards/rejected"] == 0


def test_from_python(tree, tmp_path):
    run = proxima.train({**tree(train__steps=1), "folder": str(tmp_path / "run")}, quiet=True)
    assert "rewards/margins" in run.metrics.columns
    with pytest.raises(UserError, match="evaluations generate no answers; .evaluations has their figures"):
        run.answers()
