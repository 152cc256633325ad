"""Measure in a quarter of an hour what nobody has seen of a GPU, beside what the plan predicts.

    python -m benchmarks.gpu                        on a machine with a GPU; appends to benchmarks/results/gpu/
    python -m benchmarks.gpu --minutes 6            the same parts, each with its share of six minutes
    python -m benchmarks.gpu --only where decode_vs_hf --minutes 60     parts that take longer
    python -m benchmarks.gpu --rehearse             the same on a CPU, in tiny shapes: tests this script

No network and no model is needed: weights are drawn on the GPU. Each figure is a line of JSON, written when it is
known. Exit code 0: all figures that this machine can give. 1: something failed. 3: nothing failed, and time ran out for
some.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.record import exit_code, lines_of, shown
from benchmarks.gpu.schedule import PARTS, QUARTER, Schedule, run_part
from benchmarks.harness import HERE, commit, machine, result_name, versions

DEMO_MODEL = HERE.parent / "models" / "smollm2-135m-instruct"
MINUTES, REHEARSED = 13.0, 10.0


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--only", nargs="+", choices=PARTS, default=list(QUARTER), help="parts (default: a quarter's)")
    p.add_argument("--minutes", type=float, help=f"for all parts together (default: {MINUTES:g})")
    p.add_argument("--rehearse", action="store_true", help="on a CPU in tiny shapes; figures mean nothing")
    p.add_argument("--model", help="Hugging Face folder of the demo and of longer parts, with or without weights")
    p.add_argument("--logs", type=Path, help="folder for what each part prints beside its figures")
    p.add_argument("--json-out", type=Path, help="the file of lines (default: benchmarks/results/gpu/DATE_….jsonl)")
    o = p.parse_args()
    import torch

    if not o.rehearse and not torch.cuda.is_available():
        print("error: torch finds no GPU here; --rehearse runs the parts on a CPU in tiny shapes", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs ends too
    with tempfile.TemporaryDirectory() as place:
        out = o.json_out or _default_file(Path(place), rehearse=o.rehearse)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_heading(rehearse=o.rehearse)) + "\n")
        parts = {name: PARTS[name] for name in PARTS if name in o.only}
        seconds = 60 * (o.minutes or (REHEARSED if o.rehearse else MINUTES))
        schedule = Schedule(seconds, parts, even=o.rehearse)
        needs_model = any(part.needs_model for part in parts.values())
        model = None
        if needs_model:
            model = _model(o.model, Path(place), rehearse=o.rehearse)
        for name, part in parts.items():
            print(f"== {name}", flush=True)
            folder = Path(place) / name
            folder.mkdir()
            left = schedule.left(name)
            run_part(name, part, out, left, model=model, folder=folder, rehearse=o.rehearse)
            if o.logs is not None and (folder / "log.txt").is_file():
                o.logs.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / "log.txt", o.logs / f"{name}.txt")
        lines = lines_of(out)
    missing = [line for line in lines if "value" not in line]
    print(f"\n{len(lines) - len(missing)} figures in {out}" + "".join(f"\n   {shown(line)}" for line in missing))
    return exit_code(lines)


def _heading(*, rehearse: bool) -> dict[str, object]:
    """The first line of a visit: where and with what it measures."""
    import torch

    cuda = {"torch_cuda": torch.version.cuda, "rehearsal": rehearse}
    return {"claim": "gpu", **cuda, "machine": machine(), "versions": versions(), "commit": commit()}


def _default_file(place: Path, *, rehearse: bool) -> Path:
    if rehearse:
        return place / "gpu.jsonl"

    return (HERE / "results" / "gpu" / result_name()).with_suffix(".jsonl")


def _model(given: str | None, place: Path, *, rehearse: bool) -> str | None:
    """The folder of the model that some parts need, with weights; None: there is none here."""
    if given is None and rehearse:
        from tests.tiny import make_tiny

        return str(make_tiny("llama", place / "model"))
    folder = Path(given) if given else DEMO_MODEL
    if (folder / "config.json").is_file():
        return str(with_weights(folder.resolve(), place))
    return None


def with_weights(model: Path, place: Path) -> Path:
    """The folder of the model, or of one with its config and tokenizer and random weights if it has none."""
    if any(model.glob("*.safetensors")):
        return model

    import torch
    from transformers import AutoConfig

    from benchmarks.gpu.sizes import module_of
    from benchmarks.side import device

    made = place / model.name
    shutil.copytree(model, made)
    module_of(AutoConfig.from_pretrained(model), device(), torch.float32).save_pretrained(made)
    return made
