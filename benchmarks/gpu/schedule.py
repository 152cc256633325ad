"""The parts in their order, most telling first, and the one limit for all of them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Record
from benchmarks.harness import HERE

ROOT = HERE.parent
LEAST = 10.0  # seconds in which a part can't even begin
CLOSING = 3.0  # seconds before its end in which a part begins nothing


@dataclass(frozen=True)
class Part:
    """A part, run as one process.

    Args:
        command: arguments of the interpreter. `{own}` stands for the options of a part of this folder, which writes its
            own figures; otherwise `{model}`, `{out}` (the result, JSON), `{folder}` (the part's own) and `{python}`
            (this interpreter) are filled in, and what the result says becomes figures.
        minutes: its share of a quarter of an hour; 0: what the others have left.
        tiny: additional arguments in a rehearsal.
        needs: packages that must be installed; those in `INSTALLS` only for a rehearsal.
        file: the result file below `{folder}`, if it is not `{out}`.
    """

    command: str
    minutes: float = 0.0
    tiny: str = ""
    needs: tuple[str, ...] = ()
    file: str = ""

    @property
    def needs_model(self) -> bool:
        return "{model}" in self.command


OUT = "--model {model} --json-out {out}"
DEMO = "recipes/quickstart.yaml folder={folder}/run model.path={model} --quiet"
SMALL_RUN = (  # with a reward that a random model gets now and then
    "train.steps=2 train.prompts_per_step=2 train.completions_per_prompt=4 train.updates_per_step=1 "
    "sampling.max_tokens=4 eval.limit=2 train.warmup_steps=0 reward=tests.runtime.tiny_run:Share"
)
QUARTER: Mapping[str, Part] = {
    "kernels": Part("-m benchmarks.gpu.kernels {own}", 1),
    "updates": Part("-m benchmarks.gpu.updates {own}", 5),
    "one_rank": Part("-m benchmarks.gpu.one_rank {own}", 2),
    "weights": Part("-m benchmarks.gpu.weights {own}", 2),
    "decode": Part("-m benchmarks.gpu.decode {own}", 3),
    "tests": Part("-m pytest -q -p no:cacheprovider -m gpu tests/gpu"),
    "resumed": Part("-m benchmarks.gpu.resumed {own}"),
    "demo": Part(f"-m proxima.cli.main train {DEMO}", tiny=SMALL_RUN, file="run/summary.json"),
}
LONGER: Mapping[str, Part] = {  # with more than a quarter of an hour: benchmarks of their own, on a GPU
    "where": Part(f"-m benchmarks.where {OUT}", 15, "--tiny --repeats 1"),
    "where_packed": Part(f"-m benchmarks.where {OUT} --only update --attention packed", 15, "--tiny --repeats 1"),
    "decode_vs_hf": Part(
        f"-m benchmarks.decode_vs_hf {OUT} --peer-python {{python}}", 15, "--rows 4 --prompts 2 --tokens 3 --repeats 1"
    ),
    "decode_vs_vllm": Part(f"-m benchmarks.vllm_throughput {OUT}", 30, "--requests 2 --tokens 3", ("vllm",)),
    "shared_prompt": Part(f"-m benchmarks.shared_prompt {OUT}", 10, "--shapes 5x3 --prompts 1 --repeats 1"),
    "pruned_update": Part(f"-m benchmarks.pruned_update {OUT}", 10, "--shape 5x3 --rates 0 0.5 --repeats 1"),
    "step_vs_trl": Part(f"-m benchmarks.step_vs_trl {OUT}", 30, "--prompts 2 --max-tokens 3 --repeats 1", ("trl",)),
    "step_vs_verl": Part(f"-m benchmarks.step_vs_trl --peer verl {OUT}", 30, "--prompts 2 --repeats 1", ("verl",)),
    "offline_vs_trl": Part(f"-m benchmarks.offline_vs_trl {OUT}", 30, "--rows 2 --words 10 --repeats 1", ("trl",)),
}
PARTS: Mapping[str, Part] = {**QUARTER, **LONGER}
INSTALLS = frozenset({"trl"})  # packages of which the benchmark makes an environment, but in a rehearsal


class Schedule:
    """The time of each part: it ends, at the latest, where its share of all minutes does. What one does not use, the
    next ones have.

    Args:
        seconds: for all.
        parts: in their order. even: each may use all that is left.
        clock: seconds that pass.
    """

    def __init__(
        self,
        seconds: float,
        parts: Mapping[str, Part],
        *,
        even: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._start = clock()
        whole = sum(part.minutes for part in parts.values())
        until = accumulate(part.minutes for part in parts.values())
        shares = [1.0 if even or not whole else minutes / whole for minutes in until]
        self._ends = {name: share * seconds for name, share in zip(parts, shares, strict=True)}

    def left(self, name: str) -> float:
        """Seconds until this part must have ended."""
        return self._ends[name] - (self._clock() - self._start)


def run_part(
    name: str, part: Part, file: Path, seconds: float, *, model: str | None, folder: Path, rehearse: bool
) -> None:
    """Run a part for at most so many seconds. Its figures, or the reason why there are none, are lines of the file.

    Args:
        model: a model's folder; None: there is none here.
    """
    record = Record(name, file, seconds)
    missing = [package for package in part.needs if not installed(package) and (rehearse or package not in INSTALLS)]
    if seconds < LEAST:
        record.leave_out(name, f"{max(0.0, seconds):.0f} s are left", for_time=True)
    elif missing:
        record.leave_out(name, f"{', '.join(missing)} is not installed")
    elif part.needs_model and model is None:
        record.leave_out(name, "no model is here; give its folder as --model")
    else:
        words = _words(part, file, seconds, model or "", folder, rehearse)
        code, text = _ended(words, seconds, folder / "log.txt", rehearse=rehearse)
        _tell(record, part, folder, code, text)


def _words(part: Part, file: Path, seconds: float, model: str, folder: Path, rehearse: bool) -> list[str]:
    own = f"--file {file} --seconds {seconds - CLOSING:.1f}{' --rehearse' * rehearse}"
    places = {"model": model, "out": str(folder / "result.json"), "folder": str(folder), "python": sys.executable}
    text = f"{part.command} {part.tiny if rehearse else ''}".replace("{own}", own)
    words = [word.format(**places) for word in text.split()]
    if any(peer in part.needs and importable(peer) for peer in ("trl", "verl")):
        words += ["--peer-python", sys.executable]
    if "vllm" in part.needs and (program := shutil.which("vllm")):
        words += ["--executable", program]
    return words


def _ended(words: Sequence[str], seconds: float, log: Path, *, rehearse: bool) -> tuple[int | None, str]:
    """Run the interpreter with these words. Returns its exit code, None if it was stopped at its limit, and what it
    printed; the figures of a part also go to the terminal."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "", "PROXIMA_REHEARSE": "1"} if rehearse else {})
    own = "--file" in words
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=None if own else file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    return code, log.read_text(encoding="utf-8", errors="replace")


def _tell(record: Record, part: Part, folder: Path, code: int | None, text: str) -> None:
    """Write how a part ended, and the figures of one that does not write its own."""
    if code is None:
        record.leave_out(record.part, "was stopped at its limit", for_time=True)
    elif code:
        lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
        record.fail(record.part, failure(lines, code))
    elif "{own}" not in part.command:
        file = folder / (part.file or "result.json")
        if file.is_file():
            result = json.loads(file.read_text(encoding="utf-8"))
        else:
            result = {}
        figures = told_by(result)
        for name, value in figures.items():
            record.figure(name, value, "")
        if not figures:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
            record.figure(f"{record.part}: {last.strip()}", None, "")


def end_group(process: Any) -> None:
    """Kill a part and all processes in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(lines: Sequence[str], code: int) -> str:
    """The exit code and the line that says why a process failed: its last error, or its last line."""
    errors = [line for line in lines if line.startswith(("error:", "E  ")) or "Error: " in line]
    last = (errors or lines)[-1]
    return f"exit code {code}: {last.strip()[:300]}"


def told_by(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a benchmark's result: its ratios, the share of the product rate, and a run's accuracies."""
    figures: dict[str, float] = {}
    for name, value in result.items():
        if not name.startswith(("ratio", "mfu")):
            continue
        if isinstance(value, Mapping):
            figures |= {f"{name} {case}": own for case, own in value.items()}
        else:
            figures[name] = value
    return figures | {f"accuracy {name}": evaluation["accuracy"] for name, evaluation in result.get("eval", {}).items()}


def installed(name: str) -> bool:
    """True if a package, a program or an environment of that name exists here."""
    return importable(name) or shutil.which(name) is not None or (ROOT / f".venv-{name}").is_dir()


def importable(name: str) -> bool:
    """True if this interpreter can import a package."""
    return find_spec(name) is not None
