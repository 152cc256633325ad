"""`proxima data`, as a user types it."""

import json
import os

import pytest

from tests.prepare.published import (
    go_offline,
    gsm8k_folder,
    lines,
    math500_row,
    math_row,
    table,
    write_dapo,
    write_jsonl,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    go_offline(monkeypatch, tmp_path / "caches")


@pytest.mark.slow
def test_prepare_check(done, proxima, refusal, here):
    gsm8k_folder(here / "raw")
    code, out, err = proxima("data", "prepare", "gsm8k", "--from", "raw", "--system", "Be brief.")
    assert (code, err) == (0, "")
    assert "  wrote data/gsm8k/train.parquet  3 rows" in out.splitlines()
    assert "  in a recipe: task: {kind: prepared, path: data/gsm8k}" in out.splitlines()
    card = json.loads((here / "data/gsm8k/card.json").read_text())
    assert card["command"] == "proxima data prepare gsm8k --from raw --system 'Be brief.'"
    assert "| rows read | 2 | 3 |" in (here / "data/gsm8k/README.md").read_text()
    out = done("data", "check", "data/gsm8k")
    assert out.splitlines()[0] == "same     data/gsm8k/test.parquet"
    (here / "data/gsm8k/test.parquet").write_bytes(b"x")
    code, out, _ = proxima("data", "check", "data/gsm8k")
    assert code == 1 and "altered  data/gsm8k/test.parquet" in out and "1 of 3 files do not match the card" in out
    assert json.loads(proxima("data", "check", "data/gsm8k", "--json")[1])["bad"] == 1
    exists = "error: data/gsm8k exists; use --overwrite to replace it"
    assert refusal("data", "prepare", "gsm8k", "--from", "raw").startswith(exists)
    assert proxima("data", "prepare", "gsm8k", "--from", "raw", "--overwrite", "--quiet")[0] == 0
    assert proxima("data", "check", "data/gsm8k")[0] == 0


@pytest.mark.slow
def test_a_dry_run(done, proxima, here):
    gsm8k_folder(here / "raw")
    out = done("data", "prepare", "gsm8k", "--from", "raw", "--dry-run")
    assert "would write data/gsm8k/train.parquet  3 rows" in out and os.listdir(here) == ["raw"]
    (card,) = json.loads(proxima("data", "prepare", "gsm8k", "--from", "raw", "--dry-run", "--json")[1])
    assert card["counts"]["train"]["rows"] == 3


@pytest.mark.slow
def test_aime_by_name_and_what_is_trained_on_is_compared_with_it(done, proxima, here):
    write_dapo(here / "aime_2024.parquet", [(f"Find the answer {i}?", str(i)) for i in range(30)] * 32)
    write_jsonl(
        here / "b.jsonl", [{"problem": f"Find {i} of 2025?", "answer": str(i), "id": str(i)} for i in range(30)]
    )
    code, out, err = proxima(
        "data", "prepare", "aime", "--from", "aime24=aime_2024.parquet", "--from", "aime25=b.jsonl"
    )
    assert (code, err) == (0, "") and sorted(os.listdir(here / "data")) == ["aime24", "aime25"]
    assert " 930 repeats " in out
    rows = [("Find the answer 3?", "3"), ("Something else?", "4"), ("Something more?", "5")] * 100
    write_dapo(here / "dapo.parquet", rows)
    again = ("data", "prepare", "dapo-math", "--from", "dapo.parquet", "--held-out", "0")
    out = done(*again)
    assert "1 contaminated aime24 1; contaminated.jsonl" in out and "  compared with aime24, aime25" in out.splitlines()
    assert [row["question"] for row in table(here / "data/dapo-math/train.parquet")] == [
        "Something else?",
        "Something more?",
    ]
    assert lines(here / "data/dapo-math/contaminated.jsonl")[0]["meets"][0]["set"] == "aime24"
    out = done(*again, "--out", "x/all", "--against")
    assert (
        "compared with no evaluation set; prepare some first, or name them with --against" in out
        and len(table(here / "x/all/train.parquet")) == 3
    )
    out = done(*again, "--out", "x/two", "--against", "data/aime25", "b.jsonl")
    assert "  compared with aime25, b.jsonl" in out.splitlines()


def test_one_year_alone(done, proxima, here):
    write_jsonl(here / "b.jsonl", [{"problem": "Find 1?", "answer": "1"}])
    assert proxima("data", "prepare", "aime", "--from", "aime25=b.jsonl", "--out", "sets")[0] == 0
    assert os.listdir(here / "sets") == ["aime25"]
    out = done("data", "prepare", "aime25", "--from", "b.jsonl", "--out", "alone")
    assert "note: aime25: 1 distinct test questions, 30 are published" in out
    assert sorted(os.listdir(here / "alone")) == ["README.md", "card.json", "test.parquet"]


@pytest.mark.slow
def test_math_brings_math500(done, proxima, here):
    for subset in ("algebra", "geometry"):
        write_jsonl(here / "raw" / subset / "train.jsonl", [math_row(f"{subset} {i}?", i) for i in range(4)])
        write_jsonl(here / "raw" / subset / "test.jsonl", [math_row(f"{subset} test?", 9)])
    code, out, err = proxima("data", "prepare", "math", "--from", "raw", "--out", "sets/math")
    assert (
        code == 0
        and err.startswith("not prepared: math500: HuggingFaceH4/MATH-500 is not in the cache")
        and "8 rows" in out
    )
    write_jsonl(here / "m500.jsonl", [math500_row("geometry  2?", "2", "test/1.json")])
    code, out, err = proxima("data", "prepare", "math", "--from", "raw", "--from", "math500=m500.jsonl")
    assert (code, err) == (0, "") and sorted(os.listdir(here / "data")) == ["math", "math500"]
    assert (
        "1 contaminated math500 1; contaminated.jsonl" in out
        and "  compared with math500, its own test split" in out.splitlines()
    )
    before = json.loads((here / "data/math/card.json").read_text())["overlap"]
    out = done("data", "prepare", "math", "--from", "raw", "--overwrite")
    assert "compared with math500, its own test split" in out  # what lies beside, as it was
    assert json.loads((here / "data/math/card.json").read_text())["overlap"] == before


def test_a_full_disk_leaves_nothing(refusal, here, monkeypatch):
    gsm8k_folder(here / "raw")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    said = "No space left on device; nothing was written; free some space, or give another --out"
    assert refusal("data", "prepare", "gsm8k", "--from", "raw") == f"error: data/gsm8k: {said}"
    assert os.listdir(here) == ["raw"]


@pytest.mark.slow
def test_a_run_trains_on_it(done, proxima, here, recipe):
    rows = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(12)]
    gsm8k_folder(here / "raw", train=rows)
    prepared = "{kind: prepared, path: data/gsm8k, split: %s}"
    (here / "r.yaml").write_text(
        f"extends: {recipe()}\ntask: {prepared % 'train'}\n"
        "reward: [gsm8k, {kind: format, pattern: '[!-?]', weight: 0.1}]\n"
        f"train: {{steps: 1}}\neval: {{task: {prepared % 'test'}}}\n"
    )
    said = "no such folder; make it: proxima data prepare gsm8k\n"  # of both tasks at once
    both = (f"error: task.path=data/gsm8k (r.yaml:2): {said}", f"error: eval.task.path=data/gsm8k (r.yaml:5): {said}")
    assert proxima("train", "r.yaml", "--quiet")[::2] == (2, "".join(both))
    file = "task={kind: parquet, path: data/gsm8k/train.parquet}"
    assert "no such file; make it: proxima data prepare gsm8k" in proxima("train", "r.yaml", "--quiet", file)[2]
    assert proxima("data", "prepare", "gsm8k", "--from", "raw", "--words", "0")[0] == 0
    done("train", "r.yaml", "--quiet", "folder=run")
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["eval"]["after"]["questions"] == 2
    with_template = "task={kind: parquet, path: data/gsm8k/train.parquet, messages: messages}"
    assert proxima("train", "r.yaml", "--quiet", "folder=run2", with_template)[0] == 0
