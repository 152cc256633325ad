"""A real SGLang server: what it can do, the laws of engines, training, weights in flight, aborts, kills and experts.

PROXIMA_SGLANG names its environment, which `proxima engine install sglang` makes; on a CPU a server starts in one to
three minutes, and the laws have deadlines that a busy machine may miss. The law of determinism is skipped on a CPU,
where SGLang has no attention that is deterministic.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxima.engine.http.answer_values import RouteShape
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.replica import Replica
from proxima.engine.http.sglang import Sglang, SglangDialect
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.laws.engine_case import requests
from proxima.laws.engine_laws import check_engine
from proxima.laws.law import LawResult
from proxima.model.load import load
from proxima.runtime.state.folder import RunFolder
from tests.engine.http.live_sglang import live_sglang, needs_sglang, serve_section
from tests.engine.http.record_sglang import ROUTES, Recorder, record
from tests.engine.http.test_sglang_recordings import RECORDED, differences
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import NO_EVAL, go, recipe, steps_of
from tests.tiny import make_tiny

SIBLING = "tests/engine/http/test_sglang_recordings.py::test_recorded_streams_are_read"
pytestmark = [pytest.mark.campaign(SIBLING), needs_sglang]
KILLS = int(os.environ.get("PROXIMA_ROUNDS", "5"))
ON_A_CPU = {"determinism"}  # laws that are skipped there


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[str]:
    with live_sglang(tmp_path_factory.mktemp("sglang"), model) as url:
        yield url


def failed(results: Iterator[LawResult]) -> list[str]:
    """The laws that did not pass, without those that are skipped on a CPU."""
    return [
        f"{r.law.name}: {r.status} {r.detail}" for r in results if r.status != "passed" and r.law.name not in ON_A_CPU
    ]


async def test_what_it_can_do(url: str, model: Path) -> None:
    client = ServerClient(Address(url))
    facts = await SglangDialect().probe(client)
    health = await SglangDialect().health(client, facts)
    await client.close()
    assert facts.server.startswith("sglang 0.5.") and facts.model == str(model) and facts.max_length == 250
    assert facts.log_probs == "untruncated" and facts.version_spans and facts.sampling_mask
    assert facts.largest_mask == 4096 and health.waiting == 0


@pytest.mark.parametrize("masks", [False, True])
def test_all_laws(masks: bool, url: str, model: Path) -> None:
    skipped = {"sampling_masks"} if not masks else set[str]()
    results = [r for r in check_engine(Sglang(url=url, sampling_mask=masks), str(model)) if r.law.name not in skipped]
    assert len(results) >= 15 and not failed(iter(results))


def test_it_answers_as_recorded(url: str, model: Path) -> None:
    """What has been recorded still holds."""
    now = asyncio.run(record(url, str(model), None))
    for name, real in now.items():
        assert not differences(RECORDED[name], real), name


def tree(model: Path, **changes: Any) -> dict[str, Any]:
    return recipe(model, runtime__threads=1, **NO_EVAL, **changes)


def test_a_run_of_three_steps(url: str, model: Path, tmp_path: Path) -> None:
    engine = {"kind": "sglang", "url": url}
    assert go(tmp_path / "run", tree(model, engine=engine, train__steps=3)).status == "done"
    records = steps_of(tmp_path / "run")
    assert len(records) == 3 and all(r["sync/probe_mean"] < 1e-3 for r in records)


def test_weights_arrive_while_completions_run(url: str, model: Path, tmp_path: Path) -> None:
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "train__steps": 6}
    changes = {**overlap, "sampling__max_tokens": 48, "engine": {"kind": "sglang", "url": url}}
    assert go(tmp_path / "run", tree(model, **changes)).status == "done"
    records = assert_whole(tmp_path / "run", steps=6)
    assert any(r["age/max"] > 0 for r in records)


async def test_an_aborted_prompt_ends_alone(url: str, model: Path) -> None:
    loaded = load(str(model), dtype=torch.float32, device="cpu")
    engine = Sglang(url=url).build(EngineSetup.of(loaded, max_length=250))
    try:
        task = asyncio.create_task(collect(engine, requests(3, 2, max_tokens=200)))
        await asyncio.sleep(0.5)
        await engine.abort(0)
        ends = {c.key: c.finish_reason for c in await task}
    finally:
        engine.close()
    assert len(ends) == 6 and all(ends[key] != "abort" for key in ends if key[0] != 0)
    assert any(ends[key] == "abort" for key in ends if key[0] == 0)


def server_at(port: str, ended: set[int]) -> psutil.Process | None:
    """The server at a port, if it is not one of those that have ended; its guardian has its words too."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if port in words and "proxima_sglang" in words and "proxima.process.guardian" not in words:
            return None if process.pid in ended else process
    return None


def test_kills_in_one_run(model: Path, tmp_path: Path) -> None:
    """The server is killed again and again; it returns, and every prompt is consumed once."""
    folder, ended, stop = RunFolder(tmp_path / "run"), set[int](), threading.Event()

    def kill() -> None:
        while len(ended) < KILLS and not stop.wait(0.2):
            log = folder.engine_log.read_text() if folder.engine_log.is_file() else ""
            started = log.rpartition("$ PYTHONPATH")[2]  # by the newest server, which has begun to generate
            if started.count('POST /generate HTTP/1.1" 200') < 8:
                continue
            if (server := server_at(started.split("--port ")[1].split()[0], ended)) is not None:
                ended.add(server.pid)
                server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    engine = {"kind": "sglang", "serve": serve_section(restarts=2 * KILLS), "away_seconds": 900.0}
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "train__steps": 40}
    try:
        outcome = go(tmp_path / "run", tree(model, engine=engine, **overlap))
    finally:
        stop.set()
        killer.join()
    assert outcome.status == "done" and len(ended) == KILLS
    assert_whole(tmp_path / "run", steps=40)


async def pushed(url: str, folder: Path) -> dict[str, Any]:
    """What the proof of new weights says; they are the model's own, perturbed first."""
    loaded = load(str(folder), dtype=torch.float32, device="cpu")
    spec = Sglang(url=url, probe_tokens=64)
    sync = WeightSync(spec, EngineSetup.of(loaded, max_length=250))
    replica = Replica(spec.addresses[0], spec.dialect(), spec, "live")
    try:
        replica.facts = await replica.dialect.probe(replica.client)
        sync.newest = await sync.prepare(WeightUpdate(version=1, module=loaded.model), "live.1", replica.facts.dtype)
        await replica.dialect.pause(replica.client, replica.facts, "keep")
        report = await sync.push(replica)
        await replica.dialect.resume(replica.client, replica.facts)
        return report
    finally:
        await replica.client.close()
        await sync.close()


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Its weights arrive, experts too, and each token's experts are those that the model chooses."""
    folder = make_tiny("qwen3_moe", tmp_path / "mixture")
    with live_sglang(tmp_path, folder, routed_experts=True) as url:
        assert asyncio.run(pushed(url, folder))["perturbed_mean"] < 2e-3
        answer = asyncio.run(Recorder(url).call(*ROUTES["routes"]))["answer"]
        shape = RouteShape(layers=2, mixtures=(0, 1), experts=8, per_token=2)
        assert len(shape.read_int32(answer["meta_info"]["routed_experts"])) == 6  # 4 of the prompt, 2 of 3 tokens
        engine = {"kind": "sglang", "url": url, "routed_experts": True}
        replay = {"algorithm__routing_replay": "rollout", "train__steps": 2}
        assert go(tmp_path / "run", tree(folder, engine=engine, **replay)).status == "done"


def test_the_laws_in_bfloat16(model: Path, tmp_path: Path) -> None:
    with live_sglang(tmp_path, model, dtype="bfloat16") as url:
        results = [r for r in check_engine(Sglang(url=url), str(model)) if r.law.name != "sampling_masks"]
    assert not failed(iter(results))
