"""What the parts measure, as lines of JSON in one file: a line is written when its figure is known, so it outlives a
machine that is taken away.

    {"part": "updates", "name": "4B, checkpointed: tokens a second", "value": 21300, "unit": "tokens/s",
     "predicted": 20100, "at": 41.2}
    {"part": "decode", "name": "256 rows", "left_out": "needs 40 s, and 12 are left", "for_time": true, "at": 168.3}
    {"part": "kernels", "name": "_grouped_mm", "failed": "RuntimeError: ...", "at": 52.0}

`at` is in seconds since the part began.
"""

import argparse
import gc
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
MEASURED, FAILED, NO_TIME = 0, 1, 3  # exit codes


class Record:
    """The lines of one part.

    Args:
        part: its name.
        file: of all parts.
        seconds: until the part must have ended.
    """

    def __init__(self, part: str, file: Path, seconds: float) -> None:
        self.part = part
        self.file = file
        self.begins = time.monotonic()
        self.ends = self.begins + seconds

    @property
    def left(self) -> float:
        """Seconds until the part must have ended."""
        return self.ends - time.monotonic()

    def figure(
        self, name: str, value: float | None, unit: str, *, predicted: float | None = None, **facts: Any
    ) -> None:
        """Write a figure beside its prediction; a value of None could not be measured on this device."""
        if predicted is None:
            known = {}
        else:
            known = {"predicted": _short(predicted)}
        self._write({"name": name, "value": _short(value), "unit": unit, **known, **facts})

    def leave_out(self, name: str, reason: str, *, for_time: bool = False) -> None:
        """Write that a figure is missing. `for_time`: it would have come with more minutes; otherwise this machine
        can't give it."""
        self._write({"name": name, "left_out": reason, "for_time": for_time})

    def fail(self, name: str, reason: str) -> None:
        """Write that a figure could not be measured because something broke."""
        self._write({"name": name, "failed": reason})

    def case(self, name: str, seconds: float, work: Callable[[], object]) -> None:
        """Do the work, which takes about so many seconds, if they are left. An error is written, and the next case
        still has its turn."""
        if seconds > self.left:
            self.leave_out(name, f"needs {seconds:.0f} s, and {max(0.0, self.left):.0f} are left", for_time=True)
            return
        try:
            work()
        except subprocess.TimeoutExpired:
            self.leave_out(name, "was stopped at the limit of its part", for_time=True)
        except Exception as error:
            self.fail(name, " ".join(f"{type(error).__name__}: {error}".split())[:300])
            traceback.print_exc()
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the case
        release()

    def _write(self, line: dict[str, Any]) -> None:
        whole = {"part": self.part, **line, "at": round(time.monotonic() - self.begins, 1)}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):  # a terminal that has gone: the file is what counts
            print(f"   {shown(whole)}", flush=True)


def release() -> None:
    """Give the memory of what is no longer used back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def part_options(part: str, words: Sequence[str] | None = None) -> tuple[Record, bool]:
    """The record of a part that runs in this process, and whether it is a rehearsal."""
    p = argparse.ArgumentParser()
    p.add_argument("--file", type=Path, required=True)
    p.add_argument("--seconds", type=float, required=True)
    p.add_argument("--rehearse", action="store_true")
    o = p.parse_args(words)
    return Record(part, o.file, o.seconds), o.rehearse


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of the last visit in a file, without its heading."""
    lines: list[dict[str, Any]] = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        line = json.loads(text)
        lines = [] if "claim" in line else [*lines, line]
    return lines


def earlier(file: Path, part: str, name: str) -> float | None:
    """A figure that a part has measured in this visit; None: it has not."""
    values = (line.get("value") for line in lines_of(file) if (line["part"], line["name"]) == (part, name))
    return next((value for value in values if value is not None), None)


def exit_code(lines: Iterable[Line]) -> int:
    """1: something failed. 3: nothing failed, but for some figures there was no time. 0: all were measured that this
    machine can give."""
    told = list(lines)
    if any("failed" in line for line in told):
        return FAILED
    return NO_TIME if any(line.get("for_time") for line in told) else MEASURED


def shown(line: Line) -> str:
    """A line for people."""
    name = line["name"]
    if "failed" in line:
        return f"{name}: FAILED: {line['failed']}"
    if "left_out" in line:
        return f"{name}: left out: {line['left_out']}"
    value, predicted = line["value"], line.get("predicted")
    if value is None:
        measured = "not measured here"
    else:
        measured = f"{value:,} {line['unit']}"
    text = f"{name}: {measured}"
    if predicted is None:
        return text
    if value and predicted:
        times = f", {value / predicted:.2f} x"
    else:
        times = ""
    return f"{text}   (predicted {predicted:,}{times})"


def _short(value: float | None) -> float | None:
    """Four digits, or all of a large number's."""
    if value is None or isinstance(value, bool) or abs(value) >= 1000:
        return value if value is None else round(value)
    return float(f"{value:.4g}")
