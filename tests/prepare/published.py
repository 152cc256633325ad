"""Small copies of published files, in the forms they really have; the rows are ours."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from proxima.prepare.catalog import SOURCES

PARTS = {part.name: part for parts in SOURCES.values() for part in parts}

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) "
    "where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
CHAT = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
DAPO = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", CHAT),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)
LONG = (  # long enough for runs of 13 words
    "A farmer in the north keeps {n} goats on a steep meadow and sells each of them at the spring market for twice "
    "the price "
    "that he paid in the autumn before; how much?"
)


def dapo_row(question, answer, index="a"):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": BEFORE + question + AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write_dapo(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([dapo_row(*row) for row in rows], schema=DAPO), path, **options)
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


GSM8K_TRAIN = [
    {"question": LONG.format(n=12), "answer": "He gets 12*2=<<12*2=24>>24.\n#### 24"},
    {"question": "Ann has 3 pens and buys 4. How many now?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "What is the house worth?", "answer": "2*35,000=<<2*35000=70000>>70,000\n#### 70,000"},
]
GSM8K_TEST = [
    {"question": "Bo has 9 nuts and eats 2. How many are left?", "answer": "9-2=<<9-2=7>>7\n#### 7"},
    {"question": "How many legs have 4 cows?", "answer": "4*4=<<4*4=16>>16\n#### 16"},
]


def gsm8k_folder(path, train=GSM8K_TRAIN, test=GSM8K_TEST):
    write_jsonl(path / "train.jsonl", train)
    if test is not None:
        write_jsonl(path / "test.jsonl", test)
    return path


def math_row(problem, boxed, level="Level 3", kind="Algebra"):
    return {"problem": problem, "level": level, "type": kind, "solution": f"We see that it is $\\boxed{{{boxed}}}$."}


def math500_row(problem, answer, name):
    return {"problem": problem, "solution": "", "answer": answer, "subject": "Algebra", "level": 2, "unique_id": name}


def table(path):
    return parquet.read_table(path).to_pylist()


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def go_offline(monkeypatch, folder):
    """No network; the caches are below this folder, and empty."""
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
