"""Runs of a mix whose sources have their own environments, rewards, limits and sampling."""

import json
import shutil
import signal

import pytest

from proxima.cli.main import main
from proxima.evaluation.results import read_result
from tests.runtime.episode_world import STOPS
from tests.runtime.interruptions import interrupt_and_resume, start_and_hold
from tests.runtime.placement.launched import ROOT
from tests.runtime.tiny_run import go, recipe, rollouts_of, steps_of, traces

pytestmark = pytest.mark.slow

ECHO = "tests.runtime.echo_world:Echo"
GUESS = {"kind": "guess", "low": 1, "high": 3, "guesses": 2}


def mix_of(split):
    sums = {"kind": "arithmetic", "low": 1, "high": 9, "held_out": 0.3, "split": split, "size": 4}
    return {
        "kind": "mix",
        "tasks": [
            {"name": "sums", "weight": 2, "task": sums, "sampling": {"max_tokens": 5}},
            {
                "name": "echo",
                "task": sums | {"environment": {"kind": ECHO}},
                "reward": [{"kind": "environment"}],
                "sampling": {"temperature": 0.7, "stop": STOPS},
            },
            {
                "name": "game",
                "task": {"kind": "seeds", "count": 4, "environment": GUESS},
                "reward": [{"kind": "environment", "weight": 0.5}],
                "episode": {"turns": 1},
                "sampling": {"max_tokens": 3},
            },
        ],
    }


def mixed(model, **changes):
    own = {
        "task": mix_of("train"),
        "eval": {"task": mix_of("test"), "every": 2, "limit": 0},
        "sampling__max_tokens": 8,
        "train__prompts_per_step": 8,
        "train__completions_per_prompt": 2,
        "train__tokens_per_micro_batch": 1000,
        "episode__call_seconds": 300.0,
        "algorithm": {"preset": "grpo"},
    }
    return recipe(model, **(own | changes))


def test_each_source_is_played_scored_and_sampled_in_its_own_way_and_a_resume_changes_nothing(tiny_model, tmp_path):
    tree = mixed(tiny_model("llama"))
    assert go(tmp_path / "unbroken", tree).status == "done"
    interrupt_and_resume(go, tmp_path / "resumed", tree, "while generating step 2")
    assert whole_or_single(tmp_path / "resumed") == whole_or_single(tmp_path / "unbroken")

    rows = [row for step in traces(tmp_path / "unbroken")["rollouts"].values() for row in step]
    by_temperature = {round(row["temperature"], 3) for row in rows}
    assert by_temperature == {1.0, 0.7}
    records = [json.loads(line) for line in (tmp_path / "unbroken" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    for record in trained:
        names = {key.split("/")[1] for key in record if key.startswith("source/")}
        assert sum(record[f"source/{name}/prompts"] for name in names) == record["prompts"]
        if "game" in names:
            assert record["source/game/length/max"] <= 3 and record["source/game/episode/turns/max"] == 1
        if "sums" in names:
            assert record["source/sums/length/max"] <= 5 and "source/sums/episode/turns/max" not in record
    assert {key.split("/")[1] for record in trained for key in record if key.startswith("source/")} == {
        "sums",
        "echo",
        "game",
    }
    evaluated = [record for record in records if record["kind"] == "eval"]
    questions = [evaluated[-1][f"source/{name}/questions"] for name in ("sums", "echo", "game")]
    assert sum(questions) == evaluated[-1]["questions"] and min(questions) > 0


def whole_or_single(folder):
    """The traces of a run, without how often its episodes were begun; some of its rows are single answers."""
    every = traces(folder)
    for rows in (*every["rollouts"].values(), *every["evals"].values()):
        for row in rows:
            if row.get("episode"):
                row["episode"] = json.loads(row["episode"]) | {"attempts": 1}
    for record in every["metrics"]:
        for key in [key for key in record if key.endswith("episode/retried") or "/seconds/" in key]:
            del record[key]
    return every


def test_an_evaluation_has_figures_of_each_source_and_compares_them(tiny_model, tmp_path, capsys):
    tree = mixed(tiny_model("llama"))
    file = tmp_path / "mixed.yaml"
    file.write_text(json.dumps(tree))
    for name in ("a", "b"):
        assert main(["eval", str(tiny_model("llama")), str(file), "--out", str(tmp_path / name)]) == 0
    (suite,) = json.loads((tmp_path / "a" / "result.json").read_text())["suites"].values()
    assert suite["sources"].keys() == {"sums", "echo", "game"}
    assert sum(figures["questions"] for figures in suite["sources"].values()) == suite["questions"]
    assert suite["sources"]["game"]["length"]["max"] <= 3
    assert [name.partition("/")[2] for name in read_result(tmp_path / "a").suites] == ["", "sums", "echo", "game"]
    capsys.readouterr()
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["suites"]
    assert [name.partition("/")[2] for name in compared] == ["", "sums", "echo", "game"]


def test_a_killed_run_of_the_recipe_resumes_as_if_unbroken_and_runs_compare_by_source(tiny_model, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 1024}))  # tools need room
    held = {"kind": "tests.runtime.tiny_run:Even", "hold": str(tmp_path / "hold")}
    short = {"steps": 2, "prompts_per_step": 8, "completions_per_prompt": 2, "tokens_per_micro_batch": 2000}
    tree = {
        "extends": str(ROOT / "recipes" / "cpu" / "mix.yaml"),
        "model": {"path": str(model), "compute_dtype": "float32", "device": "cpu"},
        "engine": {"kind": "local", "dtype": "float32", "slots": 8},
        "reward": [held],
        "sampling": {"max_tokens": 6},
        "train": short,
        "eval": {"limit": 9, "every": 2},
        "checkpoint": {"every": 1, "keep_last": 0},
        "runtime": {"threads": 1, "reward_timeout": 600.0},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    words = ["train", str(tmp_path / "recipe.yaml")]
    assert main([*words, f"folder={tmp_path / 'unbroken'}", "--quiet"]) == 0
    unbroken = whole_or_single(tmp_path / "unbroken")
    single = [row["prompt_uid"] for row in unbroken["rollouts"]["000002.parquet"] if not row.get("episode")]

    process = start_and_hold(tmp_path / "killed", single[-1])
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "killed" / "summary.json").exists()
    (tmp_path / "hold").unlink()
    assert main([*words, f"folder={tmp_path / 'killed'}", "--resume", "--quiet"]) == 0
    assert whole_or_single(tmp_path / "killed") == unbroken

    capsys.readouterr()
    runs = [str(tmp_path / name) for name in ("unbroken", "killed")]
    assert main(["eval", "--compare", *runs, "--json"]) == 0
    suites = json.loads(capsys.readouterr().out)["suites"]
    counts = {name: (each["questions"] + each["left_out"], each["tied"]) for name, each in suites.items()}
    assert counts == {"held-out": (9, 6)} | {f"held-out/{name}": (3, 3) for name in ("sums", "tools", "game")}
    assert suites["held-out/game"]["metric"] == "reward"  # a guess is neither right nor wrong


def test_a_source_that_learns_from_the_teacher_beside_one_that_learns_from_rewards(tiny_model, tmp_path):
    """The first source lacks rewards, which costs it nothing."""
    sums = {"kind": "arithmetic", "low": 1, "high": 9, "size": 8}
    failing = {"kind": "tests.runtime.tiny_run:Even", "fail_on": 1}
    sources = [
        {"name": "taught", "task": sums, "learns_from": "teacher", "reward": [failing]},
        {"name": "rewarded", "task": sums | {"operators": ["-"]}, "reward": "tests.runtime.tiny_run:Even"},
    ]
    changes = {
        "task": {"kind": "mix", "tasks": sources},
        "algorithm": {"preset": "grpo", "distillation": {"path": str(tiny_model("qwen2", 5))}},
        "eval__task": None,
        "eval__every": 0,
        "reward": None,  # each source has its own
    }
    tree = recipe(tiny_model("llama"), **changes)
    assert go(tmp_path / "run", tree).status == "done"
    steps = steps_of(tmp_path / "run")
    for step in steps:
        rows = rollouts_of(tmp_path / "run", step["step"])
        taught = [row for row in rows if row["reward"] is None]
        assert {row["outcome"] for row in rows} == {"trained"} and 0 < len(taught) < len(rows)
        assert step["distillation/divergence"] > 0 and "dropped/invalid" not in step
    interrupt_and_resume(go, tmp_path / "resumed", tree, "while training step 2")
    assert traces(tmp_path / "resumed") == traces(tmp_path / "run")
