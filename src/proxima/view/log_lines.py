"""The run as lines: what is printed where there is no terminal, and always kept in log.txt.

12:04:31  proxima 0.2.0  cppo  SmolLM2-135M-Instruct 134.5 M  cpu 2 threads bfloat16  seed 1      runs/add-7f3c
12:04:31  step = 8 prompts × 8 completions = 64 sequences → 2 micro-batches ≤ 2,048 tokens → 1 update
12:04:49  eval  before   accuracy 0.125   25/200                                                           18 s
12:04:53  step   1/40   reward 0.17  length 8.1  kl 0.0002  gen 290 tok/s  train 430 tok/s  4.1 s  eta 2m 40s
"""

import statistics
from collections.abc import Callable, Mapping
from datetime import datetime
from shlex import quote
from typing import Any, TextIO

from proxima.config.estimate import besides
from proxima.evaluate.intervals import wilson
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.observer import Observer, RunInfo, Sample, Stage
from proxima.view.diagnostics import Diagnostics
from proxima.view.formatting import count, duration, fixed, magnitude, percent, printable, rate, signed

Record = Mapping[str, Any]
WIDTH = 112  # the column at which a line's right end stands
SEE_WHY = "; why: `error` in evals/*.parquet"
PATIENCE = 60.0  # seconds without a line before progress gets one


class LogLines:
    """Tells the run in lines of fixed order, width and units.

    Args:
        write: takes one line, without its newline.
        clock: stamps the lines with the local time of day.
    """

    def __init__(self, write: Callable[[str], None], clock: Clock | None = None) -> None:
        self._write = write
        self._clock = clock or SystemClock()
        self._info: RunInfo | None = None
        self._remarks = Diagnostics()
        self._steps: list[float] = []
        self._accuracy: dict[str, float] = {}
        self._last = self._clock.now()

    def started(self, info: RunInfo) -> None:
        self._info = info
        left = "  ".join(
            part
            for part in (
                f"proxima {info.version}",
                info.algorithm,
                model_line(info),
                device_line(info),
                f"seed {info.seed}",
            )
        )
        self._line(_ends(left, str(info.folder)))
        self._line(arithmetic(info))
        if info.resumed_at:
            self._line(f"resumed after step {info.resumed_at}/{info.steps}")

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if self._clock.now() - self._last >= PATIENCE:
            self._line(f"      {stage}  {count(done)}/{count(total)} {unit}")

    def evaluated(self, record: Record) -> None:
        label = str(record.get("label", "step"))
        name = label if label != "step" else f"step {record['step']}"
        accuracy, text = record.get("accuracy"), ""
        if accuracy is not None:
            if "before" in self._accuracy and label != "before":
                text = signed(accuracy - self._accuracy["before"])
            self._accuracy[label] = accuracy
        right = f"{record.get('correct', 0)}/{trials(record)}"
        left = "  ".join(
            part
            for part in (f"eval  {name:<8} accuracy {fixed(accuracy, 3)}", f"{right:>7}", several(record), text)
            if part
        )
        if accuracy is None:  # the mean reward is what there is to follow
            why = no_accuracy(record) + (SEE_WHY if record.get("invalid") else "")
            left = f"eval  {name:<8} reward {fixed(record.get('reward/mean'), 3)}  {why}"
        self._line(_ends(left, duration(record["time/evaluate"]) if "time/evaluate" in record else ""))

    def step(self, record: Record, sample: Sample | None) -> None:
        self._steps.append(float(record.get("time/step") or 0.0))
        self._line(step_line(record, self._info.steps if self._info else 0, remaining(self._steps, record, self._info)))
        for text in self._remarks.of(record):
            self.warning(text)

    def warning(self, text: str) -> None:
        self._line(f"WARNING {printable(text)}")

    def finished(self, summary: Record) -> None:
        self._line(closing_line(summary, self._info))

    def _line(self, text: str) -> None:
        self._last = self._clock.now()
        self._write(f"{time_of_day(self._clock.wall())}  {text}".rstrip())


class LogFile(LogLines):
    """The lines appended to log.txt of the run folder, each handed to the system at once. What comes before `started`
    waits for it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._file: TextIO | None = None
        self._waiting: list[str] = []
        super().__init__(self._append, clock)

    def started(self, info: RunInfo) -> None:
        self._file = (info.folder / "log.txt").open("a", encoding="utf-8", errors="replace", buffering=1)
        waiting, self._waiting = self._waiting, []
        date = datetime.fromisoformat(self._clock.wall()).astimezone().strftime("%Y-%m-%d, UTC%z")
        for line in (date, *waiting):  # the lines themselves hold the time of day only
            self._append(line)
        super().started(info)

    def finished(self, summary: Record) -> None:
        super().finished(summary)
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        if self._file is None:
            self._waiting.append(line)
        else:
            self._file.write(line + "\n")


def lines_to(stream: TextIO, clock: Clock | None = None) -> Observer:
    """Plain lines to a stream, flushed one by one so that a pipe sees them as they come."""

    def write(line: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"  # an ASCII console gets `?` for `×`, not a crash
        stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()

    return LogLines(write, clock)


def time_of_day(wall: str) -> str:
    """`12:04:31` of an ISO time, in the machine's time zone."""
    return datetime.fromisoformat(wall).astimezone().strftime("%H:%M:%S")


def trials(record: Record) -> int:
    """Of how many answers `correct` is the right part: those whose score is valid, or the questions where the record
    says no more."""
    return (
        int(record["answers"]) - int(record.get("invalid", 0))
        if "answers" in record
        else int(record.get("questions", 0))
    )


def bounds(record: Record) -> tuple[float, float]:
    """The 95 % interval of a record's accuracy: its own, or Wilson's where an earlier version left none."""
    if record.get("accuracy/low") is not None:
        return float(record["accuracy/low"]), float(record["accuracy/high"])
    return wilson(int(record["correct"]), trials(record))


def several(record: Record) -> str:
    """`95 % 0.086–0.178  pass@4 0.300`: the interval, and the pass@k of all samples where there are several; nothing
    without either."""
    if record.get("accuracy/low") is None:
        return ""
    low, high = bounds(record)
    ks = [int(key.removeprefix("pass@")) for key in record if key.startswith("pass@")]
    return f"95 % {fixed(low, 3)}–{fixed(high, 3)}" + (
        f"  pass@{max(ks)} {fixed(record[f'pass@{max(ks)}'], 3)}" if ks else ""
    )


def model_line(info: RunInfo) -> str:
    return f"{info.model} {magnitude(info.parameters)}" if info.parameters else info.model


def device_line(info: RunInfo) -> str:
    threads = f" {info.threads} thread{'s' * (info.threads != 1)}" if info.threads else ""
    return f"{info.device}{threads} {info.dtype}"


def arithmetic(info: RunInfo) -> str:
    """What a step consists of, once, so that nobody multiplies in his head."""
    sequences = info.prompts * info.completions
    batches = (
        f"{count(info.micro_batches)} micro-batch{'es' * (info.micro_batches != 1)}"
        if info.micro_batches
        else "micro-batches"
    )
    budget = f" ≤ {count(info.tokens_per_micro_batch)} tokens" if info.tokens_per_micro_batch else ""
    updates = f"{count(info.updates)} update{'s' * (info.updates != 1)}"
    return (
        f"step = {count(info.prompts)} prompts × {count(info.completions)} completions = {count(sequences)} sequences"
        f"{besides(info.completions, info.kept, info.at_once)} → {batches}{budget} → {updates}"
    )


def step_line(record: Record, steps: int, left: float | None) -> str:
    """One step: fixed order, fixed width, a unit at each number."""
    width = len(str(steps))
    parts = [
        f"step {record['step']:>{max(width, 3)}}/{steps}",
        f" reward {fixed(record.get('reward/mean')):>5}",
        f"length {fixed(record.get('length/mean'), 1):>5}",
        f"kl {fixed(record.get('approx_kl'), 4):>6}",
        f"masked {percent(record.get('masked_fraction')):>5}",
        prompts_used(record),
        f"gen {rate(record.get('tokens_per_second/generate')):>9}",
        f"train {rate(record.get('tokens_per_second/train')):>9}",
        f"{duration(record.get('time/step')):>5}",
        f"eta {duration(left)}" if left else "",
    ]
    return "  ".join(part for part in parts if part)


def prompts_used(record: Record) -> str:
    """`prompts 63 new + 1 carried in = 16 used + 38 uniform + 10 carried on` where a step used others than it
    generated; else nothing."""
    used, generated, carried = (record.get(f"prompts_{name}") or 0 for name in ("used", "generated", "carried"))
    if used == generated and not carried:
        return ""
    before = carried_in(record)
    came = f"{count(generated)} new" + (f" + {count(before)} carried in" if before else "")
    dropped = [f"{count(n)} {reason.replace('_', ' ')}" for reason, n in dropped_prompts(record).items() if n]
    return f"prompts {came} = " + " + ".join(
        [f"{count(used)} used", *dropped, *([f"{count(carried)} carried on"] if carried else [])]
    )


def dropped_prompts(record: Record) -> dict[str, int]:
    """reason → groups of the step that were dropped whole."""
    mark = "prompts_dropped_"
    return {key.removeprefix(mark): int(value or 0) for key, value in record.items() if key.startswith(mark)}


def carried_in(record: Record) -> int:
    """Groups that the step had from the one before: carried in + generated = used + dropped + carried on."""
    used, generated, carried = (int(record.get(f"prompts_{name}") or 0) for name in ("used", "generated", "carried"))
    return max(0, used + sum(dropped_prompts(record).values()) + carried - generated)


def no_accuracy(record: Record) -> str:
    """Why an evaluation has no accuracy: its scores failed, or no reward says what is right."""
    answers, failed = int(record.get("answers") or 0), int(record.get("invalid") or 0)
    if not failed:
        return "accuracy unknown: no reward says what is right"
    rest = "" if failed == answers else "; of the others no reward says whether they are right"
    return f"accuracy unknown: {count(failed)} of {count(answers)} answers have no score{rest}"


def remaining(steps: list[float], record: Record, info: RunInfo | None) -> float | None:
    """Seconds to go: the median of the last twenty steps, times the steps to come. Evaluations are not counted in."""
    if info is None or not steps or record["step"] >= info.steps:
        return None
    return float(statistics.median(steps[-20:]) * (info.steps - record["step"]))


def closing_line(summary: Record, info: RunInfo | None) -> str:
    """How the run ended, what it gained, and what to do next."""
    status, steps, spent = summary.get("status", "done"), summary.get("steps", 0), duration(summary.get("seconds"))
    of = f" of {info.steps}" if info is not None and steps != info.steps else ""
    whole = info.steps if info is not None else steps
    parts = [f"{status}: {steps}{of} step{'s' * (whole != 1)} in {spent}"]
    evals = summary.get("eval") or {}
    before, after = ((evals.get(label) or {}).get("accuracy") for label in ("before", "after"))
    if before is not None and after is not None:
        parts.append(f"accuracy {fixed(before, 3)} → {fixed(after, 3)} ({signed(after - before)})")
    if summary.get("error"):
        parts.append(printable(str(summary["error"]), 300))
    if status != "done":
        how = "the same command with --resume" if info is None else f"proxima train {quote(str(info.folder))} --resume"
        parts.append(f"go on: {how}")
    elif info is not None:
        parts.append(str(info.folder / "report.html"))
    return "  ".join(parts)


def _ends(left: str, right: str) -> str:
    """`left`, and `right` flush with the right margin; two spaces between them at least."""
    return f"{left}{right:>{max(WIDTH - len(left), len(right) + 2)}}" if right else left
