"""How the files of a run's evaluations are named, and found again."""

from proxima.data.flow import Score
from proxima.evaluation.eval_files import eval_file_name, eval_files_in, set_of, step_of
from proxima.evaluation.results import read_result
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals
from tests.evaluation.test_group_metrics import group


def test_files_are_in_the_order_of_their_steps(tmp_path):
    """Also beyond the six digits of a name."""
    for step in (2_000_000, 12, 300_000):
        (tmp_path / eval_file_name(step, "step")).touch()
    assert [step_of(file) for file in eval_files_in(tmp_path)] == [12, 300_000, 2_000_000]


def test_a_further_set_may_have_dashes_in_its_name(tmp_path):
    names = [eval_file_name(3, label) for label in ("after", "after-hard-ones")]
    assert names == ["000003-after.parquet", "000003-after-hard-ones.parquet"]
    assert [set_of(tmp_path / name) for name in names] == ["", "hard-ones"]


def test_files_of_the_user_in_the_folder_are_no_evaluations(tmp_path):
    """Neither for a comparison nor for the views."""
    run = RunFolder(tmp_path)
    run.evals.mkdir()
    for name in ("2nd-look.parquet", "7.parquet", "notes-of-mine.parquet"):
        (run.evals / name).touch()
    file = run.eval_file(4, "after")
    write_evals(file, 4, [group(0, ("a", Score(value=1.0, correct=True)))])
    assert list(read_result(tmp_path).suites) == ["held-out"]
    assert run.eval_files() == [file]
    assert run.eval_sets() == []
