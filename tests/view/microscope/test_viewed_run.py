"""What the list of runs says of a run: its name, and how it ended."""

import json

import pytest

from proxima.core import SURROGATES
from proxima.data import UserError
from proxima.data.flow import EVAL_UID, Completion, Group, Prompt, Score
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


def test_of_held_out_questions_what_is_wrong_comes_before_what_is_right(tmp_path):
    files = RunFolder(tmp_path)
    with pytest.raises(UserError, match="no held-out answers"):
        held_out_answers(files)
    # before and after; None: no score
    states = [(True, True), (True, False), (False, True), (False, None), (False, False), (True, True)]
    for side, (step, label) in enumerate(((0, "before"), (4, "after"))):
        groups = []
        for row, correct in enumerate(state[side] for state in states):
            message = {"role": "user", "content": f"{row} + 1?"}
            prompt = Prompt(uid=EVAL_UID + row, messages=(message,), tokens=(1,), answer=row)
            said = Completion.of_text(prompt.uid, 0, f"{label} {row}", [1, 2])
            score = Score.failed("no") if correct is None else Score(value=float(correct), correct=correct)
            groups.append(Group(prompt=prompt, completions=(said,), scores=(score,)))
        write_evals(files.eval_file(step, label), step, groups)
        answer = held_out_answers(files)
        kinds = [(row["name"].removeprefix("held-out question "), row["kind"]) for row in answer["rows"]]
        if not step:
            wrong, right = [(str(row), "wrong") for row in (2, 3, 4)], [(str(row), "right") for row in (0, 1, 5)]
            assert answer["labels"] == ["before the first step"] and kinds == wrong + right
    assert (answer["labels"], answer["metric"]) == (["before the first step", "after step 4"], "accuracy")
    assert kinds == [("1", "worse"), ("4", "wrong"), ("2", "better"), ("0", "right"), ("5", "right"), ("3", "unknown")]
    assert str(EVAL_UID) not in json.dumps(answer)
    first = answer["rows"][0]
    assert first["question"] == "1 + 1?" and first["answer"] == 1
    assert first["sides"] == [[{"mark": "right", "text": "before 1"}], [{"mark": "wrong", "text": "after 1"}]]
    assert answer["rows"][5]["sides"][1] == [{"mark": "no score", "text": "after 3"}]
