"""20 steps of `proxima train` at 1.7B, killed and resumed, against as many that nothing interrupts: equal metrics and
weights."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, part_options, release
from benchmarks.gpu.schedule import ROOT, SMALL_RUN
from benchmarks.gpu.sizes import config_of, drawn_model
from benchmarks.side import clock
from proxima.runtime.state.folder import RunFolder
from proxima.training.checkpoint import checkpoints
from tests.runtime.tiny_run import timeless
from tests.tiny import tiny_tokenizer

STEPS, KILLED, EVERY = 20, 13, 10  # of a run; after which it is killed; of a checkpoint
LONGER = f"train.steps={STEPS} eval.every={STEPS} checkpoint.every={EVERY} checkpoint.keep_last=1"
SETTINGS = SMALL_RUN.replace("train.steps=2", LONGER)
NEEDED = 240.0  # seconds: three starts, and four checkpoints of 20 GB


class Run:
    """A run of the command line in a folder.

    Args:
        folder: of the run. model: the model's folder. left: seconds until it must have ended.
    """

    def __init__(self, folder: Path, model: Path, left: Callable[[], float]) -> None:
        self.folder = folder
        self.words = ["recipes/quickstart.yaml", f"folder={folder}", f"model.path={model}", *SETTINGS.split()]
        self.left = left

    def finish(self, *, resumed: bool = False) -> float:
        """Run it to its end; return the seconds."""
        start = clock()
        process = self._start([str(self.folder), "--resume"] if resumed else self.words)
        try:
            _, text = process.communicate(timeout=max(1.0, self.left()))
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {text.strip()[-1000:]}")
        return clock() - start

    def kill_after(self, step: int) -> None:
        """Start it, and kill it once it has made so many steps."""
        process = self._start(self.words)
        try:
            while len(self.metrics()) < step:
                if process.poll() is not None:
                    raise RuntimeError(f"the run has ended in step {len(self.metrics())}, before it was killed")
                if self.left() < 0:
                    raise subprocess.TimeoutExpired(process.args, 0.0)
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of the steps so far, without times."""
        run = RunFolder(self.folder)
        lines = run.read_metrics() if run.metrics.is_file() else []
        return [timeless(line) for line in lines if line["kind"] == "train"]

    def weights(self) -> str:
        """The hash of the weights in the last checkpoint."""
        last = checkpoints(RunFolder(self.folder).checkpoints)[-1]
        total = hashlib.blake2b()
        files = sorted(last.path.rglob("model*.safetensors"))
        if last.step != STEPS or not files:
            raise RuntimeError(f"the last checkpoint is of step {last.step}, with {len(files)} files of weights")
        for file in files:
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "blake2b").digest())
        return total.hexdigest()

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "proxima.cli.main", "train", *words, "--quiet"]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )


def compare(record: Record, *, rehearse: bool) -> None:
    """Write how many steps of the resumed run are equal; unequal ones are a failure."""
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        loaded = drawn_model(config_of("1.7B", rehearse=rehearse))
        loaded.model.save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
        del loaded
        release()

        whole = Run(Path(place) / "whole", model, lambda: record.left)
        seconds = whole.finish()
        record.figure(f"1.7B: {STEPS} steps of `proxima train`", seconds, "s")
        expected, weights = whole.metrics(), whole.weights()
        shutil.rmtree(whole.folder)  # its checkpoint is 20 GB

        killed = Run(Path(place) / "killed", model, lambda: record.left)
        killed.kill_after(KILLED)
        seconds = killed.finish(resumed=True)
        record.figure(f"1.7B: killed after step {KILLED}, the rest", seconds, "s")
        got = killed.metrics()
        equal = sum(ours == theirs for ours, theirs in zip(got, expected, strict=False))
        record.figure("1.7B: steps of a resumed run that are equal", equal, "", predicted=len(expected))
        if got != expected or killed.weights() != weights:
            raise RuntimeError(
                f"{len(expected) - equal} of {len(expected)} steps differ, or the weights that they leave"
            )


def main() -> None:
    record, rehearse = part_options("resumed")
    if rehearse:
        torch.set_num_threads(1)
    record.case("1.7B, killed and resumed", 60 if rehearse else NEEDED, partial(compare, record, rehearse=rehearse))


if __name__ == "__main__":
    main()
