"""Reads runs and evaluations back from their folders, as DataFrames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.config.families import OFFLINE, Family
from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.data.json_reader import load_json
from proxima.experiments.run_reader import Run, read_mapping, read_run
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.runtime.state.rollouts import read_table
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.runtime.watch.observer import Record
from proxima.view.log_lines import closing_line
from proxima.view.report import write_report

if TYPE_CHECKING:
    from pandas import DataFrame

JSON_COLUMNS = ("answer", "metadata", "parts", "players")


@dataclass(frozen=True, repr=False)
class SavedRun:
    """A run, read from its folder at each access, so it may still be running.

    Proxima's documentation of the run folder describes every metric and column. Tables need pandas.

    Raises: UserError if a file of the run is damaged, or a table is read without pandas.
    """

    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """The resolved recipe, nested: `run.config["train"]["steps"]`."""
        return dict(self._run.recipe)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: status, accuracy before and after, speed, links; empty while the run is running."""
        return dict(self._run.summary)

    @property
    def status(self) -> str:
        """`done`, `stopped`, `failed`, or `unfinished`: running, or killed."""
        return self._run.status

    @property
    def metrics(self) -> "DataFrame":
        """A row for each step and a column for each metric; other frameworks' names work too:
        `run.metrics["actor/ppo_kl"]`."""
        return _by_step(self._run.train)

    @property
    def evaluations(self) -> "DataFrame":
        """A row for each held-out evaluation: `label` (before, step, after), accuracy with its interval, lengths."""
        return _by_step(self._run.evals)

    def rollouts(self, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> "DataFrame":
        """A row for each completion of the training steps: what was generated, and how it was used.

        Args:
            steps: numbers of steps; None: all.
            columns: names of columns; None: all. Tokens and log-probs are arrays with a number for each token.

        Raises:
            UserError: the run trained on a fixed data set and generated nothing; or it has no such step or column.
        """
        family = self._offline
        if family is not None:
            remedy = ".metrics and .evaluations have its figures"
            if family.samples:
                remedy += ", .answers() the samples of its evaluations"
            what = f"{self.folder} is a run with a section {family.own!r}: it trained on the rows of its data set"
            raise UserError(f"{what}, and has no rollouts", remedy=remedy)
        files = {int(file.stem): file for file in sorted(self._files.rollouts.glob("[0-9]*.parquet"))}
        if steps is None:
            return self._completions(list(files.values()), columns)
        for step in steps:
            if step not in files:
                stored = f"has those of steps {min(files)} to {max(files)}" if files else "has none yet"
                raise UserError(f"{self.folder} has no rollouts of step {step}; it {stored}")
        return self._completions([files[step] for step in sorted(set(steps))], columns)

    def answers(self, columns: Sequence[str] | None = None, *, held_out: str = "") -> "DataFrame":
        """A row for each answer of the held-out evaluations; the column `step` identifies the evaluation.

        Args:
            columns: as for `rollouts`.
            held_out: a name of `eval.sets`; empty: the set of `eval.task`.

        Raises:
            UserError: the run trained on a fixed data set and its evaluations generate no answers; or it has no such
                set or column.
        """
        family = self._offline
        if family is not None and not family.samples:
            what = f"{self.folder} is a run with a section {family.own!r}, whose evaluations generate no answers"
            raise UserError(what, remedy=".evaluations has their figures")
        files = self._files.eval_files(held_out)
        if held_out and not files:
            what = f"held_out={held_out}: {self.folder} has no held-out set of that name"
            sets = self._files.eval_sets()
            remedy = suggestion(held_out, sets) if sets else "leave it out for those of eval.task"
            raise UserError(what, remedy=remedy)
        return self._completions(files, columns)

    @property
    def report(self) -> Path:
        """The path of report.html, which is written now if it is missing, for example after a kill."""
        if not self._files.report.is_file():
            write_report(self.folder)
        return self._files.report

    def model(self, checkpoint: str | int = "last") -> Path:
        """The folder with the weights of a checkpoint (`last`, `best`, or a step), for `AutoModel.from_pretrained`.

        Raises:
            UserError: there is no such checkpoint.
        """
        return find_checkpoint(self.folder, str(checkpoint)).model

    def __repr__(self) -> str:
        summary = self.summary
        state = closing_line(summary, None) if summary else self.status
        return f"<run {self.folder}  {state}>"

    @property
    def _offline(self) -> Family | None:
        """The family of a run on a fixed data set; None for a run with rewards."""
        return next((family for family in OFFLINE if family.own in self.config), None)

    @property
    def _run(self) -> Run:
        return read_run(self.folder, empty=True)

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.folder)

    @staticmethod
    def _completions(files: Sequence[Path], columns: Sequence[str] | None) -> "DataFrame":
        import pyarrow as pa
        import pyarrow.parquet as pq

        if files and columns is not None:
            stored = pq.read_schema(files[0]).names
            unknown = [name for name in columns if name not in stored]
            if unknown:
                raise UserError(f"{files[0]} has no column {unknown[0]!r}", remedy=suggestion(unknown[0], stored))
        tables = [read_table(file, columns) for file in files]
        if tables:
            return _parsed(pa.concat_tables(tables))
        return _frame([])


@dataclass(frozen=True, repr=False)
class SavedEvaluation:
    """An evaluation, read from its folder at each access. Proxima's documentation of evaluation describes the files.
    Tables need pandas."""

    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        """result.json: figures with their intervals, sampling, prompt, rewards, versions, hashes of model and data."""
        return read_mapping(self.folder / "result.json")

    @property
    def figures(self) -> "DataFrame":
        """A row for each figure of each set (accuracy, mean@8, pass@4, …): `set`, `figure`, `value`, `low`, `high`,
        `method`, `questions`."""
        rows = []
        for name, suite in self.result["suites"].items():
            for figure, facts in suite["estimates"].items():
                rows.append({"set": name, "figure": figure, **facts})
        return _frame(rows)

    @property
    def answers(self) -> "DataFrame":
        """A row for each answer; the column `set` names its set."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = []
        for name in self.result["suites"]:
            table = pq.read_table(self.folder / f"{name}.parquet", partitioning=None)
            tables.append(table.add_column(0, "set", pa.array([name] * len(table), pa.string())))
        return _parsed(pa.concat_tables(tables))

    def __repr__(self) -> str:
        suites: Mapping[str, Any] = self.result["suites"]
        first = {name: next(iter(suite["estimates"].items()), None) for name, suite in suites.items()}
        figures = [f"{name} {pair[0]} {pair[1]['value']:.3f}" for name, pair in first.items() if pair]
        return f"<evaluation {self.folder}  {'  '.join(figures)}>"


def load_run(folder: str | Path) -> SavedRun:
    """Open a run by its folder; UserError if the folder contains no run."""
    return SavedRun(existing_run(Path(folder).expanduser()).path)


def _by_step(records: Sequence[Record]) -> "DataFrame":
    _pandas()

    from proxima.api.metrics_frame import MetricsFrame  # derives from a class of pandas

    frame = MetricsFrame(records).drop(columns="kind", errors="ignore")
    return frame.set_index("step") if records else frame


def _frame(records: Sequence[Record]) -> "DataFrame":
    return _pandas().DataFrame(records)


def _parsed(table: Any) -> "DataFrame":
    """Convert an Arrow table to a DataFrame, with the columns of JSON texts parsed."""
    _pandas()
    frame = table.to_pandas()
    for name in JSON_COLUMNS:
        if name in frame:
            frame[name] = frame[name].map(load_json)
    return frame


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("tables need the package pandas: pip install 'proxima-rl[notebook]'") from None
    return pandas
