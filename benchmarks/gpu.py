"""Run every GPU check: tests, the demo, and the benchmarks against TRL, verl, `generate` and vLLM.

    python -m benchmarks.gpu                             on a machine with a GPU; writes benchmarks/results/gpu/
    python -m benchmarks.gpu --only where decode_vs_hf --logs logs      keeps what each part prints
    python -m benchmarks.gpu --model SHAPE               a folder without weights: config.json and tokenizer; draws them
    python -m benchmarks.gpu --rehearse                  the same parts on a CPU, on a tiny model: tests this script

Each part runs in its own process with a time limit. A part that fails or can't run here is reported with its reason,
and the others still run.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, finish, need_model, result_name, table

ROOT = HERE.parent


@dataclass(frozen=True)
class Part:
    """A part of the check, run as one process.

    Args:
        command: arguments of the interpreter; `{model}`, `{out}` (the result, JSON), `{folder}` (the part's own) and
            `{python}` (this interpreter) are filled in.
        minutes: time limit.
        tiny: additional arguments in a rehearsal.
        needs: packages that must be installed; those in `INSTALLS` only for a rehearsal.
        file: the result file below `{folder}`, if it is not `{out}`.
    """

    command: str
    minutes: float
    tiny: str = ""
    needs: tuple[str, ...] = ()
    file: str = ""


OUT = "--model {model} --json-out {out}"
DEMO = "recipes/quickstart.yaml folder={folder}/run model.path={model} --quiet"
SMALL_RUN = (
    "train.steps=2 train.prompts_per_step=2 train.completions_per_prompt=4 train.updates_per_step=1 "
    "sampling.max_tokens=4 eval.limit=2 train.warmup_steps=0"
)
PARTS: Mapping[str, Part] = {
    "tests": Part("-m pytest -q -p no:cacheprovider -m gpu tests/gpu", 10),
    "demo": Part(f"-m proxima.cli.main train {DEMO}", 15, SMALL_RUN, file="run/summary.json"),
    "where": Part(f"-m benchmarks.where {OUT}", 15, "--tiny --repeats 1"),
    "where_packed": Part(f"-m benchmarks.where {OUT} --only update --attention packed", 15, "--tiny --repeats 1"),
    "decode_vs_hf": Part(
        f"-m benchmarks.decode_vs_hf {OUT} --peer-python {{python}}", 15, "--rows 4 --prompts 2 --tokens 3 --repeats 1"
    ),
    "weight_ipc": Part(f"-m benchmarks.weight_ipc {OUT}", 10, "--parameters 2e6 --repeats 2"),
    "decode_vs_vllm": Part(f"-m benchmarks.vllm_throughput {OUT}", 30, "--requests 2 --tokens 3", ("vllm",)),
    "shared_prompt": Part(f"-m benchmarks.shared_prompt {OUT}", 10, "--shapes 5x3 --prompts 1 --repeats 1"),
    "pruned_update": Part(f"-m benchmarks.pruned_update {OUT}", 10, "--shape 5x3 --rates 0 0.5 --repeats 1"),
    "step_vs_trl": Part(f"-m benchmarks.step_vs_trl {OUT}", 30, "--prompts 2 --max-tokens 3 --repeats 1", ("trl",)),
    "step_vs_verl": Part(f"-m benchmarks.step_vs_trl --peer verl {OUT}", 30, "--prompts 2 --repeats 1", ("verl",)),
    "offline_vs_trl": Part(f"-m benchmarks.offline_vs_trl {OUT}", 30, "--rows 2 --words 10 --repeats 1", ("trl",)),
}
INSTALLS = frozenset({"trl"})  # packages of which the benchmark makes an environment, but in a rehearsal


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default: all)")
    p.add_argument("--rehearse", action="store_true", help="on a CPU with a tiny model; figures mean nothing")
    p.add_argument("--model", help="Hugging Face folder (default: the demo's, or a tiny one in a rehearsal)")
    p.add_argument("--logs", type=Path, help="folder for what each part prints, and for the parts so far")
    p.add_argument("--json-out", type=Path, help="the file (default: benchmarks/results/gpu/DATE_CORES_GPU.json)")
    o = p.parse_args()
    import torch

    if not o.rehearse and not torch.cuda.is_available():
        print("error: torch finds no GPU here; --rehearse runs the parts on a CPU with a tiny model", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        model = o.model or (
            tiny_model(Path(place)) if o.rehearse else str(HERE.parent / "models/smollm2-135m-instruct")
        )
        model = str(with_weights(Path(need_model(model)).resolve(), Path(place)))
        parts = {}
        for name in o.only:
            print(f"== {name}", flush=True)
            folder = Path(place) / name
            folder.mkdir()
            parts[name] = run(PARTS[name], model, folder, rehearse=o.rehearse)
            print(f"   {parts[name].get('reason', 'done')}, {parts[name]['seconds']:.0f} s\n", flush=True)
            if o.logs is not None:  # what has been measured outlives a machine that is taken away
                o.logs.mkdir(parents=True, exist_ok=True)
                (o.logs / "parts.json").write_text(json.dumps(parts), encoding="utf-8")
                if (folder / "log.txt").is_file():
                    shutil.copyfile(folder / "log.txt", o.logs / f"{name}.txt")
    print(
        table(
            ["part", "seconds", ""], [[name, f"{part['seconds']:.0f}", outcome(part)] for name, part in parts.items()]
        )
    )
    out = o.json_out or (None if o.rehearse else HERE / "results" / "gpu" / result_name())
    gpu = {"torch_cuda": torch.version.cuda, "rehearsal": o.rehearse}
    finish({"claim": "gpu", "model": Path(model).name, **gpu, "parts": parts}, out)
    return 0


def run(part: Part, model: str, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run a part and return its `seconds`, and its `result` or the `reason` why there is none."""
    missing = [name for name in part.needs if not installed(name) and (rehearse or name not in INSTALLS)]
    if missing:
        return {"seconds": 0.0, "reason": f"{', '.join(missing)} is not installed"}
    out, log = folder / "result.json", folder / "log.txt"
    fills = {"model": model, "out": str(out), "folder": str(folder), "python": sys.executable}
    words = [word.format(**fills) for word in f"{part.command} {part.tiny if rehearse else ''}".split()]
    if any(peer in part.needs and importable(peer) for peer in ("trl", "verl")):
        words += ["--peer-python", sys.executable]
    if "vllm" in part.needs and (program := shutil.which("vllm")):
        words += ["--executable", program]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "", "PROXIMA_REHEARSE": "1"} if rehearse else {})
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(60 * part.minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    seconds = round(time.perf_counter() - start, 1)
    if code is None:
        return {"seconds": seconds, "reason": f"not done after {part.minutes:g} minutes"}
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
    if code:
        return {"seconds": seconds, "reason": reason(lines, code)}
    file_of = folder / part.file if part.file else out
    result = json.loads(file_of.read_text(encoding="utf-8")) if file_of.is_file() else lines[-1]
    return {"seconds": seconds, "result": result}


def end_group(process: Any) -> None:
    """Kill a part and all processes in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reason(lines: Sequence[str], code: int) -> str:
    """Return the exit code and the line that says why a process failed: its last error, or its last line."""
    is_error: Callable[[str], bool] = lambda line: line.startswith(("error:", "E  ")) or "Error: " in line  # noqa: E731
    return f"exit code {code}: {next((line for line in reversed(lines) if is_error(line)), lines[-1]).strip()[:300]}"


def outcome(part: Mapping[str, Any]) -> str:
    """Return the outcome of a part in a few words."""
    if "reason" in part:
        return str(part["reason"])
    result = part["result"]
    if not isinstance(result, dict):
        return str(result)
    shown = {key: value for key, value in result.items() if key.startswith(("ratio", "mfu"))}
    if "eval" in result:
        shown |= {name: evaluation["accuracy"] for name, evaluation in result["eval"].items()}
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def installed(name: str) -> bool:
    """Return True if a package, a program or an environment of that name exists here."""
    return importable(name) or shutil.which(name) is not None or (ROOT / f".venv-{name}").is_dir()


def importable(name: str) -> bool:
    """Return True if this interpreter can import a package."""
    return importlib.util.find_spec(name) is not None


def with_weights(model: Path, place: Path) -> Path:
    """Return the folder of the model, or of one with its config and tokenizer and random weights if it has none: for a
    machine without a network, on which a model that is too large to bring along says as much about time."""
    if any(model.glob("*.safetensors")):
        return model
    from transformers import AutoConfig, AutoModelForCausalLM

    made = place / model.name
    shutil.copytree(model, made)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(made)
    return made


def tiny_model(folder: Path) -> str:
    """Create a random model with a few thousand weights."""
    from tests.tiny import make_tiny

    return str(make_tiny("llama", folder / "model"))


if __name__ == "__main__":
    sys.exit(main())
