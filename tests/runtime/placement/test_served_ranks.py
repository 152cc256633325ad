"""Runs on several ranks whose engine is a server: it is a fake that computes with a real model, so that the probes of
the run prove what it has been sent."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proxima.training.checkpoint import checkpoints
from tests import ray_cluster
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
from tests.runtime.placement.launched import ROOT, launched, ranked
from tests.runtime.tiny_run import NO_EVAL

Tiny = Callable[..., Path]


def few_steps(model: Path, folder: Path, server: RawServer) -> list[str]:
    engine = {"kind": "vllm", "url": server.url, "probe_tokens": 32}
    return ranked(model, folder, engine=engine, train__steps=2, train__prompts_per_step=2, **NO_EVAL)


def check(folder: Path, server: RawServer) -> None:
    """The server has been proven, and has the weights of the last step, bit for bit."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["sync/replicas"] for row in rows] == [1, 1]
    assert max(row["sync/probe_max"] for row in rows) < 1e-4
    assert isinstance(server.fake, ModelVllm)
    files = sorted(checkpoints(folder / "checkpoints")[-1].path.rglob("model*.safetensors"))
    trained = {name: weight for file in files for name, weight in load_file(file).items()}
    weights = dict(server.fake.model.named_parameters())
    assert trained.keys() == weights.keys() and all(torch.equal(trained[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_a_server_of_a_run_by_torchrun(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    with RawServer(ModelVllm(str(model))) as server:
        code, printed = launched(few_steps(model, tmp_path / "run", server), output=tmp_path / "out")
        assert code == 0, printed
        check(tmp_path / "run", server)


@pytest.mark.campaign("tests/runtime/placement/test_served_ranks.py::test_a_server_of_a_run_by_torchrun")
def test_a_server_of_a_run_on_ray(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    with RawServer(ModelVllm(str(model))) as server:
        words = few_steps(model, tmp_path / "run", server)
        words += ["placement={kind: ray, ranks: 2, restarts: 0, gpus_per_rank: 0, cpus_per_rank: 0.25}"]
        environment = os.environ | {"RAY_TMPDIR": ray_cluster.folder(), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "out").open("wb") as out:
            command = [sys.executable, "-m", "proxima.cli.main", "train", *words]
            code = subprocess.run(command, stdout=out, stderr=out, env=environment, cwd=ROOT, timeout=400).returncode
        assert code == 0, (tmp_path / "out").read_text()[-6000:]
        check(tmp_path / "run", server)
