"""Weights of 4B from this process to another one: `benchmarks.weight_ipc`, by each way that this machine has, and whole
syncs by `ipc`, their proof included, to a stand-in for a server."""

import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.gpu.forecast import Forecast, kind_here
from benchmarks.gpu.record import Record, part_options
from benchmarks.gpu.schedule import ROOT
from benchmarks.gpu.sizes import SMALL, WHOLE, config_of, drawn_model, shape_folder
from benchmarks.side import clock
from proxima.config.sections.model import ModelConfig
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.vllm import Vllm
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.model.pretrained import load_shape
from proxima_plan.stage_times import BANDWIDTH, NETWORK
from tests.tiny import tiny_tokenizer

REPEATS = 3
DRAWN = 1e10 if torch.cuda.is_available() else 1e8  # weights a second
PROBED = 200  # tokens that a sequence may have at the stand-in
SYNCS = 3  # after the first one
DONE = 15.0  # seconds of everything else


def shapes_of_a_layer(config: Any, folder: Path) -> None:
    """Write config.json, and weights of the first layer: those that are sent have its shapes, again and again."""
    config.save_pretrained(folder)
    shape = load_shape(str(folder), None)
    first = {
        name: torch.zeros(weight.shape, dtype=torch.bfloat16)
        for name, weight in shape.named_parameters()
        if ".layers.0." in name
    }
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})


def sent(record: Record, plan: Forecast, *, rehearse: bool) -> None:
    """Send as many weights as 4B has, and write the seconds of each way."""
    parameters = plan.model.parameters
    with tempfile.TemporaryDirectory() as place:
        shapes_of_a_layer(plan.config, Path(place))
        out = Path(place) / "result.json"
        options = ["--model", place, "--json-out", str(out), "--parameters", str(parameters)]
        options += ["--repeats", "1" if rehearse else str(REPEATS)]
        command = [sys.executable, "-m", "benchmarks.weight_ipc", *options]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=record.left)
        if ended.returncode:
            raise RuntimeError(f"exit code {ended.returncode}: {ended.stderr.strip()[-300:]}")
        result = json.loads(out.read_text(encoding="utf-8"))
    planned = plan.publish(engines=1, colocated=True)
    for way, measured in result["ways"].items():
        name = f"{parameters / 1e9:.3g} billion weights by {way}"
        if "reason" in measured:
            alone = way == "group" and torch.cuda.is_available() and torch.cuda.device_count() == 1
            tell = record.leave_out if alone else record.fail
            tell(name, measured["reason"])
            continue
        own = {"predicted": planned} if way == "ipc" else {}
        size = result["bytes"] / 1e9
        record.figure(name, sorted(measured["seconds"])[len(measured["seconds"]) // 2], "s", **own)
        if way == "ipc":
            speed = {"predicted": size / planned}
        else:
            speed = {}
        record.figure(f"{name}: rate", measured["gb_per_s"], "GB/s", **speed)


def synced(record: Record, plan: Forecast, *, rehearse: bool) -> None:
    """Whole syncs of the engine's: pause, gather and send, proof, resume. The first one, which also sends a perturbed
    copy, is apart."""
    words = [sys.executable, "-m", "benchmarks.gpu.stand_in", *(["--rehearse"] if rehearse else [])]
    server = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    folder = tempfile.TemporaryDirectory()
    try:
        assert server.stdout is not None
        loaded = replace(
            drawn_model(plan.config), tokenizer=tiny_tokenizer(), path=shape_folder(plan.config, Path(folder.name))
        )
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError("the stand-in for a server has ended")
        spec = Vllm(url=url, transfer="ipc", health_seconds=60)
        with closing(spec.build(EngineSetup.of(loaded, max_length=PROBED))) as engine:
            first, *later = (asyncio.run(_sync(engine, loaded.model, url, version)) for version in range(1 + SYNCS))
    finally:
        server.kill()
        server.wait()
        folder.cleanup()

    times = plan.plan(engines=1, colocated=True).times
    publish = times.publish()
    load = plan.model.tensors * kind_here().rates.load
    moved = publish.parts.get(NETWORK, 0.0) + publish.parts.get(BANDWIDTH, 0.0)
    predicted = {"gather and hand over": moved, "load": load, "proof": publish.seconds - moved - load}
    predicted |= {"whole": publish.seconds}
    for part in later[0]:
        seconds = median(each[part] for each in later)
        record.figure(f"4B, a sync by ipc: {part}", seconds, "s", predicted=predicted.get(part))
    record.figure("4B, the first sync by ipc: whole", first["whole"], "s", predicted=times.first_sync().seconds)


async def _sync(engine: HttpEngine, module: Any, url: str, version: int) -> dict[str, float]:
    """Publish weights, as a step does. Returns the seconds of its parts."""
    begin = clock()
    await engine.pause()
    paused = clock()
    await engine.publish(WeightUpdate(version=version, module=module))
    published = clock()
    await engine.resume()
    end = clock()

    health = await engine.health()
    figures = health.detail["sync"]
    async with httpx.AsyncClient(trust_env=False) as client:
        load = (await client.get(f"{url}/loading")).json()["seconds"]
    return {
        "pause": paused - begin,
        "gather and hand over": figures["send_seconds"] - load,
        "load": load,
        "proof": figures["prepare_seconds"] + figures["probe_seconds"],
        "resume": end - published,
        "whole": end - begin,
    }


def main() -> None:
    record, rehearse = part_options("weights")
    if rehearse:
        torch.set_num_threads(1)
    spec = ModelConfig(path="", compute_dtype="bfloat16")
    plan = Forecast(config_of("4B", rehearse=rehearse), spec, SMALL if rehearse else WHOLE)
    needed = DONE + plan.model.parameters / DRAWN
    record.case("4B, a sync by ipc", needed, partial(synced, record, plan, rehearse=rehearse))
    record.case("weights to another process", needed, partial(sent, record, plan, rehearse=rehearse))


if __name__ == "__main__":
    main()
