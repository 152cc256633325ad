"""A whole run on a fixed data set: what it records, keeps and shows, and how bad rows are named."""

import asyncio
import json
import shutil

import pytest

import proxima
from proxima.data import FieldError, UserError
from proxima.model.load import load
from proxima.runtime.loop.offline_loop import HeldOutSamples
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.runtime.watch.timeline import timeline_spans
from tests.prepare.published import write_jsonl
from tests.runtime.offline import tiny_dpo, tiny_reward, tiny_sft
from tests.runtime.offline.tiny_sft import recipe
from tests.runtime.tiny_run import Watcher, evals_of, go, summary_of


@pytest.fixture
def finished(runs):
    return runs.finished("sft")


def test_the_held_out_loss_falls(finished):
    evals = evals_of(finished)
    losses = [r["loss"] for r in evals]
    assert [r["step"] for r in evals] == [0, 2, 4] and losses == sorted(losses, reverse=True)
    assert all(r["loss/low"] < r["loss"] < r["loss/high"] and r["examples"] == 5 for r in evals)
    outcome = summary_of(finished)["eval"]["after"]
    assert (outcome["metric"], outcome["value"]) == ("loss", losses[-1]) and summary_of(finished)["algorithm"] == "sft"


def test_samples_are_kept_with_the_expected_answer(finished):
    files = RunFolder(finished).eval_files()
    assert [file.stem for file in files] == ["000000-before", "000002-step", "000004-after"]
    rows = read_rows(files[-1])
    pairs = [(row["question"], row["answer"]) for row in rows]
    assert pairs == [("What is 50 + 2?", "It is 52."), ("What is 51 + 0?", "It is 51.")]
    assert all(0 < len(row["tokens"]) <= 6 and row["reward"] is None and row["error"] is None for row in rows)


@pytest.mark.slow
def test_the_time_of_an_evaluation_is_also_that_of_its_samples(tiny_model, tmp_path, monkeypatch):
    groups = HeldOutSamples.groups

    async def late(self, version):
        await asyncio.sleep(0.2)
        return await groups(self, version)

    monkeypatch.setattr(HeldOutSamples, "groups", late)
    go(tmp_path / "run", recipe(tiny_model("llama"), tmp_path / "rows", train__steps=1))
    assert all(r["time/evaluate"] >= 0.2 for r in evals_of(tmp_path / "run"))
    spans = timeline_spans(RunFolder(tmp_path / "run").timeline)
    assert all(span.end - span.start >= 0.2 for span in spans if span.name == "evaluate")


def test_python_says_what_a_run_without_rollouts_has(finished):
    run = proxima.load_run(finished)
    with pytest.raises(
        UserError, match="run with a section .sft.: .* has no rollouts; .metrics .* .answers.. the samples"
    ):
        run.rollouts()
    assert len(run.answers()) == 6 and list(run.metrics.index) == [1, 2, 3, 4]


def test_the_best_checkpoint_has_the_lowest_loss(finished):
    assert find_checkpoint(finished, "best").step == 4


def bad_rows(folder, *rows):
    file = write_jsonl(folder / "bad.jsonl", rows)
    return {"task__path": str(file), "train__steps": 1, "eval__task": None, "eval__every": 0}


GOOD, EMPTY, LONG = (
    {"question": "What?", "answer": "This."},
    {"question": "What?", "answer": " "},
    {"question": "What?", "answer": "long " * 100},
)


PAIRS = [
    {"question": f"{chosen[:1]}?", "chosen": chosen, "rejected": rejected}
    for chosen, rejected in (("a", "b"), ("same", "same"), ("", "b"), ("x" * 400, "b"))
]
EMPTY_ROWS = "task: 3 of 5 rows are skipped: completion is empty ({0}:2, {0}:4); messages has "
BAD = {  # rows, what is said of them, and of the first if it is refused
    tiny_sft: (
        [GOOD, EMPTY, LONG, EMPTY, GOOD],
        [EMPTY_ROWS, "tokens, the model holds 256 ({0}:3)"],
        "completion=' ' is empty",
    )
} | dict.fromkeys(
    (tiny_reward, tiny_dpo),
    (
        PAIRS,
        ["task: 3 of 4 rows are skipped", "rejected equals chosen", "chosen is empty ({0}:3)", "does not fit"],
        "rejected='same' equals chosen",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("method", BAD)
def test_bad_rows_are_counted_and_named_or_refused(method, tiny_model, tmp_path):
    rows, said, refused = BAD[method]
    changes, watcher = bad_rows(tmp_path, *rows), Watcher()
    tree = method.recipe(tiny_model("llama"), tmp_path / "rows", **changes)
    go(tmp_path / "run", tree, observer=watcher)
    (note,) = watcher.warnings
    assert [text for text in said if text.format(changes["task__path"]) not in note] == []
    with pytest.raises(FieldError, match=f"data.unusable='refuse' refuses .*:2 of task: {refused}"):
        go(tmp_path / "other", tree | {"data": {"unusable": "refuse"}})


NONE_LEFT = r"task: none of its 2 rows can be used: completion is empty \(.*:1, .*:2\)"


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([GOOD, LONG], {"over_length": "refuse"}, "data.over_length='refuse' refuses .*:2 of task: messages='long lo"),
        ([EMPTY, EMPTY], {}, NONE_LEFT),
        # the remedy is that of the commonest reason
        ([LONG, LONG, EMPTY], {}, "; shorten it, raise model.max_length, or set data.over_length=truncate$"),
    ],
)
def test_rows_that_end_the_run_before_it_begins(rows, data, message, tiny_model, tmp_path):
    tree = recipe(tiny_model("llama"), tmp_path / "rows", **bad_rows(tmp_path, *rows), data=data)
    with pytest.raises(UserError, match=message):
        go(tmp_path / "run", tree)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_row_without_a_prompt_is_skipped_or_refused_like_others(tiny_model, tmp_path):
    """Also as a held-out row, of which a sample would be taken."""
    changes = bad_rows(tmp_path, GOOD, {"question": "", "answer": "This."}, GOOD)
    held_out = {"eval__task__path": changes["task__path"], "eval__samples": 2}
    del changes["eval__task"]
    watcher = Watcher()
    tree = recipe(tiny_model("llama"), tmp_path / "rows", **changes | held_out)
    go(tmp_path / "run", tree, observer=watcher)
    place = f"{changes['task__path']}:2"
    assert [f"{name}: 1 of 3 rows is skipped: question is empty ({place})" for name in ("task", "eval.task")] == (
        watcher.warnings
    )
    assert len(read_rows(RunFolder(tmp_path / "run").eval_files()[-1])) == 1
    with pytest.raises(FieldError, match="data.unusable='refuse' refuses .*:2 of task: question='' is empty; remove"):
        go(tmp_path / "other", tree | {"data": {"unusable": "refuse"}})


@pytest.mark.slow
def test_a_turn_that_ends_with_another_token_than_generation_is_reported(tiny_model, tmp_path):
    """A base model with the template of its chat model: its EOS is not what ends a turn."""
    model = tmp_path / "base"
    shutil.copytree(tiny_model("llama"), model)
    for name in ("config.json", "generation_config.json"):
        facts = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(facts | {"eos_token_id": 2}))
    facts = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(facts | {"eos_token": "<|endoftext|>"}))
    watcher = Watcher()
    go(tmp_path / "run", recipe(model, tmp_path / "rows", train__steps=1, eval__every=0), observer=watcher)
    (warning,) = watcher.warnings
    assert warning.startswith(
        "the chat template ends turns with <|im_end|>, and the model's files stop only at <|endoftext|>: here"
    ) and warning.endswith("set eos_token_id in its generation_config.json to [2, 0]")


@pytest.mark.slow
def test_an_adapter_is_trained_and_saved_alone(runs):
    run = RunFolder(runs.finished("sft of an adapter"))
    last = find_checkpoint(run.path).model
    assert {file.name for file in last.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert load(str(last), device="cpu").adapter_parameters == 0
    losses = [record["loss"] for record in run.read_metrics() if record["kind"] == "eval"]
    assert losses[-1] < losses[0] - 0.1
