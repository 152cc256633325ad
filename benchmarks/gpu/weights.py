"""Weights of 4B from this process to another one: `benchmarks.weight_ipc`, by each way that this machine has."""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.forecast import Forecast
from benchmarks.gpu.record import Record, part_options
from benchmarks.gpu.schedule import ROOT
from benchmarks.gpu.sizes import SMALL, WHOLE, config_of
from proxima.config.sections.model_section import ModelConfig
from proxima.model.pretrained import load_shape

REPEATS = 3
DRAWN = 1e10 if torch.cuda.is_available() else 1e8  # weights a second
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
        speed = {"predicted": size / planned} if way == "ipc" else {}
        record.figure(f"{name}: rate", measured["gb_per_s"], "GB/s", **speed)


def main() -> None:
    record, rehearse = part_options("weights")
    spec = ModelConfig(path="", compute_dtype="bfloat16")
    plan = Forecast(config_of("4B", rehearse=rehearse), spec, SMALL if rehearse else WHOLE)
    needed = DONE + plan.model.parameters / DRAWN
    record.case("weights to another process", needed, partial(sent, record, plan, rehearse=rehearse))


if __name__ == "__main__":
    main()
