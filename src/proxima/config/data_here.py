"""Opens the data of a recipe as a run does, as far as they are on this machine: `explain` needs none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxima.config.problems import Problem
from proxima.config.resolved import Resolved
from proxima.config.schema import RunConfig
from proxima.config.sections.data import limits_of, tasks_of
from proxima.data import FieldErrors, MissingDataError, UserError
from proxima.task import TASKS
from proxima.task.held_out_part import SplitTask
from proxima.task.mix import Mix
from proxima.task.opening import open_tasks
from proxima.task.overlaps import overlap_notes
from proxima.task.protocol import Rows


@dataclass(frozen=True)
class DataHere:
    """The rows that could be opened, by the path of their task.

    Args:
        refused: the error with which a run would end at its start; None: there is none.
        notes: the warnings of a run about its rows.
    """

    rows: Mapping[str, Rows] = field(default_factory=dict)
    refused: UserError | None = None
    notes: tuple[str, ...] = ()


def open_data_here(resolved: Resolved[Any], pending: Sequence[Problem]) -> DataHere:
    """Open the tasks that read tables.

    Args:
        pending: what is missing here, as `to_do` says it; tasks that need it are left out.
    """
    config = resolved.config
    tasks = {}
    for path, task in tasks_of(config).items():
        replayed = path == "task" and resolved.get("rollouts")
        incomplete = any(f"{problem.path}.".startswith(f"{path}.") for problem in pending)
        if not (replayed or incomplete) and (_reads_table(task) or _shares(task, config.task)):
            tasks[path] = task
    try:
        rows = open_tasks(tasks, config.seed, may_skip=not isinstance(config, RunConfig))
    except UserError as error:
        return DataHere(refused=_as_refusal(error, resolved))
    except (ValueError, OSError, ImportError, AttributeError):  # said where the length of the prompts is read
        return DataHere()
    notes = overlap_notes(tasks, rows, limits_of(config))
    return DataHere(rows=rows, notes=tuple(notes))


def _as_refusal(error: UserError, resolved: Resolved[Any]) -> UserError | None:
    """The error with the places of its values, without what it says of missing data; None if it says nothing else."""
    if isinstance(error, MissingDataError):
        return None
    if isinstance(error, FieldErrors):
        wrong = [one for one in error.errors if not isinstance(one, MissingDataError)]
        if not wrong:
            return None
        error = FieldErrors(*wrong)
    try:
        with resolved.locating():
            raise error
    except UserError as located:
        return located


def _reads_table(task: Any) -> bool:
    """True for tasks that read local files, or combine tasks."""
    return isinstance(task, Mix) or TASKS.holds(task, "csv", "files", "jsonl", "parquet", "prepared")


def _shares(task: Any, trained: Any) -> bool:
    """True for both parts of a split task."""
    return isinstance(task, SplitTask) and isinstance(trained, SplitTask) and task.shares_data(trained)
