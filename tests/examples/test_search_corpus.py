"""The corpus of recipes/search.yaml, and two steps of the recipe with it."""

import json
import shutil
from pathlib import Path

import pytest

from examples.search_corpus import main
from proxima.config.resolution import resolve
from proxima.environment.builtin import Search
from proxima.runtime.launch.run import train
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.system.user_files import find_recipe

pytestmark = pytest.mark.slow

CORPUS = Path("runs/search_corpus")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(CORPUS)
    return {name: [json.loads(line) for line in open(CORPUS / f"{name}.jsonl")] for name in ("train", "test")}


def test_searches_find_the_answer_and_no_held_out_person_is_trained_on(corpus):
    pytest.importorskip("bm25s")
    search = Search(str(CORPUS / "passages.jsonl"), top=1).search
    people = {}
    for part, rows in corpus.items():
        for row in rows:
            kind, _, name = row["messages"][-1]["content"].strip("?").removeprefix("What is the ").partition(" of ")
            assert search(f"{kind} {name}") == f"[1] The {kind} of {name} is {row['answer']}."
            people.setdefault(part, set()).add(name)
    assert len(people["test"]) == 40 and not people["test"] & people["train"]
    before = (CORPUS / "train.jsonl").read_bytes()
    main(CORPUS)
    assert (CORPUS / "train.jsonl").read_bytes() == before


def test_two_steps_of_the_recipe(corpus, tiny_model, tmp_path):
    pytest.importorskip("bm25s")
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    sizes = ["train.steps=2", "train.prompts_per_step=2", "train.completions_per_prompt=4", "eval.limit=2"]
    varied = "reward=[{kind: exact, ignore_case: true}, {kind: format, pattern: '[!-?]', weight: 0.5}]"
    places = [
        varied,
        f"model.path={model}",
        "model.device=cpu",
        "runtime.threads=1",
        "folder=run",
        "checkpoint.every=0",
    ]
    resolved = resolve(find_recipe("search"), [*places, *sizes])
    assert train(resolved.config, resolved=resolved).status == "done"
    folder = RunFolder(Path("run"))
    assert [record["kind"] for record in folder.read_metrics()] == ["eval", "train", "train", "eval"]
    rows = [row for step in (1, 2) for row in read_rows(folder.rollout_file(step))]
    assert len(rows) == 16 and all(row["valid"] and row["reward"] in (0.0, 0.5, 1.0, 1.5) for row in rows)
