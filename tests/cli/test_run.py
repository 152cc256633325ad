"""A run from the command line on a tiny model: train, resume, evaluate, generate, export."""

import json
import shutil

import pytest
import yaml

from proxima.config.resolution import resolve
from proxima.runtime.state.rollouts import read_rows
from tests.cli.conftest import OVERRIDES
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


def steps(run):
    """Those of the metrics of a run."""
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").open() if '"train"' in line]


def test_train_says_what_it_did_and_leaves_a_folder(run, here):
    assert "step = 2 prompts × 2 completions = 4 sequences" in run
    assert "done: 2 steps" in run
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["seed"]) == ("done", 2, 1)
    assert summary["eval"]["before"]["questions"] == summary["eval"]["after"]["questions"] == 3
    config = (here / "run" / "config.yaml").read_text()
    assert "kind: cppo" in config
    assert "# preset cppo, chosen in tiny.yaml:4" in config
    assert resolve("run").config == resolve("tiny.yaml", ["folder=run", *OVERRIDES]).config


@pytest.mark.slow
def test_a_trial_that_trains_nothing_says_so_without_alarm(proxima, recipe, here):
    """So tiny a model is never right, and the other reward, which varies, is left out."""
    words = ["train", recipe(), "reward=number", "eval.task=null", "folder=run"]
    code, out, err = proxima(*words)
    assert (code, err) == (1, "note: nothing was trained, so the exit code is 1\n")
    assert "untrained: 2 steps in " in out and "no step of 2 trained anything; in the last one, every advantage" in out
    assert "failed" not in out.lower() and "error" not in out.lower()
    assert json.loads((here / "run" / "summary.json").read_text())["status"] == "untrained"
    code, out, err = proxima(*words, "--overwrite", "--quiet")
    assert (code, out) == (1, "") and err.startswith("note: no step of 2 trained anything; in the last one, ")


@pytest.mark.slow
def test_a_resume_that_finds_no_run_starts_one_and_says_so(proxima, recipe, here):
    code, _, err = proxima("train", recipe(), "folder=typo", "--resume", "train.steps=1")
    assert (code, err) == (0, "note: typo contains no run to resume: a new run starts there\n")
    code, _, err = proxima("train", recipe(), "folder=typo", "--resume", "train.steps=1")
    assert (code, err) == (0, "")


def test_a_used_folder_is_refused_before_the_demo_model_is_downloaded(refusal, here, monkeypatch):
    monkeypatch.setattr("proxima.config.validate.download_demo_model", lambda path: pytest.fail(f"downloads {path}"))
    (here / "taken").mkdir()
    (here / "taken" / "notes.txt").touch()
    assert "taken contains files but no run" in refusal("train", "quickstart", "folder=taken")


@pytest.mark.slow
def test_resume_of_a_run_whose_folder_was_not_named(done, recipe, here):
    out = done("train", recipe(), "train.steps=1", "train.warmup_steps=9")
    assert "WARNING train.warmup_steps=9 (command line): the run has 1 update" in out
    (run,) = (here / "runs").iterdir()
    moved = run.rename(here / "moved: run")
    done("train", str(moved), "--resume", "train.steps=2")
    assert steps(moved) == [1, 2]
    assert list((here / "runs").iterdir()) == []


@pytest.mark.slow
def test_resume_of_a_copy_without_its_journal_leaves_the_first_run_alone(run, proxima, here):
    shutil.copytree(here / "run", here / "copy")
    for file in (here / "copy").glob("run.sqlite*"):
        file.unlink()
    before = {file: file.read_bytes() for file in (here / "run").rglob("*") if file.is_file()}
    code, out, err = proxima("train", "copy", "--resume", "train.steps=3")
    assert code == 0, err
    assert "run.sqlite ended at step 0" in out + err
    assert steps(here / "copy") == [1, 2, 3]
    assert {file: file.read_bytes() for file in (here / "run").rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_a_resume_through_the_recipe_drops_no_earlier_override(run, proxima, refusal, here):
    greedy = OVERRIDES[2]
    err = refusal("train", "tiny.yaml", "folder=run", "--resume", "train.steps=3", greedy)
    assert "the run in run has checkpoint.every=1 (now 0), eval.limit=3 (now 200)" in err.replace(
        "eval.limit=3 (now 200), checkpoint.every=1 (now 0)", "checkpoint.every=1 (now 0), eval.limit=3 (now 200)"
    )
    assert "proxima train run --resume, or write what is to change as overrides" in err
    words = ("train.steps=3", "checkpoint.every=1", "eval.limit=2", greedy)
    assert proxima("train", "tiny.yaml", "folder=run", "--resume", *words)[0] == 0
    assert json.loads((here / "run" / "summary.json").read_text())["steps"] == 3


def test_a_resume_by_another_kind_or_model_is_refused_in_a_line(run, proxima, refusal, here, tiny_model):
    """Before a model is downloaded."""
    other = tiny_model("qwen2")
    code, _, err = proxima("train", "run", "--resume", f"model.path={other}")
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: model.path={other} (command line): ")
    said = "the run in run is RL, the recipe sft; resume it with its own"
    assert said in refusal("train", "cpu/sft", "folder=run", "--resume")


@pytest.mark.slow
def test_a_resume_takes_the_engine_of_its_command_line(done, proxima, refusal, recipe, here):
    path, server = recipe(), "engine={kind: tests.runtime.server_like:ServerLike, events: [one]}"
    assert proxima("train", path, "folder=run", server, "train.schedule=constant")[0] == 0
    code, _, err = proxima("train", "run", "--resume", "engine=local", "train.steps=3")
    assert code == 2 and "engine.kind=" in err and "--accept-changes" in err, err
    done("train", "run", "--resume", "--accept-changes", "engine=local", "train.steps=3")
    assert json.loads((here / "run" / "summary.json").read_text())["steps"] == 3
    # the same kind again is no other engine: what it was set to is missed
    kept = ("checkpoint.every=0", "train.schedule=constant", "train.steps=4")
    assert proxima("train", path, "folder=same", "engine.prefill_tokens=999", *kept[:2])[0] == 0
    err = refusal("train", path, "folder=same", "--resume", "engine.kind=local", *kept)
    assert "the run in same has engine.prefill_tokens=999 (now " in err


def test_quiet_prints_the_outcome_and_what_is_odd_stands_in_the_log(done, recipe, here):
    out = done("train", recipe(), "folder=run", "--quiet", "train.warmup_steps=9")
    (line,) = out.splitlines()
    assert line.startswith("done  2 steps in ")
    assert line.endswith("  run")
    remark = "WARNING train.warmup_steps=9 (command line): the run has 2 updates"
    assert remark in (here / "run" / "log.txt").read_text()


def test_generate_from_a_run(run, done):
    out = done(
        "generate", "run", "--max-tokens", "5", "What is 1 + 1?", "--json", "--samples", "2", "--temperature", "1"
    )
    output = json.loads(out)
    assert [c["sample"] for c in output["completions"]] == [0, 1]
    for completion in output["completions"]:
        assert 1 <= len(completion["tokens"]) <= 5
        assert len(completion["sampled_log_prob"]) == len(completion["tokens"])
        assert all(log_prob <= 0 for log_prob in completion["sampled_log_prob"])


@pytest.mark.slow
def test_generated_text_goes_to_stdout_and_the_rate_to_stderr(proxima, here, tiny_model, monkeypatch):
    import io

    code, out, err = proxima("generate", tiny_model("llama"), "hello", "--max-tokens", "3")
    assert code == 0
    assert "tok/s" in err
    assert "tok/s" not in out
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    code, out, _ = proxima("generate", tiny_model("llama"), "-", "--max-tokens", "3")
    assert [line.partition("  →")[0] for line in out.splitlines()] == ["one", "two"]


@pytest.mark.slow
def test_a_run_lends_its_system_prompt(run, proxima, here, monkeypatch):
    seen = []

    def generate(tokenizer, engine, questions, **options):
        seen.append((options["system"], tokenizer))
        return []

    monkeypatch.setattr("proxima.cli.chat_session.local_engine", lambda path, *_, **__: (path, None))
    monkeypatch.setattr("proxima.cli.chat_session.generate", generate)
    config = here / "run" / "config.yaml"
    config.write_text(config.read_text().replace("system: null", "system: Be brief."))
    assert proxima("generate", "run", "hi")[0] == 0
    ((system, path),) = seen
    assert system == "Be brief." and path.endswith("checkpoints/000002/model")


@pytest.mark.slow
def test_template_arguments_from_a_recipe_to_generate(proxima, recipe, here, tiny_model):
    """A thinking model told not to think: the prompts of training and evaluation say so, and a change is found."""
    shutil.copytree(tiny_model("llama"), here / "thinker")
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    (here / "thinker" / "chat_template.jinja").write_text(CHAT_TEMPLATE + switch)
    brief = "data.template_arguments.enable_thinking=false"
    words = ("train", recipe(), "model.path=thinker", "folder=run", "train.steps=1", "--quiet")
    code, _, err = proxima(*words, "data.template_arguments.think=false")
    assert code == 2 and "is not read by the model's chat template; it reads enable_thinking" in err
    assert proxima(*words, brief)[0] == 0
    (row, *_) = read_rows(here / "run" / "rollouts" / "000001.parquet")
    assert tiny_tokenizer().decode(row["prompt_tokens"]).endswith("assistant\n<think></think>")
    code, _, err = proxima("train", "run", "--resume", "data.template_arguments.enable_thinking=true")
    assert code == 2 and "differs from {'enable_thinking': False}, with which the run in run was started" in err
    assert proxima("eval", "run", "--out", "e", "eval.limit=1", "--max-tokens", "2")[0] == 0
    (suite,) = json.loads((here / "e" / "result.json").read_text())["suites"].values()
    assert suite["template_arguments"] == {"enable_thinking": False}
    other = ("--template-argument", "enable_thinking=true")
    answers = [proxima("generate", "run", "hi", "--max-tokens", "4", "--json", *more)[1] for more in ((), (), other)]
    own, again, changed = (json.loads(answer)["completions"] for answer in answers)
    assert own == again != changed


def assert_card(file):
    """Results and recipe, and no place of this machine."""
    _, facts, text = file.read_text().split("---\n", 2)
    assert yaml.safe_load(facts) == {"library_name": "transformers", "tags": ["proxima", "reinforcement-learning"]}
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert shown["train"]["steps"] == 2 and shown["reward"][0]["kind"] == "number"
    assert not {"folder", "runtime", "engine"} & shown.keys()
    assert "| 0 | 0." in text and "| 2 | 0." in text and str(file.parents[1]) not in text and "/dev" not in text


def test_export_loads_in_transformers(run, proxima, here):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, out, _ = proxima("export", "run", "out")
    assert (code, out) == (0, "wrote out\n")
    assert_card(here / "out" / "README.md")
    assert AutoModelForCausalLM.from_pretrained("out").num_parameters() > 1000
    assert AutoTokenizer.from_pretrained("out").chat_template
    code, _, err = proxima("export", "run", "out")
    assert (code, err.splitlines()[-1]) == (2, "error: out exists already; give a new folder")
    code, _, err = proxima("export", "run", "other", "--checkpoint", "7")
    assert (code, err.splitlines()[-1]) == (2, "error: run: no checkpoint '7'; use one of [1, 2], last or best")
