"""`proxima check RUN`, and what a resume and a replay notice: a flipped bit in any file, and no false alarm."""

import json
import shutil
import sqlite3

import pytest

from proxima.cli.main import main
from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.folder_check import check_run_files
from tests.runtime.tiny_run import assert_same, traces


@pytest.fixture
def run(runs, tmp_path):
    """A finished run of three steps."""
    return RunFolder(shutil.copytree(runs.finished("plain"), tmp_path / "run"))


def statuses(run):
    return {finding.kind: finding.status for finding in check_run_files(run)}


def flip(file, at=0.5, bit=1):
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.slow
def test_a_run_without_damage(run, capsys):
    assert set(statuses(run).values()) == {"ok"} and len(statuses(run)) == 5
    assert main(["check", str(run.path)]) == 0 and capsys.readouterr().out.endswith("no damage\n")


@pytest.mark.parametrize(
    ("name", "kind", "at"),
    [
        ("rollouts/000003.parquet", "rollouts/", 0.5),
        ("evals/000000-before.parquet", "evals/", 0.9),
        ("metrics.jsonl", "metrics.jsonl", 0.9),
        ("checkpoints/000001/optimizer.safetensors", "checkpoints/", 0.5),
        ("checkpoints/000002/state.json", "checkpoints/", 0.1),
    ],
)
def test_a_flipped_bit_is_found(run, name, kind, at, capsys):
    flip(run.path / name, at)
    assert {k for k, status in statuses(run).items() if status == "damaged"} == {kind}
    assert main(["check", str(run.path)]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line)
    assert line.startswith(kind) and "; " in line


@pytest.mark.parametrize(
    ("statement", "part"),
    [
        ("UPDATE prompts SET reward = reward + 1 WHERE uid = 1", "step 1"),
        ("UPDATE meta SET value = replace(value, '3', '7') WHERE key = 'config'", "config"),
        ("UPDATE checksums SET crc32 = '00000000' WHERE name = 'run.sqlite step 2'", "step 2"),
        ("DROP TRIGGER steps_stand; UPDATE steps SET metrics = replace(metrics, '0.', '1.') WHERE step = 2", "step 2"),
        ("DROP TRIGGER steps_stand; UPDATE steps SET metrics = replace(metrics, '{', '[') WHERE step = 2", "step 2"),
        (
            "DROP TRIGGER steps_stand; UPDATE steps SET metrics = CAST(CAST(metrics AS BLOB) || x'ff' AS TEXT) "
            "WHERE step = 3",
            "step 3",
        ),
    ],
)
def test_other_content_in_the_journal_is_found_and_a_resume_refused(run, runs, statement, part):
    db = sqlite3.connect(run.journal)
    db.executescript("DROP TRIGGER prompts_move; " + statement)
    db.close()
    journal_finding = next(finding for finding in check_run_files(run) if finding.kind == "run.sqlite")
    assert journal_finding.status == "damaged" and part in journal_finding.detail
    with pytest.raises(UserError, match=rf"run.sqlite is damaged \({part}\): .*; move it away, and a resume restores"):
        runs.go("plain", run.path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_resume_restores_damaged_metrics(lost, run, runs):
    lines = run.metrics.read_text().splitlines()
    first = json.loads(lines[1]) | {"loss": 7.0}
    run.metrics.write_text("\n".join([lines[0].replace('"label":', '"labl":'), json.dumps(first), *lines[2:]]) + "\n")
    if lost:
        run.metrics.unlink()
    run.rollout_file(1).unlink()
    runs.go("plain", run.path, resume=True)
    assert run.metrics.read_text() == RunFolder(runs.finished("plain")).metrics.read_text()


@pytest.mark.slow
def test_a_kill_between_file_and_journal_is_no_damage(run, runs):
    """What a kill leaves: the files of a step that the journal does not have, half a line, and an evaluation in the
    journal alone."""
    shutil.copy(run.rollout_file(3), run.rollout_file(4))
    lines = run.metrics.read_text().splitlines(keepends=True)
    evaluation = json.loads(lines[-1])
    assert evaluation["label"] == "after"
    step = json.loads(lines[-2]) | {"step": 4}
    run.metrics.write_text("".join([*lines[:-1], json.dumps(step) + "\n", '{"kind": "ev']))
    assert set(statuses(run).values()) == {"ok"}
    runs.go("plain", run.path, resume=True)
    assert_same(traces(run.path), runs.traces("plain"))
    assert {kind for kind, status in statuses(run).items() if status != "ok"} == set()


def test_no_journal(run):
    """The metrics, from which a resume restores it, are not called damaged."""
    run.journal.write_bytes(b"nonsense" * 100)
    unreadable = statuses(run)
    run.journal.unlink()
    for found in (unreadable, statuses(run)):
        assert (found["run.sqlite"], found["metrics.jsonl"]) == ("damaged", "not checked")


def test_a_run_that_is_written_is_not_checked(run):
    run.begin(resume=True)
    with pytest.raises(UserError, match="is in use by another process"):
        check_run_files(RunFolder(run.path))
    run.release()


@pytest.fixture
def shown(runs, tmp_path):
    """A finished run whose prompts show images."""
    return RunFolder(shutil.copytree(runs.finished("images"), tmp_path / "run"))


def swap_lines(run):
    index = run.images / "index.txt"
    first, second, *rest = index.read_text().splitlines(keepends=True)
    index.write_text("".join([second, first, *rest]))


def swap_pictures(run):
    first, second, *_ = (run.images / f"{name}.png" for name in (run.images / "index.txt").read_text().split())
    first.rename(run.images / "aside")
    second.rename(first)
    (run.images / "aside").rename(second)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(swap_lines, "its lines are in another order"), (swap_pictures, "differs from the image that the run wrote")],
)
def test_images_are_verified_by_check_and_by_a_resume(shown, runs, damage, said):
    assert statuses(shown)["images/"] == "ok"
    damage(shown)
    finding = next(finding for finding in check_run_files(shown) if finding.kind == "images/")
    assert finding.status == "damaged" and said in finding.detail
    shutil.rmtree(shown.checkpoint(3))
    with pytest.raises(UserError, match=said):
        runs.go("images", shown.path, resume=True)


def test_overwrite_deletes_images(shown):
    shown.begin(overwrite=True)
    shown.release()
    assert not shown.images.exists()
