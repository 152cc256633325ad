"""A training run as lines of text: printed, on a terminal above the progress of the stage, and written to log.txt.

12:04:31  proxima 0.2.0  cppo  SmolLM2-135M-Instruct 134.5 M  cpu 2 threads bfloat16  seed 1      runs/add-7f3c
12:04:31  step = 8 prompts × 8 completions = 64 sequences → 2 micro-batches ≤ 2,048 tokens → 1 update
12:04:31  auto   model.compute_dtype and engine.dtype = bfloat16: bfloat16 products are 2.4 × as fast on this processor
12:04:49  eval  before   accuracy 0.125   25/200                                                           18 s
12:04:53  step   1/40   reward 0.17  length 8.1  kl 0.0002  gen 290 tok/s  mfu 31.4 %  4.1 s  eta 2m 40s
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from io import FileIO
from shlex import quote
from typing import Any, NamedTuple

from proxima.config.outcomes import outcome_lines
from proxima.config.sections.placement import STARTED_AGAIN, is_supervised
from proxima.data.errors import counted
from proxima.data.flow import Group
from proxima.data.players import NO_ROLES
from proxima.evaluation.headline import ACCURACY, Headline
from proxima.evaluation.held_out import named_sets
from proxima.runtime.placement.launcher import is_rank
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, Record, RunInfo, Stage
from proxima.runtime.watch.step_notes import seconds_left
from proxima.system.full_disk import is_disk_full
from proxima.view.formatting import (
    NONE,
    PATIENCE,
    count,
    duration,
    fixed,
    gibibytes,
    magnitude,
    percent,
    printable,
    rate,
    signed,
    significant,
)

WIDTH = 112  # columns of a line with a right-aligned end
AT_ONCE: dict[Stage, str] = {  # reported at once, before the run starts
    "check": "checking recipe and data",
    "tokenize": "tokenizing",
    "load": "loading model",
}
SAMPLE = 120  # characters of a held-out prompt, and of its completion, in the log
SEE_ERRORS = "; why: `error` in evals/*.parquet"


class StepFigure(NamedTuple):
    """A number of a step's record, and how it is written."""

    label: str
    key: str
    write: Callable[[float | None], str]
    width: int = 0  # of its column in the lines; 0: without a column, shown only if the step has recorded it


DEVICE_FIGURES = (  # of a step that moves the weights
    StepFigure("per device", "tokens_per_second/device", rate),
    StepFigure("mfu", "device/mfu", percent),
    StepFigure("memory", "device/memory_allocated", gibibytes),
    StepFigure("planned", "device/memory_planned", gibibytes),
)
ROLLOUT_FIGURES = (  # of a step that generates what it trains on
    StepFigure("reward", "reward/mean", fixed, 5),
    StepFigure("length", "length/mean", lambda v: fixed(v, 1), 5),
    StepFigure("turns", "episode/turns/mean", lambda v: fixed(v, 1)),
    StepFigure("failed", "episode/failed", count),
    StepFigure("kl", "approx_kl", lambda v: fixed(v, 4), 6),
    StepFigure("masked", "masked_fraction", percent, 5),
    StepFigure("explained", "value/explained_variance", fixed),
    StepFigure("gen", "tokens_per_second/generate", rate, 9),
    StepFigure("train", "tokens_per_second/train", rate, 9),
    *DEVICE_FIGURES,
)
ASYNC_FIGURES = (  # of one that generates during training
    StepFigure("queue", "async/queue", count),
    StepFigure("running", "async/running", count),
    StepFigure("oldest", "age/max", count),
    StepFigure("trainer idle", "idle/trainer", percent),
    StepFigure("engine idle", "idle/engine", percent),
)
EXAMPLE_FIGURES = (  # of one on a fixed data set
    StepFigure("loss", "loss", lambda v: fixed(v, 4), 6),
    StepFigure("accuracy", "accuracy", lambda v: fixed(v, 3)),
    StepFigure("grad norm", "grad_norm", lambda v: fixed(v, 3), 6),
    StepFigure("lr", "lr", lambda v: f"{v or 0:.2e}", 8),
    StepFigure("epoch", "epoch", lambda v: fixed(v, 3), 5),
    StepFigure("train", "tokens_per_second/train", rate, 9),
    *DEVICE_FIGURES,
)


class LogLines(Observer):
    """Reports the run in lines with fixed order, width and units, stamped with the local time of day. `write` receives
    each line without its newline."""

    def __init__(self, write: Callable[[str], None], clock: Clock | None = None) -> None:
        self._write = write
        self._clock = clock or Clock()
        self._info: RunInfo | None = None
        self._steps: list[float] = []
        self._evals: list[Record] = []
        self._last_output = self._clock.now()
        self._announced = set[Stage]()

    def started(self, info: RunInfo) -> None:
        self._info = info
        self._line(_justified(header(info), str(info.folder)))
        self._line(f"step = {info.composition}")
        for part in info.parts:
            self._line(printable(part))
        for line in outcome_lines(info.chosen):
            self._line(f"auto   {printable(line)}")
        if info.resumed_at:
            records = RunFolder(info.folder).read_metrics()  # up to the step after which it resumes
            self._evals = [record for record in records if record["kind"] == "eval"]
            self._line(resumed(info))

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if stage in AT_ONCE and stage not in self._announced and self._info is None:
            self._announced.add(stage)
            self._line(AT_ONCE[stage])
        elif self._clock.now() - self._last_output >= PATIENCE:
            self._line(f"      {stage}  {count(done)}/{count(total)} {unit}")

    def evaluated(self, record: Record) -> None:
        label = str(record.get("label", "step"))
        name = label if label != "step" else f"step {record['step']}"
        self._evals.append(record)
        headline = Headline.of(self._evals)
        value = headline.value(record)
        parts = [f"eval  {name:<8} {headline.name} {fixed(value, 3)}"]
        if value is not None:
            parts.append(f"{of_questions(record, headline):>7}")
        parts.append(sampling_figures(record, headline))
        first = self._evals[0]
        if first.get("label") == "before" and label != "before":
            before = headline.value(first)
            if value is not None and before is not None:
                parts.append(signed(value - before))
        invalid = record.get("invalid")
        if value is None or (headline.key != ACCURACY and invalid):
            why = why_unknown(record)
            if invalid:
                why += SEE_ERRORS
            parts.append(why)
        took = duration(record["time/evaluate"]) if "time/evaluate" in record else ""
        self._line(_justified("  ".join(filter(None, parts)), took))
        if named_sets(record):
            for line in set_lines(record):
                self._line(line)

    def sampled(self, groups: Sequence[Group]) -> None:
        for group in groups:
            texts = group.prompt.question, group.completions[0].text
            shown = (printable(" ".join(text.split()), SAMPLE) for text in texts)
            self._line(f"      sample  {' → '.join(shown)}")

    def step(self, record: Record) -> None:
        self._steps.append(float(record.get("time/step") or 0.0))
        steps = self._info.steps if self._info else 0
        left = seconds_left(self._steps, max(0, steps - int(record["step"])))
        self._line(step_line(record, steps, left))

    def synced(self, record: Record) -> None:
        for note in record.get("notes", ()):
            self._line(f"      {printable(note)}")
        self._line(f"      {sync_line(record)}")

    def warning(self, text: str) -> None:
        self._line(f"WARNING {printable(text)}")

    def finished(self, summary: Record) -> None:
        self._line(closing_line(summary, self._info))

    def _line(self, text: str) -> None:
        self._last_output = self._clock.now()
        self._write(f"{time_of_day(self._clock.wall())}  {text}".rstrip())


class LogFile(LogLines):
    """Appends the lines to log.txt of the run folder, unbuffered. Lines written before `started` or while the disk is
    full are held back until they can be written."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._file: FileIO | None = None
        self._unwritten = b""
        super().__init__(self._append, clock)

    def started(self, info: RunInfo) -> None:
        self._file = (info.folder / "log.txt").open("ab", buffering=0)
        date = datetime.fromisoformat(self._clock.wall()).astimezone().strftime("%Y-%m-%d, UTC%z")
        self._unwritten = f"{date}\n".encode() + self._unwritten  # the lines have only the time of day
        super().started(info)

    def finished(self, summary: Record) -> None:
        super().finished(summary)
        if self._file is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        self._unwritten += f"{line}\n".encode(errors="replace")
        try:
            while self._file is not None and self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not is_disk_full(error):
                raise


def time_of_day(wall: str) -> str:
    """`12:04:31`: the time of day of an ISO time, in the local time zone."""
    return datetime.fromisoformat(wall).astimezone().strftime("%H:%M:%S")


def of_questions(record: Record, headline: Headline) -> str:
    """`25/200`: correct of the judged answers; `200 questions` if the figure is not the accuracy; `12 examples` if the
    accuracy is not such a share: KTO has no pairs to count, and a tie in DPO counts half."""
    judged = int(record.get("answers", 0)) - int(record.get("invalid", 0))
    right = record.get("correct", 0)
    share = "examples" not in record or (judged and math.isclose(record[ACCURACY], right / judged))
    if headline.key == ACCURACY and share:
        return f"{right}/{judged}"
    if "examples" in record:
        return f"{count(record['examples'])} examples"
    return f"{count(record.get('questions'))} questions"


def sampling_figures(record: Record, headline: Headline) -> str:
    """`95 % 0.086–0.178  pass@4 0.300`: the interval, and pass@k with several samples; empty without an interval."""
    bounds = headline.bounds(record)
    if bounds is None:
        return ""
    low, high = bounds
    between = " to " if low < 0 else "–"  # no dash next to a minus sign
    text = f"95 % {fixed(low, 3)}{between}{fixed(high, 3)}"
    ends = [key.removeprefix("pass@") for key in record]
    ks = [int(end) for end in ends if end.isdecimal()]
    if ks:
        text += f"  pass@{max(ks)} {fixed(record[f'pass@{max(ks)}'], 3)}"
    return text


def header(info: RunInfo) -> str:
    """`proxima 0.2.0  cppo  SmolLM2-135M-Instruct 134.5 M  cpu 2 threads bfloat16  seed 1`."""
    parts = [f"proxima {info.version}", info.algorithm]
    if info.replay_of is not None:
        parts.append(f"replay of {printable(str(info.replay_of))}")
    model = info.model
    if info.parameters:
        model += f" {magnitude(info.parameters)}"
    if info.adapter:
        model += f" + LoRA {magnitude(info.adapter)}"
    device = info.device
    if info.threads:
        device += f" {counted(info.threads, 'thread')}"
    parts += [model, f"{device} {info.dtype}", f"seed {info.seed}"]
    return "  ".join(parts)


def resumed(info: RunInfo) -> str:
    """Report the step after which the run resumes, or that it had already finished, and how to train further."""
    if info.resumed_at < info.steps:
        return f"resumed after step {info.resumed_at}/{info.steps}"
    plural = "" if info.resumed_at == 1 else "s"
    return f"already finished: {info.resumed_at} step{plural}; raise train.steps to continue"


def step_line(record: Record, steps: int, left: float | None) -> str:
    """Format a step: fixed order, fixed width, every number with its unit."""
    parts = [f"step {record['step']:>{max(len(str(steps)), 3)}}/{steps} "]
    for figure in step_figures(record):
        value = record.get(figure.key)
        if figure.width or value is not None:
            parts.append(f"{figure.label} {figure.write(value):>{figure.width}}")
    parts.append(prompts_used(record))
    if record.get("early_stop/stopped"):
        kl = fixed(record.get("early_stop/kl"), 4)
        parts.append(f"stopped after epoch {record['early_stop/epochs']:.0f}, kl {kl}")
    parts.append(f"{duration(record.get('time/step')):>5}")
    if left:
        parts.append(f"eta {duration(left)}")
    return "  ".join(filter(None, parts))


def step_figures(record: Record) -> list[StepFigure]:
    """Return the figures of a step, those of its roles among them."""
    figures = list(EXAMPLE_FIGURES if "examples" in record else ROLLOUT_FIGURES)
    for key in record:
        prefix, _, role = key.partition("/")
        if prefix == "reward" and role and role.partition("/")[0] not in NO_ROLES:
            figures.append(StepFigure(role, key, fixed))
    if "async/queue" in record:
        figures += ASYNC_FIGURES
    return figures


def prompts_used(record: Record) -> str:
    """`prompts 63 new + 1 carried in = 16 used + 38 uniform + 10 carried over`; empty if the step used exactly the
    prompts that it generated. What the previous step left is not recorded, but both sides are the same number."""
    used = int(record.get("prompts_used") or 0)
    generated = int(record.get("prompts_generated") or 0)
    carried = int(record.get("prompts_carried") or 0)
    if used == generated and not carried:
        return ""
    mark = "prompts_dropped_"  # as a whole, by reason
    dropped = {key.removeprefix(mark): int(value or 0) for key, value in record.items() if key.startswith(mark)}
    carried_in = max(0, used + sum(dropped.values()) + carried - generated)
    given = [f"{count(generated)} new"]
    if carried_in:
        given.append(f"{count(carried_in)} carried in")
    taken = [f"{count(used)} used"]
    taken += [f"{count(number)} {reason.replace('_', ' ')}" for reason, number in dropped.items() if number]
    if carried:
        taken.append(f"{count(carried)} carried over")
    return f"prompts {' + '.join(given)} = {' + '.join(taken)}"


def why_unknown(record: Record) -> str:
    """Explain why an evaluation has no figure, or not for all answers: scores failed, or no reward gives the figure."""
    failed = int(record.get("invalid") or 0)
    if failed:
        return f"{count(failed)} of {count(int(record.get('answers') or 0))} answers have no score"
    return "no reward gives it"


def closing_line(summary: Record, info: RunInfo | None) -> str:
    """Report how the run ended, its gain, and what to do next."""
    status = summary.get("status", "done")
    steps = summary.get("steps", 0)
    spent = duration(summary.get("seconds"))
    planned = info.steps if info is not None else steps
    of = f" of {planned}" if steps != planned else ""
    plural = "" if planned == 1 else "s"
    parts = [f"{status}: {steps}{of} step{plural} in {spent}"]
    evals = summary.get("eval") or {}
    before = (evals.get("before") or {}).get("value")
    after = (evals.get("after") or {}).get("value")
    if before is not None and after is not None:
        parts.append(f"{evals['after']['metric']} {fixed(before, 3)} → {fixed(after, 3)} ({signed(after - before)})")
    if summary.get("plateau"):
        parts.append(printable(str(summary["plateau"]), 300))
    if summary.get("error"):
        parts.append(printable(str(summary["error"]), 300))
    if status != "done":
        how = "the same command with --resume"
        launched = is_rank() and not is_supervised()  # a resume needs the same launcher
        if info is not None and not launched:
            how = f"proxima train {quote(str(info.folder))} --resume"
        error = str(summary.get("error"))
        names_next_step = any(word in error for word in ("--resume ", STARTED_AGAIN))
        if summary.get("resumable", True) and not names_next_step:
            parts.append(f"resume: {how}")
    elif info is not None:
        parts.append(str(info.folder / "report.html"))
    links = summary.get("links") or {}
    parts += [f"{name}: {printable(link, 300)}" for name, link in links.items() if name != "report"]
    return "  ".join(parts)


def _justified(left: str, right: str) -> str:
    """Put `left` and `right` on a line, `right` at the right margin, at least two spaces apart."""
    if right:
        return f"{left}{right:>{max(WIDTH - len(left), len(right) + 2)}}"
    return left


def sync_line(record: Record) -> str:
    """`weights of version 3 at 2 servers: probe mean 0.00021 max 0.0031 nats (bounds 0.02 and 0.2)  1.2 s after 0.9 s
    to prepare`: the engine's measurements of the weights that it received."""
    servers = counted(int(record.get("sync/replicas") or 1), "server")
    mean = significant(record.get("sync/probe_mean"))
    most = significant(record.get("sync/probe_max"))
    measured = f"weights of version {record['version']} at {servers}: probe mean {mean} max {most} nats"
    bounds = [record[key] for key in ("sync/bound_mean", "sync/bound_max") if key in record]
    if bounds:
        measured += f" (bounds {' and '.join(map(significant, bounds))})"
    took = duration(record.get("sync/seconds"))
    before = record.get("sync/prepare_seconds")
    if before is not None:
        took += f" after {duration(before)} to prepare"
    parts = [measured, took]
    spent = [f"{name} {duration(seconds)}" for name, seconds in sync_parts(record).items()]
    if spent:
        parts.append(f"({' + '.join(spent)})")
    return "  ".join(parts)


def sync_parts(record: Record) -> dict[str, float]:
    """Return the seconds of the parts of a weight sync at the servers, by their names: `send`, `probe` and whatever
    else the engine measures."""
    parts = {}
    for key, value in record.items():
        name = key.removeprefix("sync/").removesuffix("_seconds")
        if key == f"sync/{name}_seconds" and name != "prepare":
            parts[name] = value
    return parts


def figure_text(record: Mapping[str, Any]) -> str:
    """Format the figure of a set's record: `0.450 (95 % 0.258–0.658)`."""
    headline = Headline.of([record])
    text = fixed(headline.value(record), 3)
    bounds = headline.bounds(record)
    if bounds is None:
        return text
    low, high = bounds
    return f"{text} (95 % {fixed(low, 3)}–{fixed(high, 3)})"


def set_lines(record: Record) -> list[str]:
    """Return a log line for each set: `      math500  accuracy 0.450 (95 % 0.258–0.658)  20 questions`."""
    sets = named_sets(record)
    width = max(map(len, sets), default=0)
    return [
        f"      {name:<{width}} {Headline.of([result]).name} {figure_text(result)}  {result['questions']} questions"
        for name, result in sets.items()
    ]


def sets_table(evals: Sequence[Record]) -> list[dict[str, str]]:
    """Return a row for each set: its name, its questions, and its figure in the first and the last evaluation."""
    by_name: dict[str, list[Record]] = {}
    for record in evals:
        for name, result in named_sets(record).items():
            by_name.setdefault(name, []).append(result)
    rows = []
    for name, results in by_name.items():
        first = figure_text(results[0])
        last = figure_text(results[-1]) if len(results) > 1 else NONE
        questions = str(results[-1]["questions"])
        figure = Headline.of(results).name
        rows.append({"name": name, "figure": figure, "questions": questions, "first": first, "last": last})
    return rows
