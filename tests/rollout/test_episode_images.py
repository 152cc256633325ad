"""Environments that answer with images: their tokens, log-probs and files in a run, with its engine here and in another
process."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from proxima.cli.main import main
from proxima.data.image_tokens import image_and_patch
from tests.campaigns import campaign
from tests.tiny_images import make_tiny_reader

RUN = (
    *("reward=environment", "eval.task=null", "model.compute_dtype=float32", "episode.tokens=null", "train.steps=2"),
    *("train.prompts_per_step=2", "train.completions_per_prompt=3", "sampling.max_tokens=60", "train.warmup_steps=1"),
    *("sampling.stop=[e,a,t,s,o,n,i,1,2,3]", "episode.images=true"),
)


AS_THE_ENGINE_DID = (
    "tests/rollout/test_episode_images.py::test_answers_show_images_and_the_trainer_reads_them_as_the_engine_did"
)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return make_tiny_reader(request.param, tmp_path_factory.mktemp(request.param))


def play(model, folder, engine="local"):
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"What is {n}?", "answer": "1"}) + "\n" for n in range(4)))
    task = f"task={{kind: jsonl, path: {rows}, environment: {{kind: 'tests.rollout.drawing_environment:Drawing'}}}}"
    spec = f"engine={{kind: {engine}, dtype: float32, slots: 16}}"
    return main(["train", "cpu/guess", f"model.path={model}", task, spec, *RUN, f"folder={folder}", "--quiet"])


def images_of(tokens):
    """The number of images among tokens."""
    return len({int(image_and_patch(np.int32(token))[0]) for token in tokens if token < 0})


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", *campaign(AS_THE_ENGINE_DID, ["qwen3_vl"])], indirect=True)
def test_answers_show_images_and_the_trainer_reads_them_as_the_engine_did(model, tmp_path):
    assert play(model, tmp_path / "run") == 0
    steps = metrics(tmp_path / "run")
    assert all(abs(step[f"mismatch/rollout_is_{end}"] - 1) < 1e-4 for step in steps for end in ("min", "max"))
    rows = pq.read_table(next((tmp_path / "run" / "rollouts").glob("*.parquet"))).to_pylist()
    assert {images_of(row["prompt_tokens"]) for row in rows} == {2}
    assert max(images_of(row["tokens"]) for row in rows) == 2
    names = (tmp_path / "run" / "images" / "index.txt").read_text().split()
    assert len(names) == len(set(names)) == len(list((tmp_path / "run" / "images").glob("*.png")))
    if "gemma3" in str(model):
        return  # one engine in another process is enough
    assert play(model, tmp_path / "other", "local_process") == 0
    assert [step["loss"] for step in metrics(tmp_path / "other")] == [step["loss"] for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_an_agent_shows_images_in_each_api(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": "x", "answer": "1", "number": n % 2}) + "\n" for n in range(4)))
    task = f"task={{kind: jsonl, path: {rows}, environment: {{kind: agent, run: 'tests.rollout.drawing_agent:play'}}}}"
    spec = ("engine={kind: local, dtype: float32, slots: 16}", f"folder={tmp_path / 'run'}", "--quiet")
    assert main(["train", "cpu/guess", f"model.path={model}", task, *RUN, *spec, "episode.turns=8"]) == 0
    steps = metrics(tmp_path / "run")
    assert all(step["episode/failed"] == 0 and abs(step["mismatch/rollout_is_max"] - 1) < 1e-4 for step in steps)
    files = sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))
    shown = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert {images_of(row["opening"] or row["prompt_tokens"]) for row in shown} == {1}
    assert len((tmp_path / "run" / "images" / "index.txt").read_text().split()) == 2
