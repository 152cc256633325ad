"""All observers of a training run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from proxima.core.hold import COUNTED, REJECTED
from proxima.rollout.episodes.figures import OTHER_FORMAT
from proxima.runtime.watch.clock import Clock
from proxima.runtime.watch.observer import Observer, Record, RunInfo, Stage, Tee, WarningList, warning_kind
from proxima.runtime.watch.step_notes import VARIED
from proxima.view.episode_lines import limits_reached
from proxima.view.formatting import fixed, percent, write_safely
from proxima.view.log_lines import LogFile, LogLines
from proxima.view.microscope.viewer_process import ViewerObserver
from proxima.view.report import write_report
from proxima.view.stage_progress import StageProgress
from proxima.view.trackers.protocol import Tracker
from proxima.view.trackers.tracker_observer import TrackerObserver

REPEAT = 10  # steps after which the warning about a lasting state is repeated


class RunViews(Tee):
    """All observers of a training run: report.html at the end, log.txt, and the `screen`.

    The report precedes the screen, so that it exists when the screen's last line names it. `run_folder` is known after
    `started`.

    Args:
        stream: stream of the screen; None: no output.
        notes: warnings of the config, issued after the run has started, so that they are in its log, too.
        trackers: `config.monitor`. They come first, since they may warn at the end of the run.
        view: `config.view`: serve the run's page while it runs.
    """

    def __init__(
        self, stream: TextIO | None, notes: Sequence[str] = (), trackers: Sequence[Tracker] = (), view: bool = False
    ) -> None:
        observers: list[Observer] = []
        for tracker in trackers:
            observers.append(TrackerObserver(tracker, self.warning))
        if view:
            observers.append(ViewerObserver(stream))
        observers += [ReportFile(), LogFile()]
        if stream is not None:
            observers.append(lines_to(stream))
        super().__init__(*observers)
        self.notes = notes
        self.run_folder: Path | None = None
        self._warnings = WarningList()
        self._step = 0
        self._printed: dict[str, int] = {}  # kind of a lasting state → step of its last warning

    def started(self, info: RunInfo) -> None:
        self.run_folder = info.folder
        self._step = info.resumed_at
        super().started(info)
        if info.resumed_at < info.steps:  # for a finished run they are not news
            for note in self.notes:
                self.warning(note)

    def step(self, record: Record) -> None:
        self._step = int(record["step"])
        super().step(record)
        for text in warnings_about(record):
            self.lasting(text)

    def warning(self, text: str) -> None:
        self._warnings.add(text, self._step)
        super().warning(text)

    def lasting(self, text: str) -> None:
        kind = warning_kind(text)
        if self._step - self._printed.get(kind, self._step - REPEAT) >= REPEAT:
            self._printed[kind] = self._step
            self.warning(text)
        else:
            self._warnings.add(text, self._step)

    def warned(self) -> Sequence[Record]:
        return self._warnings.records()


class ReportFile(Observer):
    """Writes report.html when the run ends, in success or failure."""

    def __init__(self) -> None:
        self._info: RunInfo | None = None

    def started(self, info: RunInfo) -> None:
        self._info = info

    def ending(self) -> Mapping[str, str]:
        if self._info is None:
            return {}
        return {"report": str(self._info.folder / "report.html")}

    def finished(self, summary: Record) -> None:
        if self._info is not None:
            write_report(self._info.folder)


class TerminalLines(LogLines):
    """Writes the lines to a terminal, above the progress of the current stage."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stage = StageProgress(stream, clock)
        super().__init__(self._stage.write, clock)

    def progress(self, stage: Stage, done: int, total: int, unit: str) -> None:
        if self._info is None:  # an error before the run starts should appear alone
            super().progress(stage, done, total, unit)
        else:
            self._stage.update(stage, done, total, unit)


def lines_to(stream: TextIO, clock: Clock | None = None) -> Observer:
    """Write the lines to a stream, flushing each."""
    if stream.isatty():
        return TerminalLines(stream, clock)
    return LogLines(lambda line: write_safely(stream, f"{line}\n"), clock)


def warnings_about(record: Record) -> list[str]:
    """Return the warnings about a `train` record."""
    texts = [rule(record) for rule in RULES]
    return [text for text in texts if text is not None]


def nothing_learned(record: Record) -> str | None:
    if not record.get("updates") or record.get("tokens/trained") != 0:
        return None
    moved = "only momentum moved the weights (train.on_zero_gradient=skip keeps them)"
    if record.get("updates/skipped"):
        weights = "the weights are unchanged"
    else:
        weights = moved
    reward = fixed(record.get("reward/mean"))
    text = f"every advantage is 0 (mean reward {reward}), so the step taught nothing and {weights}"
    remedy = VARIED
    unread = any(key.startswith(OTHER_FORMAT) for key in record)  # has its own warning
    if "episode/cut" in record and not record.get("reward/mean") and not unread:
        sources = "get_reward, reward or Reply.reward; an agent returns it"
        remedy = f"check that the environment gives a reward ({sources}), or {remedy}"
    return f"{text}; {remedy}"


def often_truncated(record: Record) -> str | None:
    share = record.get("truncated_fraction") or 0.0
    text = "completions reached the length limit, often before their answer; while a model learns to be brief this is "
    text += "expected and fades, otherwise raise sampling.max_tokens"
    if "episode/cut" in record:
        text = f"episodes reached {limits_reached(share, record, 'sampling.max_tokens')}"
    if share > 0.5:
        return f"{percent(share)} of the {text}"
    return None


def mostly_masked(record: Record) -> str | None:
    # what is rejected has its own warning; top_entropy masks intentionally
    rejected = record.get(COUNTED, record.get(REJECTED)) or 0.0
    share = (record.get("masked_fraction") or 0.0) - rejected
    remedy = "lower train.optimizer.lr or train.updates_per_step, or widen the region"
    text = f"{percent(share)} of the tokens left the trust region and were masked, so little is learned from them"
    return f"{text}; {remedy}" if share > 0.5 else None


RULES: tuple[Callable[[Record], str | None], ...] = (nothing_learned, often_truncated, mostly_masked)
