"""What a run asks of its engine, and what is known of its data and models, before any weights are loaded."""

import json
import shutil

import pytest

from proxima.config.resolution import resolve
from proxima.data.flow import EVAL_UID
from proxima.model.compute_thread import ComputeThread
from proxima.model.load import load
from proxima.model.pretrained import UnloadedModel
from proxima.runtime.launch.learning import make_learner
from proxima.runtime.launch.run_data import load_run_data, rollout_needs
from tests.runtime.tiny_run import recipe


@pytest.fixture
def model(tiny_model):
    return UnloadedModel.read(str(tiny_model("llama")))


def config_of(tiny_model, **changes):
    return resolve(recipe(tiny_model("llama"), **changes)).config


def test_needs_follow_from_the_algorithm(tiny_model, model):
    plain = rollout_needs(config_of(tiny_model), model)
    assert plain.measured == {"untruncated"} and not plain.corrected
    unmeasured = config_of(tiny_model, algorithm__mismatch={"measure": False})
    assert rollout_needs(unmeasured, model).measured == frozenset()
    weighted = {"preset": "cppo", "proximal": "recompute", "correction": [{"kind": "importance"}]}
    assert rollout_needs(config_of(tiny_model, algorithm=weighted), model).corrected
    assert [s.temperature for s in plain.samplings] == [1.0, 0.0]  # held-out questions are answered greedily
    remax = config_of(tiny_model, algorithm={"preset": "cppo", "advantage": "remax"}, eval={"task": None, "every": 0})
    assert [s.temperature for s in rollout_needs(remax, model).samplings] == [1.0, 0.0]  # and so is its baseline


@pytest.mark.slow
def test_held_out_prompts_have_numbers_that_no_training_prompt_has(tiny_model):
    data = load_run_data(config_of(tiny_model, eval__limit=2))
    (held_out,) = data.held_out
    assert [prompt.uid for prompt in held_out.prompts] == [EVAL_UID, EVAL_UID + 1] and len(held_out.rows) == 5
    data.close()


def test_more_prompts_a_step_than_rows_are_said(tiny_model):
    rows = len(load_run_data(config_of(tiny_model)).source.rows)
    for prompts in (rows, rows + 1):
        notes = load_run_data(config_of(tiny_model, train__prompts_per_step=prompts)).notes
        said = [note for note in notes if note.startswith(f"a step has {prompts} prompts, and the task has only")]
        assert len(said) == (prompts > rows)
    pruned = config_of(tiny_model, algorithm="cppo_prune_50", train__prompts_per_step=rows - 1)
    (said,) = [note for note in load_run_data(pruned).notes if "the task has only" in note]
    assert said.startswith(f"a step has {2 * (rows - 1)} prompts, and the task has only {rows} questions")


def test_questions_that_are_trained_on_and_evaluated_are_said(tiny_model, tmp_path):
    lines = [json.dumps({"question": f"What is {i} + 1?", "answer": i + 1}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[:10]))
    whole = {"kind": "jsonl", "path": str(tmp_path / "a.jsonl")}
    some = {"kind": "jsonl", "path": str(tmp_path / "b.jsonl")}
    sources = [{"name": "a", "task": whole | {"held_out": 0.3}}, {"name": "b", "task": whole | {"answer": None}}]
    for task, asked, start in (
        (whole, some, "eval.task: 10 of its 10 questions are trained on too; name other questions"),
        ({"kind": "mix", "tasks": sources}, None, "task: "),
    ):
        evaluation = {} if asked is None else {"eval": {"task": asked}}
        notes = load_run_data(config_of(tiny_model, task=task, **evaluation)).notes
        assert [note for note in notes if note.startswith(start)], notes


def test_the_context_is_at_most_the_models_and_the_vocabulary_its_heads(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"vocab_size": 288}))
    for asked, context in ((None, 256), (64, 64)):
        assert UnloadedModel.read(str(folder), max_length=asked).context == context
    assert UnloadedModel.read(str(folder)).vocabulary == 288


@pytest.mark.slow
def test_epochs_stop_at_the_target_times_its_factor(tiny_model):
    config = config_of(tiny_model, train__target_kl=0.02, train__target_kl_factor=3.0, train__epochs_per_step=2)
    learner = make_learner(config, config.model.source(), load(str(tiny_model("llama"))), ComputeThread(), engines={})
    assert learner.max_epoch_kl == pytest.approx(0.06)
    learner.close()
