"""The whole way, from published files to a folder that trains and is asked."""

import hashlib
import json
import os
from functools import partial
from pathlib import Path

import pytest

from proxima.prepare.catalog import PrepareOptions
from proxima.prepare.dataset_card import read_card, verify_folder
from proxima.prepare.decontaminate import EvalSet
from proxima.prepare.locate import locate_files
from proxima.prepare.pipeline import load_eval_set, prepare, refuse_existing, sibling_eval_sets
from proxima.prepare.write_files import COLUMNS
from proxima.system.atomic_files import atomic_folder
from proxima.task.local_files import PREPARED

from .published import AFTER, BEFORE, GSM8K_TRAIN, LONG, PARTS, gsm8k_folder, lines, table, write_dapo

FRUIT = ("apples", "pears", "plums", "figs", "limes")


def make(name, place, out, *, eval_sets=(), overwrite=False, **options):
    source = locate_files(PARTS[name], str(place))
    return prepare(PARTS[name], source, out, PrepareOptions(**options), eval_sets=eval_sets, overwrite=overwrite)


def balanced(card):
    """Every row is somewhere."""
    for counts in card["counts"].values():
        assert counts["rows"] == counts["unreadable_rows"] + counts["repeats"] + counts["questions"]
        assert (
            counts["questions"]
            == counts["conflicts_dropped"] + counts["contaminated"] + counts["train"] + counts["test"]
        )
    return card["counts"]


def test_gsm8k(tmp_path):
    done = make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "data" / "gsm8k")
    counts = balanced(done.card)
    assert counts["train"] | {"train": 3, "rows": 3} == counts["train"] and counts["test"]["test"] == 2
    train = table(tmp_path / "data" / "gsm8k" / "train.parquet")
    assert list(train[0]) == list(COLUMNS)
    assert [row["answer"] for row in train] == ["24", "7", "70000"]
    assert train[1]["question"] == GSM8K_TRAIN[1]["question"] and train[1]["solution"] == "3+4=<<3+4=7>>7"
    assert (train[2]["source"], train[2]["row"], train[2]["repeats"], train[2]["level"]) == ("train.jsonl", 2, 1, None)
    asked = GSM8K_TRAIN[1]["question"] + "\nThink step by step, then give the final number after ####."
    assert train[1]["messages"] == [{"role": "user", "content": asked}]
    assert ["3 distinct train" in done.notes[0], "2 distinct test" in done.notes[1]] == [True, True]


def dapo_rows(questions=50, times=8):
    rows = [
        (LONG.format(n=i) + f" He likes {FRUIT[i % 5]} number {i} of {i + 1}.", str(i), f"id-{i}")
        for i in range(questions)
    ]
    return rows * times


def test_dapo_is_each_question_once_with_a_held_out_side(tmp_path):
    path = write_dapo(tmp_path / "dapo-math-17k.parquet", dapo_rows(), row_group_size=37)
    done = make("dapo-math", path, tmp_path / "data" / "dapo-math", held_out=0.3, words=0)
    counts = balanced(done.card)["train"]
    assert (counts["rows"], counts["repeats"], counts["questions"]) == (400, 350, 50)
    sides = {side: table(done.folder / f"{side}.parquet") for side in ("train", "test")}
    assert counts["train"] == len(sides["train"]) and counts["test"] == len(sides["test"])
    assert 5 < len(sides["test"]) < 30 and len(sides["train"]) + len(sides["test"]) == 50
    first = sides["train"][0]
    assert first["repeats"] == 8 and first["messages"][0]["content"] == BEFORE + first["question"] + AFTER
    # a question stays on its side whatever else is there, and rows keep the source's order
    fewer = write_dapo(tmp_path / "fewer.parquet", dapo_rows(25, 1))
    again = make("dapo-math", fewer, tmp_path / "data" / "fewer", held_out=0.3, words=0)
    test = [row["id"] for row in table(again.folder / "test.parquet")]
    assert test == [row["id"] for row in sides["test"] if row["id"] in test]
    assert {row["id"] for row in table(again.folder / "train.parquet")} <= {row["id"] for row in sides["train"]}
    assert [row["row"] for row in sides["train"]] == sorted(row["row"] for row in sides["train"])


def test_conflicts_unreadable_and_contaminated_are_listed(tmp_path):
    rows = [
        ("How many apples are left?", "1"),
        ("How many apples are left?", "2"),
        ("How many pears are left?", "3"),
        ("How many figs are left?", "many"),
        (LONG.format(n=7), "7"),
        ("Find the answer of AIME?", "9"),
    ]
    path = write_dapo(tmp_path / "d.parquet", rows)
    eval_set = EvalSet("aime24", ["Other?", "Find the  answer of AIME?", LONG.format(n=8)], "0" * 64)
    done = make("dapo-math", path, tmp_path / "out", held_out=0, max_unreadable=0.5, eval_sets=[eval_set])
    counts = balanced(done.card)["train"]
    listed = {"unreadable": 1, "conflicts": 1, "conflicts_dropped": 1, "contaminated": 2, "train": 1, "test": 0}
    assert counts.items() >= listed.items()
    assert [row["question"] for row in table(done.folder / "train.parquet")] == ["How many pears are left?"]
    assert not (done.folder / "test.parquet").exists()
    (conflict,) = lines(done.folder / "conflicts.jsonl")
    assert conflict == {
        "side": "train",
        "question": "How many apples are left?",
        "answers": {"1": 1, "2": 1},
        "kept": None,
    }
    (unreadable,) = lines(done.folder / "unreadable.jsonl")
    assert (unreadable["question"], unreadable["answer"], unreadable["row"]) == ("How many figs are left?", "many", 3)
    long, same = lines(done.folder / "contaminated.jsonl")
    assert same["meets"] == [{"set": "aime24", "row": 1, "same": True, "run": None}]
    assert long["meets"][0]["row"] == 2 and long["meets"][0]["run"].startswith("goats on a steep meadow")
    (against,) = done.card["overlap"]["against"]
    assert (against["left_out"], against["same_text"], against["sha256"]) == (2, 1, "0" * 64)
    kept = make("dapo-math", path, tmp_path / "first", held_out=0, max_unreadable=0.5, conflicts="first")
    assert lines(kept.folder / "conflicts.jsonl")[0]["kept"] == "1" and balanced(kept.card)["train"]["train"] == 4


def test_a_training_question_that_meets_the_own_test_side_is_left_out(tmp_path):
    test = [
        {"question": LONG.format(n=99), "answer": "#### 198"},
        {"question": "Ann has 3 pens and buys 4. How many  now?", "answer": "#### 7"},
    ]
    done = make("gsm8k", gsm8k_folder(tmp_path / "raw", test=test), tmp_path / "out")
    assert balanced(done.card)["train"]["contaminated"] == 2 and done.card["counts"]["test"]["test"] == 2
    exact = make("gsm8k", tmp_path / "raw", tmp_path / "exact", words=0)
    assert balanced(exact.card)["train"]["contaminated"] == 1


def test_held_out_questions_are_held_out_of_training_by_their_words_too(tmp_path):
    """With every question of one wording, those on the training side meet those held out."""
    rows = [(LONG.format(n=i), str(i)) for i in range(40)]
    path = write_dapo(tmp_path / "d.parquet", rows)
    with pytest.raises(ValueError, match="no train question is left of 40 rows"):
        make("dapo-math", path, tmp_path / "all", held_out=0.5, common=0)
    assert not (tmp_path / "all").exists() and os.listdir(tmp_path) == ["d.parquet"]
    phrase = make("dapo-math", path, tmp_path / "phrase", held_out=0.5)  # more than ten say the same: a phrase
    assert phrase.card["overlap"]["phrases_ignored"] > 5 and balanced(phrase.card)["train"]["contaminated"] == 0


def test_the_same_bytes_wherever_and_whenever(tmp_path):
    for place in ("a", "b/c"):
        write_dapo(tmp_path / place / "in" / "d.parquet", dapo_rows(20, 3))
        make("dapo-math", tmp_path / place / "in" / "d.parquet", tmp_path / place / "out", held_out=0.2)
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "a" / "out" / name).read_bytes() == (tmp_path / "b/c" / "out" / name).read_bytes()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a" / "out").iterdir()}
    make("dapo-math", tmp_path / "a" / "in" / "d.parquet", tmp_path / "a" / "out", held_out=0.2, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "out").iterdir()} == before


def test_the_card_says_how_to_get_it_again(tmp_path):
    done = make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "out", template="boxed", system="Be brief.")
    card = read_card(done.folder)
    assert card == done.card and card["reward"] == "math"  # what reads a box
    assert card["prompt"] == {
        "template": "boxed",
        "text": "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        "system": "Be brief.",
    }
    train = next(iter(card["inputs"]["train"]))
    assert train == {
        "file": "train.jsonl",
        "bytes": (tmp_path / "raw" / "train.jsonl").stat().st_size,
        "sha256": hashlib.sha256((tmp_path / "raw" / "train.jsonl").read_bytes()).hexdigest(),
    }
    text = (done.folder / "README.md").read_text()
    assert (
        "| in train.parquet | 0 | 3 |" in text
        and "    Be brief." in text
        and "task: {kind: prepared, path: data/gsm8k}" in text
    )
    assert str(tmp_path) not in json.dumps({**card, "source": None})


def test_too_many_unreadable_answers(tmp_path):
    rows = [*GSM8K_TRAIN, {"question": "Why?", "answer": "because"}]
    gsm8k_folder(tmp_path / "raw", train=rows)
    with pytest.raises(
        ValueError,
        match=r"gsm8k: 1 of 4 train questions \(25.0%\) can't be used; the first, .*train.jsonl row 3, has an "
        r"answer .* no ####: 'because'",
    ):
        make("gsm8k", tmp_path / "raw", tmp_path / "out")
    assert os.listdir(tmp_path) == ["raw"]
    done = make("gsm8k", tmp_path / "raw", tmp_path / "out", max_unreadable=0.25)
    assert balanced(done.card)["train"]["unreadable"] == 1


def test_no_rows(tmp_path):
    path = write_dapo(tmp_path / "d.parquet", [])
    with pytest.raises(ValueError, match=r"dapo-math: no train question is left of 0 rows \(no rows\)"):
        make("dapo-math", path, tmp_path / "out")


def test_held_out_where_there_is_a_test_side(tmp_path):
    gsm8k_folder(tmp_path / "raw")
    with pytest.raises(ValueError, match="held_out=0.1: gsm8k from .* has its own test split; leave it out"):
        make("gsm8k", tmp_path / "raw", tmp_path / "out", held_out=0.1)
    only = make("gsm8k", tmp_path / "raw" / "train.jsonl", tmp_path / "out", held_out=0.5)
    assert any("has no test split; 50% of the questions are held out" in note for note in only.notes)


# Folders


def test_a_folder_that_is_not_finished_leaves_the_former_one(tmp_path):
    make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "out")
    before = (tmp_path / "out" / "card.json").read_bytes()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert (tmp_path / "out" / "card.json").read_bytes() == before and sorted(os.listdir(tmp_path)) == ["out", "raw"]


def test_of_two_that_make_a_folder_the_first_wins(tmp_path):
    """The second one leaves the first one's files alone, and a killed process's folder is of no consequence."""
    (tmp_path / ".out.1").mkdir()
    with (
        pytest.raises(ValueError, match="out exists; use --overwrite"),
        atomic_folder(tmp_path / "out", partial(refuse_existing, overwrite=False)),
    ):
        make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "out")
    assert read_card(tmp_path / "out") and sorted(os.listdir(tmp_path)) == [".out.1", "out", "raw"]
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "card.json").write_text("second")
    assert os.listdir(tmp_path / "out") == ["card.json"]


@pytest.mark.slow
def test_a_kill_between_the_renames_leaves_the_former_folder_whole(tmp_path, monkeypatch):
    gsm8k_folder(tmp_path / "raw")
    before = (make("gsm8k", tmp_path / "raw", tmp_path / "out").folder / "train.parquet").read_bytes()
    rename = Path.rename

    def killed(path, target):
        if path.suffix in (".part", ".old"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        make("gsm8k", tmp_path / "raw", tmp_path / "out", overwrite=True)
    (former,) = tmp_path.glob(".out.*.old")
    assert (former / "train.parquet").read_bytes() == before and verify_folder(former)["README.md"] == "same"


def test_a_linked_folder_is_replaced_where_it_is(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "card.json").write_text("first")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "card.json").write_text("second")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "card.json").read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == ["disk", "out"]


def test_check(tmp_path):
    folder = make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "out").folder
    with (folder / "train.parquet").open("ab") as file:
        file.write(b"x")
    (folder / "test.parquet").unlink()
    (folder / "more.parquet").write_bytes(b"")
    assert verify_folder(folder) == {
        "test.parquet": "missing",
        "train.parquet": "altered",
        "README.md": "same",
        "more.parquet": "extra",
    }
    (folder / "card.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read"):
        verify_folder(folder)
    (folder / "card.json").write_text("[]")
    with pytest.raises(ValueError, match="not a card of format 1"):
        verify_folder(folder)


# Evaluation sets


@pytest.mark.slow
def test_evaluation_sets_of_every_kind(tmp_path):
    raw = gsm8k_folder(tmp_path / "raw")
    made = make("gsm8k", raw, tmp_path / "data" / "gsm8k").folder
    questions = ["Bo has 9 nuts and eats 2. How many are left?", "How many legs have 4 cows?"]
    for place, name in ((made, "gsm8k"), (made / "test.parquet", "gsm8k"), (raw, "raw"), (raw / "test.jsonl", "raw")):
        result = load_eval_set(str(place))
        assert (result.name, list(result.questions)) == (name, questions), place
    wrapped = write_dapo(tmp_path / "aime.parquet", [("1?", "1")] * 32)
    assert list(load_eval_set(str(wrapped)).questions) == ["1?"]
    half = tmp_path / "half.jsonl"
    half.write_text('{"question": "a \\ud800 b", "answer": "1"}\n{"question": "c", "answer": "1"}\n')
    assert list(load_eval_set(str(half)).questions) == ["a ? b", "c"]
    empty = write_dapo(tmp_path / "empty.parquet", [])
    with pytest.raises(ValueError, match="has no questions"):
        load_eval_set(str(empty))


@pytest.mark.slow
def test_what_lies_beside(tmp_path):
    make("gsm8k", gsm8k_folder(tmp_path / "raw"), tmp_path / "data" / "gsm8k")
    source = write_dapo(tmp_path / "d.parquet", dapo_rows())
    make("dapo-math", source, tmp_path / "data" / "split-off", held_out=0.3, words=0)
    make("dapo-math", source, tmp_path / "data" / "only-train", held_out=0)
    assert sibling_eval_sets(tmp_path / "data" / "new") == [str(tmp_path / "data" / "gsm8k")]
    assert sibling_eval_sets(tmp_path / "data" / "gsm8k") == []
    with pytest.raises(ValueError, match=r"has no test.parquet: nothing is evaluated on it"):
        load_eval_set(str(tmp_path / "data" / "only-train"))


# In a recipe


def test_what_a_missing_folder_says_is_what_can_be_made():
    assert set(PREPARED) == set(PARTS)
