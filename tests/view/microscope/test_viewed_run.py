"""What the list of runs says of a run: its name, and how it ended."""

import json

import pytest

from proxima.core import SURROGATES
from proxima.data import UserError
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.runtime.state.folder import FolderLock, RunFolder
from proxima.runtime.state.rollouts import write_evals
from proxima.view.microscope.app import held_out_answers
from proxima.view.microscope.server import distinct
from proxima.view.microscope.viewed_run import ViewedRun
from tests.view.microscope.stored_run import make_step


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"status": "done"}, "finished, 50 steps"),
        ({"status": "done", "plateau": "no better for 3 evaluations"}, "ended early, 41 of 50 steps: no better for"),
        ({"status": "stopped"}, "stopped after 41 of 50 steps"),
        ({"status": "failed"}, "failed after 41 of 50 steps"),
        ({}, "unfinished, 41 of 50 steps"),
    ],
)
def test_how_a_run_ended(summary, text, tmp_path):
    make_step(tmp_path, SURROGATES["cppo"](), prompts=1, samples=1)
    run = ViewedRun(0, RunFolder(tmp_path))
    run.recipe["train"]["steps"] = 50
    steps = 50 if text.startswith("finished") else 41
    assert run.state_text(summary, steps).startswith(text)
    if not summary:
        lock = FolderLock(RunFolder(tmp_path).lock)
        assert run.state_text({}, 41) == "running, 41 of 50 steps"
        lock.release()


def test_the_runs_of_a_sweep_are_named_by_cell_and_seed(tmp_path):
    folders = [tmp_path / "lr" / cell / f"seed-{seed}" for cell in ("lr=1e-5", "lr=1e-6") for seed in (1, 2)]
    folders += [tmp_path / "add", tmp_path / "other" / "deep"]
    assert distinct(folders) == [*(f"lr={lr}/seed-{seed}" for lr in ("1e-5", "1e-6") for seed in (1, 2)), "add", "deep"]
    assert distinct([tmp_path / "lr=1e-5" / "seed-1"]) == ["lr=1e-5/seed-1"]


def test_held_out_questions_come_worst_first(tmp_path):
    files = RunFolder(tmp_path)
    with pytest.raises(UserError, match="no held-out answers"):
        held_out_answers(files)
    for step, label, right in ((0, "before", {0, 1}), (4, "after", {1, 2})):
        groups = []
        for uid in range(4):
            prompt = Prompt(uid=uid, messages=({"role": "user", "content": f"{uid} + 1?"},), tokens=(1,), answer=uid)
            said = Completion.of_text(uid, 0, f"{label} {uid}", [1, 2])
            score = Score.failed("no") if uid == 3 and step else Score(value=float(uid in right), correct=uid in right)
            groups.append(Group(prompt=prompt, completions=(said,), scores=(score,)))
        write_evals(files.eval_file(step, label), step, groups)
    answer = held_out_answers(files)
    assert (answer["labels"], answer["metric"]) == (["before the first step", "after step 4"], "accuracy")
    kinds = {row["uid"]: row["kind"] for row in answer["rows"]}
    assert [*kinds.items()] == [(0, "worse"), (2, "better"), (1, "same"), (3, "unknown")]
    first = answer["rows"][0]
    assert first["question"] == "0 + 1?" and first["answer"] == 0
    assert first["sides"] == [[{"mark": "right", "text": "before 0"}], [{"mark": "wrong", "text": "after 0"}]]
    assert answer["rows"][3]["sides"][1] == [{"mark": "no score", "text": "after 3"}]
    assert json.dumps(answer)
