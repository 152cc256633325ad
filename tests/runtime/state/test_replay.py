"""A replay trains on the stored rollouts of another run: the same run again to the bit, or another loss on them."""

import shutil
from contextlib import closing

import pytest
import yaml

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.config.validate import load_recipe
from proxima.core import health
from proxima.data import UserError
from proxima.engine.local.local_engine import Local
from proxima.experiments.run_comparison import compare_runs
from proxima.experiments.run_reader import read_run
from proxima.runtime.launch.run_data import load_run_data
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.replay import StoredRollouts
from proxima.runtime.state.rollouts import ROLLOUT_SCHEMA, read_rows
from proxima.system.damage import Checksum
from proxima.view.report import write_report
from tests.campaigns import campaign
from tests.runtime.runs import RUNS
from tests.runtime.tiny_run import NO_EVAL, assert_same, go
from tests.tiny import tiny_tokenizer

STEPS = 4  # of the run called "policy"


@pytest.fixture
def generated(runs):
    """The folder of a run that generates; read-only by agreement."""
    return runs.finished("policy")


def comparable(run_traces):
    """All traces, but for what tells a replay: it makes no generation batches, and has another cursor."""
    told = ("gen_batches", "replayed")
    metrics = [{k: v for k, v in record.items() if k not in told} for record in run_traces["metrics"]]
    return run_traces | {"metrics": metrics, "state": run_traces["state"] | {"cursor": None}}


LIKELIEST = "likeliest tokens and greedy baselines"
REPLAY = "tests/runtime/state/test_replay.py::test_a_replay_with_the_same_algorithm_is_the_same_run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "policy",
        # groups dropped before the advantages stay dropped, and carried ones are in the step that used them
        "carried groups",
        "sampling masks",
        *campaign(f"{REPLAY}[policy]", [LIKELIEST, "teacher", "episodes"]),
        *campaign(f"{REPLAY}[sampling masks]", ["routed experts"]),
    ],
)
def test_a_replay_with_the_same_algorithm_is_the_same_run(name, runs, tmp_path):
    runs.go(name, tmp_path / "run", rollouts=str(runs.finished(name)))
    replayed, first = (comparable(RUNS[name].traces(folder)) for folder in (tmp_path / "run", runs.finished(name)))
    names = first.keys() if name in ("policy", LIKELIEST) else ("rollouts", "evals", "tensors")
    assert_same(replayed, {name: first[name] for name in names})


def test_dropped_groups_are_stored(runs):
    rows = (row for rows in runs.traces("carried groups")["rollouts"].values() for row in rows)
    assert {"dropped_uniform_group", "dropped_pruned", "trained", "invalid"} <= {row["outcome"] for row in rows}


@pytest.mark.slow
def test_another_loss_sees_the_same_tokens(generated, runs):
    folder, summary = runs.finished("replay"), runs.made("replay").summary
    same = ("prompt_uid", "sample", "tokens", "sampled_log_prob", "reward", "policy_version")
    for file in sorted((generated / "rollouts").iterdir()):
        theirs, ours = read_rows(file), read_rows(folder / "rollouts" / file.name)
        assert [[row[name] for name in same] for row in ours] == [[row[name] for name in same] for row in theirs]
    assert runs.traces("replay")["tensors"] != runs.traces("policy")["tensors"]
    assert summary.replay["run"] == str(generated) and len(summary.replay["sha256"]) == 64
    page = write_report(folder).read_text()
    assert f"<code>{generated}</code>" in page and summary.replay["sha256"][:16] in page


@pytest.mark.slow
def test_without_held_out_questions_no_engine_is_built(generated, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "build", lambda *_: pytest.fail("an engine was built"))
    monkeypatch.setattr(
        "proxima.runtime.launch.rl_workload.make_rewards", lambda *_: pytest.fail("rewards were started")
    )
    summary = runs.go("policy", tmp_path / "run", rollouts=str(generated), eval__task=None, train__steps=1)
    assert (summary.status, summary.eval, summary.tokens_per_second["generate"]) == ("done", {}, 0)


def changed(folder, generated, change):
    shutil.copytree(generated, folder)
    change(folder)
    return folder


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused_before_the_model_is_loaded(generated, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.model.model_source.load", lambda *_, **how: pytest.fail("the model was loaded"))

    def refused(of, **changes):
        tree = runs.tree("policy", rollouts=str(of), **changes)
        with pytest.raises(UserError) as error:
            load_recipe({**tree, "folder": str(tmp_path / "run")})
            go(tmp_path / "run", tree)
        assert "\n" not in str(error.value)
        return str(error.value)

    no_file = changed(tmp_path / "a", generated, lambda f: (f / "rollouts" / "000002.parquet").unlink())
    said = "needs rollouts/000002.parquet, which is missing; restore it, or replay fewer steps, train.steps=1"
    assert said in refused(no_file)
    torn = changed(tmp_path / "b", generated, lambda f: (f / "rollouts" / "000003.parquet").write_bytes(b"PAR1"))
    assert "needs rollouts/000003.parquet, which has " in refused(torn)
    assert "train.steps=9 is more than the 4 finished steps" in refused(generated, train__steps=9)
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "seed=4" in (text := refused(generated, seed=4)) and "differs from 3" in text
    assert "task.high" in refused(generated, task__high=8)
    assert "sampling.max_tokens" in refused(generated, sampling__max_tokens=7)
    assert "train.prompts_per_step=8" in refused(generated, train__prompts_per_step=8)
    assert "train.completions_per_prompt" in refused(generated, train__completions_per_prompt=2)
    pruned = {"preset": "cppo", "selection": [{"kind": "prune", "rate": 0.5, "allocate": True}]}
    assert "`prune` with `allocate` takes more" in refused(generated, algorithm=pruned)
    assert "needs greedy completions" in refused(generated, algorithm={"preset": "cppo", "advantage": "remax"})
    assert "set algorithm.dynamic_sampling=null" in refused(generated, algorithm={"preset": "dapo"})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_changed_reward_file_that_scores_held_out_answers_is_refused(runs, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def length(completion: str): return len(completion)\n")
    own = {"reward": [{"kind": "function", "path": f"{file}:length"}], "train__steps": 1}
    runs.go("policy", tmp_path / "run", **own, **NO_EVAL)
    own["rollouts"] = str(tmp_path / "run")
    before = times(tmp_path / "run")
    file.write_text("def length(completion: str): return -len(completion)\n")
    with pytest.raises(UserError, match="another version of reward.0: own.py, which would score .*eval.task=null"):
        runs.go("policy", tmp_path / "other", **own)
    assert not (tmp_path / "other").exists()
    runs.go("policy", tmp_path / "blind", **own, **NO_EVAL)
    assert times(tmp_path / "run") == before


def times(run):
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_rollouts_of_another_format_or_vocabulary_are_refused(generated, tiny_model, tmp_path, monkeypatch):
    stored = StoredRollouts(generated, STEPS)
    with pytest.raises(UserError, match="has token 2.*the vocabulary of model.path has 20"):
        stored.check_vocabulary(tiny_tokenizer(), 20)
    other = tiny_tokenizer()
    other.decode = lambda tokens, **options: "something else"
    with pytest.raises(UserError, match="which the tokenizer of model.path reads as 'something else'"):
        stored.check_vocabulary(other, 300)
    stored.check_vocabulary(tiny_tokenizer(), 300)
    monkeypatch.setattr(
        "proxima.runtime.state.replay.ROLLOUT_SCHEMA", ROLLOUT_SCHEMA.with_metadata({"proxima": "rollouts 6"})
    )
    with pytest.raises(UserError, match="in the format 'rollouts 5'; this version reads 'rollouts 6'"):
        StoredRollouts(generated, STEPS)


def test_a_run_that_is_being_trained_is_refused_and_a_replayed_one_is_kept(generated, tmp_path):
    copy = changed(tmp_path / "run", generated, lambda folder: None)
    training = RunFolder(copy)
    training.begin(resume=True)
    with pytest.raises(UserError, match="is in use by another process"):
        StoredRollouts(copy, STEPS)
    training.release()
    readers = [StoredRollouts(copy, STEPS), StoredRollouts(copy, STEPS)]
    with pytest.raises(UserError, match="is in use by another process"):
        RunFolder(copy).begin(resume=True)
    for reader in readers:
        reader.close()
    RunFolder(copy).begin(resume=True)


@pytest.mark.slow
def test_other_rollouts_at_a_resume_are_found(generated, runs, tmp_path):
    source = changed(tmp_path / "source", generated, lambda folder: None)
    config = runs.tree("policy", rollouts=str(source), eval__task=None, train__steps=1)
    go(tmp_path / "run", config)
    first = source / "rollouts" / "000001.parquet"
    shutil.copy(source / "rollouts" / "000003.parquet", first)
    with pytest.raises(UserError, match="needs rollouts/000001.parquet, which (has|differs)"):
        go(tmp_path / "run", config, resume=True)
    with Journal(RunFolder(source).journal) as journal, journal._transaction():  # as if it had been trained again
        journal.checksums.files["rollouts/000001.parquet"] = 1, Checksum.of(first)
        journal.checksums.record_files()
    with pytest.raises(UserError, match=r"rollouts: 000001.parquet: changed since the run"):
        go(tmp_path / "run", config, resume=True)


@pytest.mark.slow
def test_the_seed_may_name_the_run(generated, runs, tmp_path):
    (tmp_path / "seed-3").symlink_to(generated)
    tree = runs.tree("policy", rollouts=str(tmp_path / "seed-{seed}"))
    with closing(load_run_data(resolve(tree).config).source) as source:
        assert source.folder.path == tmp_path / "seed-3"


@pytest.mark.slow
def test_the_flag_is_short_for_the_field(generated, runs, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(runs.tree("policy")))
    words = ["train", str(file), "--rollouts", str(generated), f"folder={tmp_path / 'run'}", "eval.task=null"]
    words += ["eval.every=0"]
    assert main([*words, "train.steps=9"]) == 2
    assert "train.steps=9 (command line): is more than the 4 finished steps" in capsys.readouterr().err
    assert main([*words, "train.steps=1"]) == 0
    assert f"replay of {generated}" in capsys.readouterr().out
    assert main(["train", str(file), "--rollouts", str(generated), f"folder={generated}", "--overwrite"]) == 2
    assert "is the run whose rollouts are replayed" in capsys.readouterr().err
    warnings = compare_runs([read_run(generated), read_run(tmp_path / "run")]).warnings
    assert any(f"replays of {generated}" in text for text in warnings)


def test_the_distance_of_a_replay_is_not_blamed_on_the_engine():
    (verdict, *_) = health({"mismatch/k3_kl": 9.0, "replayed": 1})
    assert "this run is a replay" in verdict.sentence and "compute_dtype" not in verdict.sentence
