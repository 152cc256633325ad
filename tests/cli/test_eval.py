"""`proxima eval` as a user types it, on a tiny model: named sets, recipes, runs, comparison, and what is refused
early."""

import json
import shutil
from contextlib import contextmanager

import pyarrow.parquet as parquet
import pytest

from proxima.data.flow import Group, Score
from proxima.evaluation.results import completions_table, read_result
from proxima.runtime.state import kept_answers
from proxima.view.eval_tables import graded_lines
from tests.evaluation.test_group_metrics import FAILED, RIGHT, WRONG, group
from tests.experiments.runs import make_run, make_sweep, step
from tests.prepare.published import gsm8k_folder, write_parquet
from tests.reward.make import completion, prompt
from tests.runtime.server_like import ServerLikeEngine
from tests.runtime.test_template_date import DATED

pytestmark = pytest.mark.usefixtures("lent_servers")
SCORES = {True: RIGHT, False: WRONG, None: FAILED}


def rows(*answers):
    return [{"question": f"What is {i} + {i}?", "answer": str(answer)} for i, answer in enumerate(answers)]


@pytest.fixture
def gsm8k(here):
    """Six questions as the hub's GSM8K has them: the answer is a whole solution."""
    test = [row | {"answer": f"It is simple.\n#### {row['answer']}"} for row in rows(0, 2, 4, 6, 8, 10)]
    return gsm8k_folder(here / "data" / "gsm8k", test=test)


@pytest.fixture
def amc23(here):
    """Three questions as `proxima data prepare` writes them."""
    table = [row | {"level": i, "source": "made", "messages": "not read"} for i, row in enumerate(rows("1/2", 2, 4))]
    return write_parquet(here / "data" / "amc23" / "test.parquet", table)


SMALL = ("engine.slots=8", "engine.dtype=float32", "runtime.threads=1", "--max-tokens", "6")


@pytest.mark.slow
def test_several_samples_of_a_run_on_a_named_set(done, run, here, gsm8k):
    """Its own evaluation is greedy, and says nothing about a named set."""
    out = done("eval", "run", "--task", "gsm8k", "--samples", "2", "--checkpoint", "1", "--out", "found", *SMALL)
    assert "temperature 1" in out.splitlines()[1]
    result = json.loads((here / "found" / "result.json").read_text())
    assert result["model"]["path"] == "run/checkpoints/000001/model"


def test_a_set_greedy(done, here, tiny_model, gsm8k):
    out = done("eval", tiny_model("llama"), "--task", "gsm8k", "--out", "found", *SMALL)
    lines = out.splitlines()
    assert lines[0].startswith("llama-0  ") and "cpu 1 thread float32  seed 1" in lines[0]
    assert lines[1] == "greedy, up to 6 tokens"
    assert lines[4].split()[:4] == ["gsm8k", "6", "0.000", "0.000–0.390"]
    assert lines[-1] == "written to found" and "raise --max-tokens" in out
    result = json.loads((here / "found" / "result.json").read_text())
    suite = result["suites"]["gsm8k"]
    assert (suite["questions"], suite["answers"], suite["correct"], suite["invalid"]) == (6, 6, 0, 0)
    assert suite["sampling"]["temperature"] == 0.0 and suite["sampling"]["max_tokens"] == 6
    assert (
        len(suite["data"]["sha256"]) == len(result["model"]["sha256"]) == 64 and suite["data"]["source"] == "data/gsm8k"
    )
    assert result["seed"] == 1 and result["versions"]["torch"]


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_bytes(done, proxima, here, tiny_model, gsm8k):
    command = ("eval", tiny_model("llama"), "--task", "gsm8k", "--samples", "4", "--limit", "3", *SMALL)
    for name in ("one", "two"):
        code, _, err = proxima(*command, "--out", name)
        assert code == 0, err
    for file in ("result.json", "gsm8k.parquet"):
        assert (here / "one" / file).read_bytes() == (here / "two" / file).read_bytes(), file
    done(*command, "--out", "three", "--seed", "9")
    assert (here / "one" / "gsm8k.parquet").read_bytes() != (here / "three" / "gsm8k.parquet").read_bytes()


@pytest.mark.slow
def test_several_samples(done, here, tiny_model, gsm8k, amc23):
    words = "--task gsm8k --task amc23 --samples 4 --temperature 0.7 --top-p 0.9 --k 1,2,4 --out o"
    out = done("eval", tiny_model("llama"), *words.split(), *SMALL)
    assert "4 samples per question at temperature 0.7, top_p 0.9, up to 6 tokens" in out
    result = json.loads((here / "o" / "result.json").read_text())
    assert list(result["suites"]) == ["gsm8k", "amc23"] and result["k"] == [1, 2, 4]
    assert {"mean@4", "pass@2", "pass@4", "maj@2", "maj@4"} < set(result["suites"]["gsm8k"]["estimates"])
    table = parquet.read_table(here / "o" / "amc23.parquet").to_pylist()
    assert [(row["row"], row["sample"]) for row in table] == [(i, s) for i in range(3) for s in range(4)]
    row = table[4]
    assert row["question"].startswith("What is 1 + 1?\nPlease reason step by step") and row["answer"] == '"2"'
    assert json.loads(row["metadata"]) == {"level": 1, "source": "made"} and row["length"] == len(row["tokens"]) == 6
    assert (row["finish_reason"], row["valid"], json.loads(row["parts"])) == ("length", True, {"math": 0.0})
    assert row["log_prob_sum"] < 0
    texts = {row["text"] for row in table}
    assert len(texts) > 3  # samples differ


@pytest.mark.slow
def test_a_recipe_and_a_run(done, here, run, tiny_model):
    out = done("eval", "run", "--show", "2", "--out", "of-run")
    lines = out.splitlines()
    assert [line[:6] for line in lines[:2]] == ["wrong ", "wrong "] and "→" in lines[0]
    assert any(line.split()[:3] == ["arithmetic", "3", "0.000"] for line in lines)
    after = parquet.read_table(here / "run" / "evals" / "000002-after.parquet").to_pylist()
    again = parquet.read_table(here / "of-run" / "arithmetic.parquet").to_pylist()
    assert [row["text"] for row in again] == [row["text"] for row in after]
    out = done("eval", tiny_model("llama"), "tiny.yaml", "eval.limit=3", "--json")
    record = json.loads(out)
    assert record["suites"]["arithmetic"]["questions"] == len(record["answers"]["arithmetic"]) == 3
    assert record["answers"]["arithmetic"][0]["question"].startswith("What is ")
    (folder,) = (here / "evals").iterdir()
    assert folder.name.startswith("llama-0-") and record["folder"] == f"evals/{folder.name}"


def test_the_date_that_a_template_renders_is_in_the_result(done, here, tiny_model, gsm8k):
    shutil.copytree(tiny_model("llama"), here / "dated")
    (here / "dated" / "chat_template.jinja").write_text(DATED)
    words = ("--task", "gsm8k", "--limit", "1", *SMALL)
    done("eval", "dated", *words, "data.template_date=2024-07-26", "--out", "dated-found")
    done("eval", tiny_model("llama"), *words, "--out", "found")
    dated, plain = (json.loads((here / name / "result.json").read_text()) for name in ("dated-found", "found"))
    assert dated["suites"]["gsm8k"]["template_date"] == "2024-07-26"
    assert "template_date" not in plain["suites"]["gsm8k"]


def test_a_server_gets_the_weights_that_are_evaluated(done, here, recipe, tiny_model, monkeypatch):
    published = []

    async def publish(engine, update):
        published.append(update.version)

    monkeypatch.setattr(ServerLikeEngine, "publish", publish)
    server = "engine={kind: tests.runtime.server_like:ServerLike}"
    done("eval", tiny_model("llama"), recipe(), server, "eval.limit=1", "--out", "o")
    assert published == [0]


def test_samples_of_a_recipe_are_drawn_as_in_training(done, here, recipe, tiny_model):
    done("eval", tiny_model("llama"), recipe(), "--samples", "2", "--out", "o", "sampling.temperature=0.8")
    suite = json.loads((here / "o" / "result.json").read_text())["suites"]["arithmetic"]
    assert (suite["sampling"]["temperature"], suite["sampling"]["max_tokens"]) == (0.8, 4)
    assert "pass@2" in suite["estimates"]


def write(folder, name, correct):
    """A result of one suite with these right and wrong answers, as `proxima eval` writes it."""
    groups = [group(uid, *(("", SCORES[value]) for value in own)) for uid, own in enumerate(correct)]
    folder.mkdir(exist_ok=True)
    parquet.write_table(completions_table(groups, 0, None), folder / f"{name}.parquet")
    names = json.loads((folder / "result.json").read_text())["suites"] if (folder / "result.json").exists() else {}
    (folder / "result.json").write_text(
        json.dumps({"suites": {**names, name: {"sampling": {"temperature": len(correct[0])}}}})
    )


def test_compare_several_samples_and_suites(done, proxima, here):
    write(here / "a", "one", [[False, False], [True, False], [False, None], [None, None]])
    write(here / "b", "one", [[True, True], [True, False], [True, True], [True, True]])
    write(here / "a", "two", [[False]] * 7)
    write(here / "b", "two", [[True]] * 7)
    out = done("eval", "--compare", "a", "b", "--json")
    output = json.loads(out)["suites"]
    assert list(output) == ["one", "two", "all"]
    assert [output["one"][name] for name in ("questions", "left_out", "won", "tied")] == [3, 1, 2, 1]
    assert output["one"]["p"] == pytest.approx(0.5) and output["two"]["p"] == pytest.approx(2 / 2**7)
    assert output["two"]["test"] == "McNemar, exact"
    assert output["all"]["questions"] == 10 and output["all"]["p"] == pytest.approx(2 / 2**9)
    out = proxima("eval", "--compare", "a", "b")[1]
    assert "the two differ in" not in out
    assert (
        "two: B is better by 1.000 (B − A 95 % " in out
        and "; p = 0.016)" in out
        and "one: 1 questions with an unknown result" in out
    )


def test_compare_names_what_was_sampled_otherwise(proxima, here):
    write(here / "a", "one", [[False]])
    write(here / "b", "one", [[True, True]])
    assert "one: the two differ in `sampling` too" in proxima("eval", "--compare", "a", "b")[1]


def test_compare_names_what_was_lost_and_gained(done, proxima, here):
    write(here / "a", "one", [[True], [True], [False], [False]])
    write(here / "b", "one", [[True], [False], [True], [None]])
    out = done("eval", "--compare", "a", "b", "--show", "3")
    lost, gained = out.index("one: B lost 1 questions:"), out.index("one: B gained 1 questions:")
    (first, *_), (second, *_) = (read_result(here / name).suites["one"].values() for name in "ab")
    assert first.question == second.question
    asked = {uid: question.question for uid, question in read_result(here / "a").suites["one"].items()}
    assert asked[1] in out[lost:gained] and asked[2] in out[gained:] and lost < gained
    assert [line.split()[:2] for line in out[lost:gained].splitlines()[2:4]] == [["A", "right"], ["B", "wrong"]]
    assert "lost" not in done("eval", "--compare", "a", "b").partition("one: ")[2]
    suite = json.loads(done("eval", "--compare", "a", "b", "--show", "3", "--json"))["suites"]["one"]
    assert [(row["question"], row["first"][0], row["second"][0]) for row in suite["lost"]] == [
        (asked[1], [True], [False])
    ]
    assert len(suite["gained"]) == 1 and suite["questions"] == 3
    csv = done("eval", "--compare", "a", "b", "--format", "csv").splitlines()
    assert csv[0].startswith("name,metric,questions,left_out,") and csv[1].startswith("one,accuracy,3,1,")
    assert done("eval", "--compare", "a", "b", "--format", "md").startswith("|  | n | A [95 %] | B [95 %] | B − A |")
    assert proxima("eval", "--compare", "a", "b", "--show", "-1")[0] == 2


def test_compare_two_evaluations_of_runs(done, run):
    out = done("eval", "--compare", "run/evals/000000-before.parquet", "run")
    assert any(line.split()[:2] == ["held-out", "3"] for line in out.splitlines())


def test_compare_refuses(refusal, here):
    write(here / "a", "gsm8k", [[True]] * 4)
    write(here / "b", "gsm8k", [[True]] * 3)
    write(here / "c", "aime24", [[True]] * 3)
    write(here / "c", "aime25", [[True]] * 3)
    write(here / "d", "gsm8k", [[None]] * 4)
    (here / "e").mkdir()
    (here / "e" / "gsm8k.parquet").write_bytes(b"torn")
    for first, second, said in (
        ("a", "b", "gsm8k: the questions differ: 4 questions ("),
        ("a", "b", ") and 3 questions ("),
        ("a", "b", ", 3 in common; evaluate both on the same data"),
        ("a", "c", "no evaluation set in common: a has gsm8k and c has aime24, aime25; evaluate both on the same\n"),
        ("a", "d", "gsm8k: no question has a known reward on both sides"),
        ("a", "nowhere", "nowhere does not exist"),
        ("a", "e", "the evaluation is unfinished: repeat its command, which goes on"),
    ):
        assert said in f"{refusal('eval', '--compare', first, second)}\n"
    (here / "e" / "result.json").write_text((here / "a" / "result.json").read_text())
    assert "e/gsm8k.parquet can't be read as an evaluation" in refusal("eval", "--compare", "e", "a")


def test_a_sweep_and_a_misspelt_run(proxima, here, gsm8k):
    make_run(here / "runs/mine", [step(1)])
    make_sweep(here / "runs/all", {"a": {1: ([step(1)], {})}})
    meant = "does not exist; did you mean 'runs/mine'?"
    for words in ([], ["--task", "gsm8k"]):
        for name, said in (
            ("runs/all", "is a sweep, not a run; name one of its runs, such as runs/all/a/seed-1"),
            ("run/mine", meant),
            ("runs/mein", meant),  # a run was meant
        ):
            assert proxima("eval", name, *words) == (2, "", f"error: {name} {said}\n")


@pytest.mark.slow
def test_a_folder_that_holds_something(proxima, refusal, here, tiny_model, gsm8k):
    command = ("eval", tiny_model("llama"), "--task", "gsm8k", "--limit", "2", *SMALL)
    assert proxima(*command, "--out", "o")[0] == 0
    said = "error: --out o contains an evaluation; replace it with --overwrite, or give another folder"
    assert refusal(*command, "--out", "o") == said
    (here / "o" / "result.json").unlink()  # as a killed evaluation leaves it
    (here / "o" / "notes.txt").write_text("mine")
    assert proxima(*command, "--out", "o", "--overwrite")[0] == 0
    assert (here / "o" / "notes.txt").read_text() == "mine"
    (here / "other").mkdir()
    (here / "other" / "thesis.tex").write_text("mine")
    said = "error: --out other contains files, but no evaluation; give another folder"
    assert refusal(*command, "--out", "other", "--overwrite") == said
    assert "--out other/thesis.tex is a file" in refusal(*command, "--out", "other/thesis.tex")


def test_options_reach_every_set_of_a_recipe(done, here, recipe, tiny_model):
    short = "{name: short, task: {kind: arithmetic, low: 1, high: 5, size: 4, split: test}}"
    text = (here / recipe()).read_text().replace("split: test}}", f"split: test}}, sets: [{short}]}}")
    (here / "tiny.yaml").write_text(text)
    done("eval", tiny_model("llama"), "tiny.yaml", "--limit", "2", "--max-tokens", "3", "--out", "o", *SMALL[:3])
    suites = json.loads((here / "o" / "result.json").read_text())["suites"]
    facts = {name: (suite["questions"], suite["sampling"]["max_tokens"]) for name, suite in suites.items()}
    assert facts == {"arithmetic": (2, 3), "short": (2, 3)}


def test_an_option_without_effect_is_refused(refusal, here, recipe, tiny_model, gsm8k):
    model, named = tiny_model("llama"), ("--task", "gsm8k")
    for words, said in (
        ((model, recipe(), "train.steps=5"), "train.steps=5 (command line): has no effect on this command"),
        ((model, recipe(), "eval.every=5"), "eval.every says when a training evaluates: it has no effect here"),
        ((model, recipe(), "--data", "data"), "data is for named sets; name them with task"),
        ((model, recipe(), "--json-column", "answer"), "json_columns is for named sets"),
        ((model, *named, "sft.loss_on=all_turns"), "--task has its own questions"),
        (("--compare", "a", "b", "--limit", "5"), "--compare generates nothing and writes nothing; leave --limit out"),
        (("--compare", "a", "b", "--max-tokens", "5", "--out", "c"), "leave --max-tokens and --out out"),
    ):
        assert said in refusal("eval", *words), words


def test_a_list_of_answers_in_a_csv_file(done, here, tiny_model):
    (here / "mine.csv").write_text('question,answer\nWhat is 1 + 1?,"[""2"", ""two""]"\n')
    done("eval", tiny_model("llama"), "--task", "math500=mine.csv", "--json-column", "answer", "--out", "o", *SMALL)
    (row,) = parquet.read_table(here / "o" / "math500.parquet").to_pylist()
    assert json.loads(row["answer"]) == ["2", "two"]


def test_broken_data_is_said_with_the_remedy(refusal, here, tiny_model, gsm8k):
    (gsm8k / "test.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": ')
    said = "error: gsm8k: data/gsm8k/test.jsonl:2 is not JSON"
    assert refusal("eval", tiny_model("llama"), "--task", "gsm8k").startswith(said)


def test_a_shown_answer_names_what_was_expected_only_where_the_row_has_it():
    yes = {"completions": (completion("yes"),), "scores": (Score(value=0.5),)}
    groups = [Group(prompt=prompt(answer), **yes) for answer in (None, "7")]
    without, with_answer = graded_lines(groups)
    assert without.endswith("→  yes") and with_answer.endswith("→  yes  (7)")


class Killed(BaseException):
    """As far as the evaluation goes: it ends at once, and nothing is cleaned up by it."""


@contextmanager
def killed_after(count):
    """Evaluations end when that many groups are kept."""
    kept, keep = [], kept_answers.KeptAnswers.add

    def add(self, suite, group):
        kept.append(group)
        keep(self, suite, group)
        if len(kept) == count:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(kept_answers, "SECONDS", 0.0)
        patch.setattr(kept_answers.KeptAnswers, "add", add)
        yield


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(proxima, done, here, tiny_model, gsm8k):
    command = ("eval", tiny_model("llama"), "--task", "gsm8k", "--samples", "2", *SMALL)
    done(*command, "--out", "whole")
    with killed_after(4):
        proxima(*command, "--out", "found")
    assert not (here / "found" / "result.json").exists()
    (here / "found" / "answered" / "gsm8k.9.part").write_bytes(b"half of a file")
    said = "--out found contains an unfinished evaluation with other settings: seed; repeat the command that began it"
    code, out, err = proxima(*command, "--out", "found", "--seed", "2")
    assert code == 2
    assert said in err
    code, out, err = proxima(*command, "--out", "found")
    assert code == 0
    assert "4 of 6 questions of gsm8k were answered before this command was repeated" in out + err
    for file in ("result.json", "gsm8k.parquet"):
        assert (here / "found" / file).read_bytes() == (here / "whole" / file).read_bytes()
    assert sorted(entry.name for entry in (here / "found").iterdir()) == sorted(
        entry.name for entry in (here / "whole").iterdir()
    )


@pytest.mark.slow
def test_a_killed_evaluation_begins_anew_if_asked_to(proxima, here, tiny_model, gsm8k):
    command = ("eval", tiny_model("llama"), "--task", "gsm8k", *SMALL, "--out", "found")
    with killed_after(3):
        proxima(*command)
    code, out, err = proxima(*command, "--overwrite", "--seed", "2")
    assert code == 0
    assert "were answered before" not in out + err
    assert json.loads((here / "found" / "result.json").read_text())["seed"] == 2
